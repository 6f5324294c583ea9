"""What a tiny run imports, and what an interaction of each method costs in operators and imports.

Counts are equal on every machine, so what a change adds to each step, client or start shows as a
number. ``python -m tests.growth.tiny_costs`` reads methods as JSON, by name with their switches and
tables, and prints their counts. Each is counted in a fork of its own that has run FedAvg before, so
that no method pays for another one's imports.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedtide.inprocess import run_in_process
from fedtide.testing.case import Case
from fedtide.testing.trial import digits_in, server_context, tiny_experiment

OURS = ("fedmodels", "fedpb", "fedsrv", "fedcli", "fedtide", "fedplugins")
CLIENTS = (0, 1)


class Operators(TorchDispatchMode):
    """A block in which operators of torch are counted, also those of a backward pass."""

    count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: what tells the compiler to look away would load the compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def loaded() -> dict[str, set[str]]:
    """Return the modules of this process, by whether they are ours."""
    ours = {name for name in sys.modules if name.partition(".")[0] in OURS}
    return {"modules of ours": ours, "other modules": {*sys.modules} - ours}


def of_a_run(data: Path, out: Path) -> dict[str, int]:
    """Run the tiny experiment; return its counts, and those of the modules that it needs."""
    with Operators() as operators:
        run_in_process(tiny_experiment(), data, out)
    return {"operators": operators.count, **{kind: len(names) for kind, names in loaded().items()}}


def of_a_method(case: Case) -> dict[str, int]:
    """Return the counts of two clients' first interaction, and of the server's half of it."""
    before = loaded()["other modules"]
    with Operators() as at_clients:
        trained = case.trained(CLIENTS)
    with Operators() as at_server:
        trained.after(server_context(trained.run, 0, CLIENTS))
    imports = len(loaded()["other modules"] - before)
    return {"clients": at_clients.count, "server": at_server.count, "imports": imports}


def in_a_fork(case: Case) -> dict[str, int]:
    """Count a method in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, json.dumps(of_a_method(case)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        counts = told.read()
    _, status = os.waitpid(pid, 0)
    assert not status, f"{case.name} ended with {status}"
    return dict(json.loads(counts))


def main() -> None:
    """Count what a run costs, then every method."""
    torch.set_num_threads(1)  # before any fork: a pool of threads would not be in it
    with TemporaryDirectory() as place:
        data = digits_in(Path(place) / "data")
        counts = {"a run": of_a_run(data, Path(place) / "run")}
        for name, (switches, tables) in json.load(sys.stdin).items():
            counts[name] = in_a_fork(Case(name, switches, tables, data, Path(place)))
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
