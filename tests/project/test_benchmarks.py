"""Every ``python -m benchmarks.NAME`` runs, in its tiny form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import ROOT, ForkServer

MAIN = '__name__ == "__main__"'
TINY = {
    "aggregate": "--clients 2 --parameters 1000 --prototypes 8",
    "aggregation_weights": "--clients 2 --examples 16 --epochs 1 --net mlp --side 8 --repeats 1",
    "commands": "--repeats 1",
    "costs": "--nets mlp --heads 2x4 --steps mlp --turns 1",
    "floor": "2 1000 3 1 duties",
    "forecast": "fedavg --set schedule.rounds=1 --set data.max_per_class=60",
    "memory": "--hidden 8 --rounds 3",
    "overhead": "--clients 2 --rounds 4",
    "reductions": "--clients 7 --parameters 1000",
    "relays": "--clients 4 --relays 2 --rounds 4",
    "scale": "--clients 2 --widths --classes 3 --populations 4 --cohort 2 --rounds 4",
    "secure_sum": "--clients 3 --parameters 100 --gone 0",
    "sides": "--clients 2 --sides 2 auto --turns 1 --rounds 4",
    "small_site": "--nets mlp --most 200",
    "transport": "--megabytes 1 --repeats 3 --clients 1",
}

ELSEWHERE = {
    "attacks": "tests/project/test_attacks.py",
    "deciding": "tests/project/test_deciding.py",
    "embeddings": "tests/project/test_pictures_of_papers.py",
    "fid": "tests/project/test_pictures_of_papers.py",
    "gpu": "tests/project/test_benchmarks_gpu.py",
    "leakage": "tests/project/test_attacks.py",
    "light": "tests/links/test_load.py",
    "paired": "tests/project/test_paired_costs.py",
    "papers": "tests/project/test_papers.py",
    "privacy_audit": "tests/project/test_privacy_audit.py",
    "pfllib": "tests/project/test_pfllib.py",
    "prototype_convergence": "tests/project/test_pictures_of_papers.py",
    "records": "tests/project/test_records.py",
    "serving": "fedplugins/serving/tests/test_serving.py",
    "training": "tests/project/test_benchmarks_gpu.py",  # its rows of steps; rounds as in "sides"
    "year": "tests/project/test_year.py",  # the tiny form takes 13 seconds of the processor
}
"""Who else uses the functions of a benchmark: its parts run there, its command does not."""
NOWHERE = {
    "asynchronous": "clients that are slow on purpose: ten minutes",
    "drift": "people of three recordings: minutes",
    "drift_changes": "people of three recordings: minutes",
    "flower_noop": "needs Flower",
    "generators": "needs Fashion-MNIST, and minutes",
    "links": "a link of 20 kbit/s: ten minutes, and a kernel that limits it",
    "load": "a client that is stopped is waited for: half a minute",
    "peer": "needs Flower",
    "pfl_noop": "needs pfl",
    "pretrained": "needs CIFAR-100, and hours",
    "streams": "26 moments of ten methods: minutes",
}


def test_every_benchmark_is_named():
    root = ROOT / "benchmarks"
    files = [*root.glob("*.py"), *root.glob("*/__main__.py")]
    have = {
        f.parent.name if f.stem == "__main__" else f.stem for f in files if MAIN in f.read_text()
    }
    assert have - {"benchmarks"} == {*TINY, *ELSEWHERE, *NOWHERE}
    for name, file in ELSEWHERE.items():
        text = (ROOT / file).read_text()
        assert f"benchmarks.{name}" in text or f"{name}" in text.partition("benchmarks import")[2]


@pytest.mark.loopback
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_runs_and_so_do_its_children(name, fork_server: ForkServer, tmp_path: Path):
    log, program = tmp_path / "said.log", "tests.project.tiny_benchmarks:main"
    run = fork_server.called(program, [name, *TINY[name].split()], ROOT, log)
    assert run.wait() == 0, log.read_text()[-3000:]
