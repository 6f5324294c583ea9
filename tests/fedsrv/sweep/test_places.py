"""Where the runs of a sweep go; Slurm's jobs run as processes here, through submitit."""

from __future__ import annotations

import importlib.util
import json
import os
from functools import partial
from pathlib import Path

import pytest
import tomli_w

from fedmodels.errors import ConfigError
from fedsrv.sweep import places
from fedsrv.sweep.places import place_of, slurm_jobs
from fedsrv.sweep.plan import Sweep
from fedsrv.sweep.sweeping import run_sweep
from tests.conftest import TABLES

NEEDS_SUBMITIT = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None,
    reason="needs submitit: pip install 'fedtide[slurm]'",
)


@pytest.mark.parametrize(
    ("on", "jobs", "given", "line"),
    [
        (None, 1, ["num_cpus=1"], "--resource needs --on ray or --on slurm"),
        ("ray", None, ["num_cpus"], r"--resource 'num_cpus' is not KEY=VALUE"),
        ("ray", 2, [], "--jobs does not go with --on ray"),
        ("rya", None, [], "--on 'rya' is neither slurm, ray nor ray://HEAD:PORT"),
        ("ray://head", None, [], "--on ray:// 'head' is not HOST:PORT"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    on: str, jobs: int, given: list[str], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=line), place_of(on, jobs, given, tmp_path, print):
        pass


@pytest.mark.parametrize(("on", "extra"), [("ray", "ray"), ("slurm", "slurm")])
def test_a_missing_extra_is_one_line(
    on: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError

    monkeypatch.setattr("importlib.import_module", missing)
    with (
        pytest.raises(ConfigError, match=rf"pip install 'fedtide\[{extra}\]'"),
        place_of(on, None, [], tmp_path, print),
    ):
        pass


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Return a sweep of one method with two seeds, a round each."""
    tables = {**TABLES, "schedule": {**TABLES["schedule"], "rounds": 1}}
    (tmp_path / "preset.toml").write_text(tomli_w.dumps(tables))
    file = {"preset": "preset.toml", "methods": {"FedAvg": "fedavg"}, "seeds": [0, 1]}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps({**file, "columns": {"A": "metrics.a_loc"}}))
    return Sweep.read(tmp_path / "sweep.toml")


@NEEDS_SUBMITIT
@pytest.mark.loopback
@pytest.mark.timeout(300)
def test_a_sweep_under_slurm_submits_what_is_not_finished(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is finished is not submitted again; a job that cannot run is named with its log."""
    monkeypatch.setattr(places, "slurm_jobs", partial(slurm_jobs, cluster="local"))
    out, said = tmp_path / "out", list[str]()
    run = partial(run_sweep, sweep, out, on="slurm", say=said.append)
    run(seeds=[0])
    assert [line.partition(" is job ")[0] for line in said if " is job " in line] == [
        "fedavg-seed0"
    ]
    assert json.loads((out / "fedavg-seed0" / "summary.json").read_text())["rounds"] == 1
    (log,) = (out / "slurm").glob("*_0_log.out")
    assert "$ fedsrv launch " in log.read_text()
    said.clear()
    run()
    assert [line.partition(" is job ")[0] for line in said if " is job " in line] == [
        "fedavg-seed1"
    ]
    assert (out / "data-seed1").is_dir()
    assert any(line.startswith("| | A |") for line in said)


class Stopped(BaseException):
    """Takes the place of Ctrl-C."""


@NEEDS_SUBMITIT
def test_slurm_gets_the_resources_and_keeps_no_job_of_a_sweep_that_ended(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array of the seeds; and nothing that was submitted is left when the sweep ends."""
    for name, line in (("sbatch", "echo Submitted batch job 7"), ("srun", ""), ("scancel", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} $@ >> {tmp_path}/calls\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def stop(line: str) -> None:
        if " is job " in line:
            raise Stopped

    resources = ["slurm_partition=gpu", "gpus_per_node=1", "mem_gb=16", "timeout_min=90"]
    with pytest.raises(Stopped):
        run_sweep(sweep, tmp_path / "out", on="slurm", jobs=8, resources=resources, say=stop)
    (script,) = (tmp_path / "out" / "slurm").glob("*_submission.sh")
    lines = script.read_text().splitlines()
    assert {
        "#SBATCH --array=0-1%2",
        "#SBATCH --job-name=fedtide",
        "#SBATCH --partition=gpu",
        "#SBATCH --gpus-per-node=1",
        "#SBATCH --mem=16GB",
        "#SBATCH --time=90",
    } <= set(lines)
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()] == [
        "sbatch", "scancel", "scancel"
    ]  # fmt: skip


@NEEDS_SUBMITIT
@pytest.mark.parametrize(
    ("cluster", "given", "line"),
    [
        ("local", {"num_cpu": 1}, "--resource: .*num_cpu"),
        ("slurm", {}, "--on slurm: .*on a slurm cluster"),
    ],
)
def test_what_slurm_does_not_take_is_one_line(
    cluster: str, given: dict[str, int], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        pytest.raises(ConfigError, match=line),
        slurm_jobs(tmp_path, None, given, print, cluster=cluster),
    ):
        pass
