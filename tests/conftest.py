"""What many tests start from: a small partition of real data, and a tiny experiment on it."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from fedcli.runtime import state
from fedmodels.config.experiment import Experiment
from fedmodels.host import guarded
from fedmodels.host.guarded import Guarded
from fedmodels.nets.split import SplitNet
from fedmodels.plugins import gone_plugins, is_here, known
from fedmodels.tensors.archive import load
from fedmodels.tensors.bundle import Problem, state_digest
from fedmodels.training.contexts import START, ClientContext
from fedmodels.training.run import RunFacts
from fedpb.unreachable import EXCEPTIONS, PROXIES
from fedtide.testing.trial import (
    TABLES,
    context_of,
    digits_in,
    method_of,
    payload_of,
    server_context,
    tiny_experiment,
    write_server_data,
)
from tests.integration.harness import ForkServer
from tests.runs import WholeRuns

__all__ = [
    "TABLES",
    "OneTask",
    "context_of",
    "digest_of",
    "linear_context",
    "method_of",
    "payload_of",
    "script_of",
    "server_context",
    "tiny_experiment",
    "undealt",
    "write_server_data",
]

guarded.checked = True
os.environ[guarded.VARIABLE] = "1"  # in the processes that tests start too

_check = Guarded._check


def _check_of_product(self: Guarded[Any], instance: Any) -> None:
    """Check what the product touches; a test may look into its objects while they rest."""
    owner = next(kind for kind in type(instance).__mro__ if self._name in vars(kind))
    touches = sys._getframe(2).f_globals["__name__"]
    if "tests" in owner.__module__.split(".") or "tests" not in touches.split("."):
        _check(self, instance)


Guarded._check = _check_of_product  # type: ignore[method-assign]

# Every process of pytest, and every one that a test starts, would compile the project anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
settings.register_profile("fedtide", deadline=None)
settings.load_profile("fedtide")
# A shell that runs the suite in the background ignores Ctrl-C, and what it starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _unsynced(handle: Any) -> None:
    """Check a handle as ``os.fsync`` does, and wait for no disk.

    No test cuts the power: those of power failures look at which calls are made, and wrap this one.
    Processes that tests start sync for real.
    """
    os.fstat(handle if isinstance(handle, int) else handle.fileno())


os.fsync = _unsynced
for variable in (*PROXIES, *EXCEPTIONS):  # the tests' own channels talk to loopback
    os.environ.pop(variable, None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have no collection of cycles look through torch and 9,000 tests: each takes half a second.

    Pytest puts a handler, six times a test, on each logger that does not propagate; torch has 50.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True
        gc.freeze()
        gc.enable()
        gc.set_threshold(20_000, 20, 100)  # a full one takes 0.1 s, and came with every few tests


def gone_keys() -> set[str]:
    """Return the keys of a config that plugins bring whose folders are gone."""
    tables = [brings.get("tables", {}) for _, brings in gone_plugins()]
    return {f"{table}.{key}" for of in tables for table, keys in of.items() for key in keys}


NAMES_PLUGIN = re.compile(r"^(?:from|import) fedplugins\.(\w+)", flags=re.MULTILINE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out a file that tests what a plugin brings, where the plugin's folder is gone."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    needed = NAMES_PLUGIN.findall(collection_path.read_text("utf-8"))
    return None if all(map(is_here, needed)) else True


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
LACKING = re.compile(
    r"is of the plugin (\w+), which this installation lacks|No module named 'fedplugins\.(\w+)"
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked with ``needs`` where a plugin that it names is gone; no name: any."""
    for mark in item.iter_markers("needs"):
        if gone := [name for name in mark.args or known() if not is_here(name)]:
            pytest.skip(f"needs the plugin {gone[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that asked for a plugin, by a line of the product, where its folder is gone."""
    return _skipped_without((yield), item.path, (item.location[1] or 0) + 1)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file of tests likewise, where its cases ask for the plugin."""
    return _skipped_without((yield), collector.path, 1)


def _skipped_without(report: Report, path: Path, line: int) -> Report:
    lacking = LACKING.search(str(report.longrepr)) if report.failed else None
    name = lacking and (lacking[1] or lacking[2])
    if name and not is_here(name):
        report.outcome = "skipped"
        report.longrepr = (str(path), line, f"needs the plugin {name}")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of large products that ``-m whole`` alone runs; begin with slow tests.

    A worker of xdist that has nothing left waits for what another one has begun.
    """
    if "whole" not in config.option.markexpr:
        left = {item for item in items if item.get_closest_marker("whole")}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a small partition of the digits, made once; it fits ``experiment()``."""
    return digits_in(tmp_path_factory.mktemp("digits") / "data")


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> WholeRuns:
    """Undisturbed runs in this process: ``whole_run(experiment, digits).summary``."""
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    (shared / "whole-runs").mkdir(exist_ok=True)
    return WholeRuns(shared / "whole-runs")


@pytest.fixture(scope="session")
def steer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that steers the method ``held`` in processes of the fork server."""
    return tmp_path_factory.mktemp("steer")


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory, steer: Path) -> Iterator[ForkServer]:
    """The one fork server of this process of pytest, whichever directories need it."""
    server = ForkServer(tmp_path_factory.mktemp("forks") / "forks.log", HELD_DIR=str(steer))
    yield server
    server.close()


@pytest.fixture
def synced() -> None:
    """Wait until the thread that syncs clients' states has ended what earlier tests left."""
    done = threading.Event()
    state._SYNCER.want(done.set)
    assert done.wait(120)


@pytest.fixture
def experiment() -> Callable[..., Experiment]:
    """A factory of tiny experiments: ``experiment(method={"name": "fedprox", "mu": 0.1})``."""
    return tiny_experiment


def undealt(root: Path, to: Path) -> Path:
    """Return a copy of a partition that says of no config what it was dealt out by."""
    shutil.copytree(root, to)
    for file in to.rglob("*.json"):
        facts = json.loads(file.read_text())
        facts.pop("partition", None)
        file.write_text(json.dumps(facts))
    (to / "partition.json").unlink(missing_ok=True)
    return to


def digest_of(path: Path) -> str:
    """Return the digest of a stored model, whatever its file says of it."""
    return state_digest([("model", load(path)[0])])


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's interactions, as ``rounds.jsonl`` has them."""
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def arrivals_of(run: Path) -> list[list[list[int]]]:
    """Return the arrivals of each interaction of an asynchronous run."""
    return [record["arrivals"] for record in records_of(run)]


class OneTask:
    """A stream of one task, for examples computed by hand."""

    def __init__(self, x: Sequence[Any], y: Sequence[int]) -> None:
        self.x, self.y = torch.tensor(x), torch.tensor(y)

    def train(self, task: int) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    train_up_to = train


def linear_context(
    experiment: Experiment, x: Sequence[Any], y: Sequence[int], client: int = 0
) -> ClientContext:
    """Return a context whose net is a linear map without bias, from inputs (n, d) to two classes.

    Its weights (2, d) are zero at first, so that the first softmax is 1/2 everywhere.
    """
    width = len(x[0])
    net = SplitNet(nn.Flatten(), nn.Linear(width, 2, bias=False), width)
    nn.init.zeros_(net.head.weight)
    run = RunFacts(experiment, Problem((width,), 2))
    return ClientContext(run, client, START, net, OneTask(x, y), torch.device("cpu"))


def script_of(name: str) -> Any:
    """Return the script that writes a page of the reference, as a module."""
    script = Path(__file__).parents[1] / "docs" / "site" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_page", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
