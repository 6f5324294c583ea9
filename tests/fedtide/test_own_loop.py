"""A custom training loop is a client like any other."""

from __future__ import annotations

import inspect
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

import fedcli.cli
import fedtide
from fedcli.data.store.commands import run_partition
from fedcli.runtime.staying import each_run
from fedmodels.errors import ConfigError, DataError, LinkError, RunFailed
from fedmodels.methods import make
from fedtide import own_loop
from fedtide.inprocess import run_in_process
from fedtide.own_loop import _check_leaves_the_loop
from fedtide.testing.trial import few_in
from tests.conftest import tiny_experiment
from tests.fuzz.live import Live

SCRIPTS = Path(__file__).parents[2] / "examples" / "extend" / "own-loop"
TRAINING = {"batch_size": 16, "lr": 0.05, "local_epochs": 2, "momentum": 0.5}
Make = Callable[..., Live]


@pytest.fixture
def live() -> Iterator[Make]:
    """Return what starts a coordinator in this process."""
    made: list[Live] = []

    def make(data: Path, **tables: Any) -> Live:
        root = Path(tempfile.mkdtemp(prefix="live-"))  # a socket's path must be short
        made.append(Live(tiny_experiment(training=TRAINING, **tables), data, root))
        return made[-1]

    yield make
    for one in made:
        one.close()
        shutil.rmtree(one.root)


def client(run: Live, **options: Any) -> Iterator[fedtide.LoopTask]:
    return fedtide.client(
        run.address, 0, run.data, state_dir=run.root / "own", give_up_after=20, **options
    )


def as_fedavg(task: fedtide.LoopTask, model: torch.nn.Module) -> torch.Tensor:
    """Train a module as FedAvg's loop does; return the last epoch's mean loss."""
    x, y = task.data.tensors
    order = torch.Generator().manual_seed(task.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for _ in range(2):
        total = torch.zeros(())
        for index in torch.split(torch.randperm(len(y), generator=order), 16):
            loss = cross_entropy(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(index)
    return total / len(y)


def test_a_loop_that_trains_as_fedavg_does_is_the_same_run(live, digits, tmp_path):
    """It forgets to send once, is started again, and goes on from where the run is."""
    plain = run_in_process(tiny_experiment(training=TRAINING), digits, tmp_path / "run")
    run, seen = live(digits), list[tuple[int, int]]()
    run.join(1, 2)
    told = {"show_uploads": run.root / "shown", "deploy": True, "allow_method": ["fedavg"]}
    tasks = client(run, **told)
    for _ in range(2):
        task = next(tasks)
        seen.append((task.round, task.task))
        if not seen[1:]:
            task.send(loss=as_fedavg(task, task.model))
    with pytest.raises(ConfigError, match="no such tensor: give the module that"):
        task.load(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="round 1 of client 0 was not sent: end what the loop"):
        next(tasks)
    for task in client(run, **told):
        seen.append((task.round, task.task))
        task.send(loss=as_fedavg(task, task.model))
    summary = run.summary()
    assert seen == [(0, 0), (0, 1), (0, 1), (1, 0), (1, 1)]
    assert summary["state_sha256"] == plain["state_sha256"]
    assert summary["metrics"] == pytest.approx(plain["metrics"], abs=1e-6)
    assert (run.root / "own" / "0" / "personal.safetensors").exists()
    assert (run.root / "own" / "0" / "model" / "current.safetensors").exists()
    assert "num_examples" in (run.root / "shown" / "client-0.txt").read_text()


@pytest.mark.parametrize(
    ("script", "net", "needs"),
    [
        ("with_torch.py", "net.py:Net", ()),
        ("with_sklearn.py", "linear.py:Linear", ()),
        ("with_lightning.py", "net.py:Net", ("lightning",)),
        ("with_transformers.py", "adapted.py:Adapted", ("transformers", "peft", "accelerate")),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the other packages have their own
def test_the_scripts_take_part_with_ten_changed_lines(
    script, net, needs, live, tmp_path, monkeypatch
):
    for package in needs:
        pytest.importorskip(package, reason=f"needs {' '.join(needs)}")
    once = {"scenario": {"kind": "iid", "tasks": 1}, "schedule": {"rounds": 2, "clients": 1}}
    tables = {"net": {"name": str(SCRIPTS / net)}, **once}
    e = tiny_experiment(**tables)
    run_partition(e.data, e.scenario, 1, e.seed, tmp_path / "data", Console(quiet=True))
    run = live(tmp_path / "data", **tables)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [script, run.address, "0", str(run.data)])
    runpy.run_path(str(SCRIPTS / script))
    metrics = run.summary()["metrics"]
    assert metrics["a_loc"] > 0.5
    assert 0 < metrics["loss"] < 2
    changed = [line for line in (SCRIPTS / script).read_text().splitlines() if "# fedtide" in line]
    assert 0 < len(changed) <= 10


def test_a_loop_that_stays_takes_part_in_one_run_after_the_other(monkeypatch, caplog):
    """The second run ends its part by a fault, the third one is not allowed here."""
    looks, ends = iter(["a", "a", "b", "b", "b", "c", "c", "d"]), list[float]()
    faults = {"b": LinkError("is gone"), "c": DataError("the method is another one")}

    def interactions(run: str) -> Iterator[str]:
        yield run
        if run in faults:
            raise faults.pop(run)

    monkeypatch.setattr(own_loop, "_interactions", interactions)
    monkeypatch.setattr(own_loop, "each_run", lambda runs: each_run(runs, ends.append))
    address: Any = SimpleNamespace(run=lambda: next(looks))
    tasks: Any = own_loop._of_each_run(address, lambda run: run)
    assert [next(tasks) for _ in range(5)] == ["a", "b", "b", "c", "d"]
    assert "run b: is gone" in caplog.text
    assert "run c: the method is another one" in caplog.text


def test_a_loop_has_the_options_of_a_client():
    """Left out are asking a person at each message, trying without joining, and what is printed.

    And what ``--stay`` tells its own processes, and how many runs it joins at once.
    """
    of_join = inspect.signature(fedcli.cli.join).parameters
    of_loop = inspect.signature(fedtide.client).parameters
    stays = {"context", "run_id", "at_once"}
    shown = {"dry_run", "ask", "quiet", "log_level", "as_json"}
    assert set(of_join) - set(of_loop) == stays | shown


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"announce": "most"}, "announce='most' is none of exact, rounded, none"),
        ({"show_tensors": True}, "show_tensors goes with show_uploads"),
        ({"min_cohort": -1}, "min_cohort=-1 is no number"),
        ({"allow_method": ["fedavgg"]}, "'fedavgg' is no method"),
        ({"allow_method": ["fedavgg"], "stay": True}, "'fedavgg' is no method"),
        (
            {"stay": True, "start_over": True},
            "stay takes part in many runs, and start_over is for one",
        ),
    ],
)
def test_options_of_a_loop_that_are_no_good_are_one_line(options, line, digits):
    with pytest.raises(ConfigError, match=line):
        fedtide.client("127.0.0.1:1", 0, digits, **options)


def test_a_loop_warns_of_data_that_look_like_a_mistake(tmp_path, digits, caplog):
    few = few_in(tmp_path / "few", digits)
    fedtide.client("127.0.0.1:1", 1, few)
    assert "note: client 1: 1 example to train on" in caplog.text
    caplog.clear()
    fedtide.client("127.0.0.1:1", 1, few, check=False)
    assert not caplog.text
    with pytest.raises(DataError, match="--strict: client 1"):
        fedtide.client("127.0.0.1:1", 1, few, strict=True)


@pytest.mark.parametrize(
    ("name", "own"), [("fedprox", "loss"), ("scaffold", "loss"), ("fedrep", "phases")]
)
def test_a_method_with_a_loop_of_its_own_is_refused(name, own):
    with pytest.raises(ConfigError, match=rf"'{name}' trains in a way of its own \({own}\)"):
        _check_leaves_the_loop(make(name))
    for plain in ("fedavg", "fedper", "fedbn", "local"):
        _check_leaves_the_loop(make(plain))


def test_a_loop_sends_nothing_where_examples_are_hidden(live, digits):
    """Noise is added in steps of the stock loop, which this one replaces."""
    told = ["announced", "examples", "loss", "scores"]
    hidden = {"level": "example", "noise_multiplier": 1.0, "delta": 1e-5, "allow": told}
    run = live(digits, privacy=hidden)
    run.join(1, 2)
    tasks = client(run, show_uploads=run.root / "shown")
    task = next(tasks)
    task.send(loss=as_fedavg(task, task.model))
    with pytest.raises(LinkError, match=r"client 0 failed in round 1 .*trains on them in a way of"):
        next(tasks)
    with pytest.raises(RunFailed):
        run.run.result(60)
    assert "weights" not in (run.root / "shown" / "client-0.txt").read_text()
