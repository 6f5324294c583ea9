"""A method with its switches, tried in small runs: what the checks of the conformance suite use."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import FedtideError
from fedmodels.methods import method_class
from fedmodels.tensors.bundle import Bundle, tensor_bytes
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.fault import fault_in, line_of
from fedmodels.training.hooks import as_uploads, init_server, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.method import LocalResult, Method
from fedmodels.training.run import RunFacts
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import context_of, method_of, payload_of, tiny_experiment


@dataclass
class Case:
    """A method with its switches, and where it is tried."""

    name: str
    switches: Mapping[str, Any]
    tables: Mapping[str, Any]
    data: Path
    """A partition that fits :data:`TABLES`."""
    place: Path
    """An empty directory."""
    _numbers: Iterable[int] = field(default_factory=itertools.count)

    def experiment(self, **overrides: Any) -> Experiment:
        """Return the tiny experiment with this method."""
        method = {"name": self.name, **self.switches}
        return tiny_experiment(method=method, **{**self.tables, **overrides})

    def fresh(self) -> Path:
        """Return a path that nobody has used."""
        return self.place / f"run-{next(iter(self._numbers))}"

    def why(self, error: Exception) -> str:
        """Return why a check failed, on one line: also where an ``assert`` says nothing more."""
        if fault := fault_in(method_class(self.name), error):
            return fault
        if str(error):
            said = isinstance(error, AssertionError | FedtideError)
            return str(error).partition("\n")[0] if said else line_of(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {last.line}"

    def run(self, experiment: Experiment, data: Path | None = None, **options: Any) -> Finished:
        """Run an experiment to its end without a network."""
        out = self.fresh()
        return Finished(run_in_process(experiment, data or self.data, out, **options), out)

    @cached_property
    def finished(self) -> Finished:
        """A whole tiny run, of an interaction for each of two tasks; made once."""
        return self.again()

    def again(self, **options: Any) -> Finished:
        """Run the whole tiny run anew."""
        return self.run(self.experiment(schedule={"rounds": 1}), **options)

    @cached_property
    def interaction(self) -> Trained:
        """What two clients learn in one interaction, made once: no check may change it."""
        return self.trained()

    def trained(
        self, clients: Sequence[int] = (0, 1), experiment: Experiment | None = None
    ) -> Trained:
        """Return what clients learn in one interaction."""
        results, experiment = {}, experiment or self.experiment()
        for client in clients:
            method, ctx, payload, state = self.begun(client, experiment)
            results[client] = train_locally(method, ctx, payload, state)
        run = RunFacts(experiment, ctx.run.problem)  # a client's may be of a net of its own
        return Trained(method, run, init_server(method, run), results)

    def begun(
        self, client: int = 0, experiment: Experiment | None = None
    ) -> tuple[Method, ClientContext, Bundle, Bundle]:
        """Return a client before its first training: method, context, payload, private state."""
        experiment = experiment or self.experiment()
        ctx = context_of(experiment, self.data, client)
        return method_of(experiment), ctx, *payload_of(experiment, ctx)


@dataclass
class Finished:
    """A run that has ended: its summary and its directory."""

    summary: dict[str, Any]
    out: Path


@dataclass
class Trained:
    """One interaction: the method, the state it began with, and each client's result."""

    method: Method
    run: RunFacts
    state: ServerState
    results: Mapping[int, LocalResult]

    @property
    def sent(self) -> dict[int, Bundle]:
        """Return what the clients send."""
        return {client: result.upload for client, result in self.results.items()}

    @property
    def uploads(self) -> Uploads:
        """Return what the clients send, as the server half gets it."""
        return as_uploads(self.method, self.sent)

    def after(self, ctx: ServerContext) -> ServerState:
        """Return the state after the server half."""
        return reduce(self.method, ctx, self.state, self.uploads)[0]


def bytes_of(*bundles: Bundle) -> list[dict[str, bytes]]:
    """Return the bytes of every tensor, to compare bundles bit for bit."""
    return [{key: bytes(tensor_bytes(t)) for key, t in b.by_key().items()} for b in bundles]


def states_of(state: ServerState) -> list[dict[str, bytes]]:
    """Return the bytes of a server's state."""
    return bytes_of(*(bundle for _, bundle in state.named()))


def newest_states(root: Path) -> dict[str, bytes]:
    """Return the newest private state of each client."""
    return {
        directory.name: max(directory.glob("state-*.safetensors")).read_bytes()
        for directory in root.iterdir()
        if list(directory.glob("state-*.safetensors"))
    }
