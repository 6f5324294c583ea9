"""Interactions of a method's two halves by hand, without an engine: two clients of a partition."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmodels.config.experiment import Experiment
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import Metrics, Position, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.method import LocalResult
from fedpb.codec import merged
from tests.conftest import context_of, method_of

CLIENTS = (0, 1)


@dataclass
class Course:
    """A run of a few interactions, step by step."""

    experiment: Experiment
    root: Path
    told: list[tuple[Any, ...]] = field(default_factory=list)
    """What the server half told of its work."""

    def __post_init__(self) -> None:
        self.method = method_of(self.experiment)
        self.run = context_of(self.experiment, self.root).run
        self.state: ServerState = self.method.init_server(self.run)
        self.results: dict[int, LocalResult] = {}
        self.metrics: Metrics = {}

    def server(self, number: int, task: int = 0, ends_task: bool = False) -> ServerContext:
        """Return the server's context; labels are those of the clients' data."""
        labels = {}
        for client in CLIENTS:
            ctx = context_of(self.experiment, self.root, client, task)
            labels[client] = tuple(ctx.stream.train(task)[1].unique().tolist())
        limits = ctx.stream.limits()
        return ServerContext(
            self.run, Position(number, number, task), CLIENTS, labels=labels, limits=limits,
            ends_task=ends_task, tell=lambda *facts: self.told.append(facts),
        )  # fmt: skip

    def payload(self, server: ServerContext, client: int) -> Bundle:
        """Return what a client gets."""
        common, personal = self.method.broadcast(server, self.state)
        parts = {"common": common, "personal": personal.get(client, Bundle())}
        return merged(parts)

    def interact(self, number: int, task: int = 0, ends_task: bool = False) -> None:
        """Take the state through one interaction."""
        server = self.server(number, task, ends_task)
        for client in CLIENTS:
            ctx = context_of(self.experiment, self.root, client, task, number)
            payload = self.payload(server, client)
            self.results[client] = train_locally(self.method, ctx, payload, Bundle())
        uploads = as_uploads(self.method, {c: r.upload for c, r in self.results.items()})
        self.state, self.metrics = reduce(self.method, server, self.state, uploads)

    def refs(self, number: int, task: int = 0, client: int = 0) -> Any:
        """Return what a client's loss would refer to in the next interaction."""
        ctx = context_of(self.experiment, self.root, client, task, number)
        payload = self.payload(self.server(number, task), client)
        self.method.load(ctx, payload, Bundle())
        return self.method.prepare(ctx, payload, Bundle())


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Tell whether weights agree to the bit."""
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
