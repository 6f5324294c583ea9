"""Servers that remember past classes without data: on every stream, and through a crash."""

import pytest
import torch
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.errors import PayloadError
from fedmodels.techniques.datafree import freeze
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.packed_weights import num_bytes
from fedmodels.training.run import RunFacts
from fedsrv.engine.round_parts import RoundParts
from fedsrv.launch.progress import Display
from fedsrv.progress.events import Event
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import SMALL
from tests.interactions import Course
from tests.runs import Killed, ends_as, killed

BOTH = pytest.mark.parametrize("name", ["mfcl", "target"])
STREAMS = {
    "replay_gradual": {"parts": 2, "images_per_part": 8},
    "replay_circulating": {"parts": 2, "images_per_part": 8},
    "replay_heterogeneous": {"images_per_part": 8},
}


def experiment_of_a_stream(name, kind, **schedule):
    return tiny_experiment(
        data={"name": "digits", "max_test_per_class": 4},
        scenario={"kind": kind, **STREAMS[kind]},
        method={"name": name, **SMALL[name]},
        evaluate={"pictures": 0},
        schedule={"rounds": 1, "clients": 2, "order": "tasks_outer", **schedule},
    )


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """The three streams of pFedGRP's paper on digits: classes differ by client, and come back."""
    roots = {}
    for kind in STREAMS:
        made, roots[kind] = experiment_of_a_stream("mfcl", kind), tmp_path_factory.mktemp(kind)
        run_partition(
            made.data, made.scenario, 2, made.seed, roots[kind] / "data", Console(quiet=True)
        )
    return roots


PAIRS = [
    ("mfcl", "replay_gradual"),
    ("target", "replay_circulating"),
    ("mfcl", "replay_heterogeneous"),
    ("target", "replay_heterogeneous"),
]
"""The runs of the last two serve the tests below as well."""
REST = [("target", "replay_gradual"), ("mfcl", "replay_circulating")]


@pytest.mark.parametrize(
    ("name", "kind"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.whole) for pair in REST)]
)
def test_it_runs_on_the_streams(name, kind, streams, whole_run):
    """A memory of every class met up to then, after every task but the last, from which nobody
    learns any more."""
    experiment = experiment_of_a_stream(name, kind)
    records = records_of(whole_run(experiment, streams[kind] / "data").out)
    metric = {"mfcl": "generator_spread", "target": "synthesis_accuracy"}[name]
    has_memory = [metric in r["metrics"] for r in records]
    assert has_memory == [True] * (len(records) - 1) + [False]
    downs = [r["bytes"]["down"] for r in records]
    assert downs[1] > downs[0]
    assert len(set(downs[1:])) == 1  # the old model is the one that comes: not sent twice
    assert all(torch.isfinite(torch.tensor(r["metrics"]["loss"])) for r in records)


@BOTH
def test_a_crash_in_the_servers_work_costs_nothing(name, streams, tmp_path, monkeypatch, whole_run):
    """The coordinator dies while it makes its second memory; the run ends in the same bits."""
    kind = "replay_heterogeneous"
    experiment, data = experiment_of_a_stream(name, kind), streams[kind] / "data"
    whole = whole_run(experiment, data).summary

    def die(parts, step, *_):
        if step.interaction == 1:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RoundParts, "tell_work", die)
        killed(experiment, data, tmp_path / "cut")
    ends_as(whole, experiment, data, tmp_path / "cut")


@BOTH
def test_several_rounds_of_a_task(name, streams, tmp_path):
    """From a task's second round on the old model comes beside the one that trains."""
    kind = "replay_heterogeneous"
    experiment = experiment_of_a_stream(name, kind, rounds=2, clients=2)
    run_in_process(experiment, streams[kind] / "data", tmp_path / "out")
    downs = [record["bytes"]["down"] for record in records_of(tmp_path / "out")]
    assert downs[0] == downs[1] < downs[2] < downs[3]
    assert downs[2:4] == downs[4:6]
    net = RunFacts(experiment, Problem((1, 8, 8), 10)).initial_weights
    assert downs[3] - downs[2] == 2 * num_bytes(net)


@pytest.mark.parametrize("net", [{"name": "mlp", "hidden": [16]}, {"name": "resnet20"}])
@pytest.mark.parametrize(("name", "work"), [("mfcl", "the generator"), ("target", "the synthesis")])
def test_a_mean_model_that_overflows_is_one_line(name, work, net, digits):
    course = Course(tiny_experiment(method={"name": name, **SMALL[name]}, net=net), digits)
    weights = course.run.initial_weights.items()
    large = {key: t * 1e20 if key.endswith("weight") else t for key, t in weights}
    old, known = freeze(course.run, large, "cpu"), torch.ones(10, dtype=torch.bool)
    line = (
        rf"^{work} diverged after round 1: its loss is not finite.* lower \[training\] lr \(it is"
    )
    before = [Bundle()] if name == "mfcl" else []
    with pytest.raises(PayloadError, match=line):
        course.method.remember(course.server(0), *before, old, known)


def test_the_display_shows_the_servers_work():
    display = Display("a run", Console(quiet=True))
    work = {"work": "synthesis", "step": 3, "of": 10, "loss": 0.5}
    display.take(Event("server", interaction=1, round=1, detail=work))
    shown = Console(width=100)
    with shown.capture() as capture:
        shown.print(display._render())
    assert "synthesis, step 3 of 10" in capture.get()
    display.take(Event("commit", interaction=1, round=1, detail={"of": 5}))
    with shown.capture() as capture:
        shown.print(display._render())
    assert "synthesis" not in capture.get()
