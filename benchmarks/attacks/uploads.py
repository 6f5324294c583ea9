"""Uploads to analyse: those of a few rounds on digits, and those of training on given examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fedcli.data.store.commands import run_partition
from fedmodels.config.experiment import Experiment
from fedmodels.facts.resolution import experiment_of
from fedmodels.tensors.bundle import Bundle
from fedmodels.training import hooks
from fedmodels.training.contexts import ClientContext, Position, ServerContext
from fedmodels.training.loop import train_locally
from fedmodels.training.method import LocalResult
from fedtide.testing.trial import context_of, method_of

CLIENTS, ROUNDS = 10, 5


@dataclass(frozen=True)
class Given:
    """Examples in place of a client's task."""

    x: Tensor
    y: Tensor
    limits_of: ClientContext

    def train(self, task: int) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def train_up_to(self, task: int) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def train_each(self, task: int) -> dict[int, tuple[Tensor, Tensor]]:
        return {task: self.train(task)}

    def limits(self) -> tuple[Tensor, Tensor]:
        return self.limits_of.stream.limits()


def experiment(method: str, net: str, **training: Any) -> Experiment:
    """Return the experiment of an upload: ten clients with skewed labels."""
    usual = {"local_epochs": 2, "batch_size": 16, "lr": 0.05, "momentum": 0.5}
    return experiment_of(
        {
            "data": {"name": "digits"},
            "scenario": {"kind": "dirichlet", "alpha": 0.5},
            "net": {"name": net},
            "method": {"name": method},
            "schedule": {"rounds": ROUNDS, "clients": CLIENTS},
            "training": {**usual, **training},
        }
    )


def dealt(run: Experiment, root: Path) -> Path:
    """Deal the digits out, once; return the partition's root."""
    place = root / "data"
    if not place.exists():
        assert run.data is not None
        assert run.scenario is not None
        run_partition(run.data, run.scenario, CLIENTS, run.seed, place, Console(quiet=True))
    return place


@dataclass(frozen=True)
class Client:
    """A client after its training: what it got, sent and holds."""

    ctx: ClientContext
    payload: Bundle
    done: LocalResult


def played(run: Experiment, root: Path) -> list[Client]:
    """Return the clients of a run after its last round, without a network."""
    method, place = method_of(run), dealt(run, root)
    contexts = [context_of(run, place, client) for client in range(CLIENTS)]
    facts = contexts[0].run
    state = hooks.init_server(method, facts)
    held = [hooks.init_client(method, facts, client) for client in range(CLIENTS)]
    clients: list[Client] = []
    for number in range(ROUNDS):
        at = Position(number, number, 0)
        server = ServerContext(facts, at, range(CLIENTS))
        payload, _ = hooks.broadcast(method, server, state)
        clients = []
        for ctx, own in zip(contexts, held, strict=True):
            now = replace(ctx, at=at, net=ctx.net)
            clients.append(Client(now, payload, train_locally(method, now, payload, own)))
        held = [client.done.state for client in clients]
        sent = {number: client.done.upload for number, client in enumerate(clients)}
        state, _ = hooks.reduce(method, server, state, hooks.as_uploads(method, sent))
    return clients


def trained_on(run: Experiment, ctx: ClientContext, x: Tensor, y: Tensor) -> Client:
    """Return a client that trained on these examples in the first round."""
    method = method_of(run)
    now = replace(ctx, stream=Given(x, y, ctx), net=ctx.run.make_net())
    state = hooks.init_server(method, ctx.run)
    payload, _ = hooks.broadcast(method, ServerContext(ctx.run, ctx.at, (0,)), state)
    assert isinstance(ctx.client, int)
    own = hooks.init_client(method, ctx.run, ctx.client)
    return Client(now, payload, train_locally(method, now, payload, own))


def all_digits(run: Experiment, root: Path) -> tuple[Tensor, Tensor]:
    """Return every image that was dealt out, as nets see it, and its class."""
    parts = []
    for client in range(CLIENTS):
        stream: Any = context_of(run, dealt(run, root), client).stream
        parts += [stream.train(0), stream.test(0)]
    images, classes = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(classes)
