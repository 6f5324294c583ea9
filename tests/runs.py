"""Runs in this process that tests compare with, made once for all, and runs that die on the way."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.facts.resolution import experiment_of
from fedmodels.numerics.secrecy import Secret
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.state.store import Store
from fedtide.inprocess import run_in_process
from fedtide.testing.case import Finished


class WholeRuns:
    """Undisturbed runs, each made once by whichever process of pytest needs it first.

    Tests read what they get; a test that changes a run directory makes its own or copies it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self,
        experiment: Experiment | dict[str, Any],
        data: Path,
        evaluator: bool = False,
        device: str = "cpu",
    ) -> Finished:
        """Return the finished run of an experiment on a partition that a config dealt out."""
        experiment = experiment_of(experiment) if isinstance(experiment, dict) else experiment
        dealt = (data / "partition.json").read_text(), sorted(path.name for path in data.iterdir())
        known_by = json.dumps([experiment.to_dict(), *dealt, evaluator, device])
        out = self.root / hashlib.sha256(known_by.encode()).hexdigest()[:20]
        summary = out / "summary.json"
        with out.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not summary.exists():
                found = run_in_process(experiment, data, out, evaluator=evaluator, device=device)
                summary.write_text(json.dumps(found))
        return Finished(json.loads(summary.read_text()), out)


@contextmanager
def deciding() -> Iterator[Callable[..., None]]:
    """Yield what stores a decision of the run that goes on in this process."""
    init, live = Store.__init__, list[Store]()

    def noted(self: Store, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        live.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "__init__", noted)
        yield lambda what, *facts: live[-1].decide(what, *facts)


class Killed(BaseException):
    """The process dies at this point; no part of a run catches it."""


def dies(**facts: Any) -> Callable[[rpc.Order], None]:
    """Return what dies of the first order with these facts: ``dies(interaction=3)``."""

    def before(order: rpc.Order) -> None:
        if all(getattr(order, name) == value for name, value in facts.items()):
            raise Killed

    return before


def killed(experiment: Experiment, data: Path, out: Path, **options: Any) -> None:
    """Run until the process dies of what the options say: ``killed(…, before=dies(…))``."""
    with pytest.raises(Killed):
        run_in_process(experiment, data, out, **options)


def ends_as(
    whole: dict[str, Any], experiment: Experiment, data: Path, out: Path, **options: Any
) -> dict[str, Any]:
    """Take a run up where it is; return its summary, which agrees with the whole run's."""
    summary = run_in_process(experiment, data, out, resume=True, **options)
    assert_same(summary, whole)
    return summary


def let_secrets_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let secrets follow from whose they are, and not from when they are drawn.

    A run and one that was killed and resumed then have the same noise.
    """

    def fresh(cls: type[Secret]) -> Secret:
        told = sys._getframe(1).f_locals
        where = getattr(told.get("self"), "path", told.get("path", Path()))
        number = [part for part in where.parts if part.isdigit()][-1:]
        return cls(hashlib.sha256(f"{number}".encode()).digest())

    monkeypatch.setattr(Secret, "fresh", classmethod(fresh))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two summaries are of the same run, to the bit."""
    assert one["state_sha256"] == other["state_sha256"]
    assert one["metrics"] == other["metrics"]
