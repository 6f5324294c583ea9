"""Whether the clients of a run can train together: two made-up clients show it before the run.

Their data are noise of different classes. They train on two tasks, in turn and together. A method
whose results differ keeps something between steps, or branches on the values of tensors. So no
method has to declare whether it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmodels.errors import ConfigError
from fedmodels.nets.split import weights_of
from fedmodels.position import Interaction, Round
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import (
    ClientContext,
    Position,
    ServerContext,
    ServerData,
    ServerState,
)
from fedmodels.training.fault import line_of, name_faults
from fedmodels.training.hooks import as_uploads, broadcast, init_client, init_server
from fedmodels.training.loop import ClientHalf, train_locally
from fedmodels.training.method import LocalResult, Method
from fedmodels.training.run import RunFacts
from fedmodels.training.stack import check_stacks, fit_together
from fedmodels.training.stepped import Stepped, in_steps, root_of

SIZES = (16, 12)
"""Examples of each client: two batches of 8, and one of 8 with a rest of 4."""
TRAINING = {
    "batch_size": 8,
    "local_epochs": 1,
    "optimizer": "sgd",
    "optimizer_options": None,
    "lr_schedule": None,
    "lr": 0.001,
    "momentum": 0.0,
    "precision": "float32",
    "augment": "none",
}
OF_THE_STEP, OF_THE_VALUE = 1e-2, 1e-3
"""How far results may lie apart: by a share of how far weights moved, and of all other values."""


def check_together(method: Method, run: RunFacts) -> None:
    """Check that several clients of a run can be trained at once.

    Raises:
        ConfigError: the net or the method cannot, or the method is at fault by itself.
    """
    check_stacks(run)
    if method.trains_on in ("memory", "replay"):
        raise _refusal(method, run, "what stands for earlier tasks is not the same for all")
    if not _trains_in_phases(method):
        raise _refusal(method, run, "its fit is its own")
    if type(in_steps(method)).begin_epoch is not Stepped.begin_epoch:
        raise _refusal(method, run, "what its loss refers to changes between epochs")
    method, facts = _short(method), _small(run)
    state = init_server(method, facts)
    kept = [init_client(method, facts, client) for client in range(len(SIZES))]
    for number in range(2):
        at = Position(Interaction(number), Round(number), number)
        trip = _Trip(method, facts, at, state, kept)
        with name_faults(method, ConfigError):
            in_turn = [train_locally(h.method, h.ctx, h.payload, h.state) for h in trip.halves()]
        try:
            at_once = _together(trip.halves())
        except Exception as error:  # whatever torch says of what it cannot map
            raise _refusal(method, run, line_of(error)) from error
        for half, one, other in zip(trip.halves(), in_turn, at_once, strict=True):
            if differs := _difference(half, one, other):
                raise _refusal(method, run, f"{differs} differs from training in turn")
        with name_faults(method, ConfigError):
            state = trip.aggregated(in_turn)
        kept = [result.state for result in in_turn]


def _difference(half: ClientHalf, one: LocalResult, other: LocalResult) -> str:
    """Return what differs between two results by more than rounding; empty where nothing does."""
    before = {**half.state.by_key(), **half.payload.by_key()}
    for what in ("upload", "state"):
        a, b = (dict(getattr(result, what).by_key()) for result in (one, other))
        for key in sorted(a.keys() | b.keys()):
            if key not in a or key not in b or not _close(a[key], b[key], before.get(key)):
                return f"{key} in the {what}"
    losses = [torch.tensor(result.loss) for result in (one, other)]
    return "" if _close(*losses) else "the loss"


def _close(a: Tensor, b: Tensor, before: Tensor | None = None) -> bool:
    if a.shape != b.shape:
        return False
    bound = OF_THE_VALUE * a.float().norm()
    if before is not None and before.shape == a.shape:
        bound = OF_THE_STEP * (a - before).float().norm() + 1e-6 * a.float().norm()
    return bool((a.float() - b.float()).norm() <= bound + 1e-7)


def _trains_in_phases(method: Method) -> bool:
    """Tell whether local training is that of the class its own inherits all from: FedAvg."""
    return type(method).fit is root_of(method).fit


def _refusal(method: Method, run: RunFacts, why: str) -> ConfigError:
    return ConfigError(
        f"[training] together = {run.experiment.training.together}: clients of method "
        f"{run.experiment.method.name!r} train in turn only; leave together out ({why})"
    )


def _short(method: Method) -> Method:
    """Return a copy of a method whose phases have one epoch each."""
    found = copy(method)
    vars(found)["phases"] = lambda ctx: [
        replace(phase, epochs=min(phase.epochs, 1)) for phase in in_steps(method).phases(ctx)
    ]
    return found


def _small(run: RunFacts) -> RunFacts:
    """Return the facts of a run of two clients that train for two steps, from new weights."""
    experiment = run.experiment
    schedule = experiment.schedule.model_copy(update={"clients": len(SIZES), "per_round": None})
    training = experiment.training.model_copy(update=TRAINING)
    tables = {"schedule": schedule, "training": training}
    facts = RunFacts(experiment.model_copy(update=tables), run.problem)
    return facts.beginning_with(weights_of(facts.make_net()))


def _together(halves: Sequence[ClientHalf]) -> list[LocalResult]:
    for half in halves:
        half.begin_apart()
    losses = fit_together(halves)
    return [half.end_apart(loss) for half, loss in zip(halves, losses, strict=True)]


@dataclass(frozen=True)
class _Trip:
    """An interaction of the two clients."""

    method: Method
    run: RunFacts
    at: Position
    state: ServerState
    kept: Sequence[Bundle]

    def halves(self) -> list[ClientHalf]:
        """Return both clients' halves, each with a net of its own."""
        common, personal = broadcast(self.method, self._server(), self.state)
        halves = []
        for client, state in enumerate(self.kept):
            payload = Bundle.from_keys(
                {**common.by_key(), **personal.get(client, Bundle()).by_key()}
            )
            stream, net = _Noise(self.run, client), self.run.make_net()
            ctx = ClientContext(self.run, client, self.at, net, stream, torch.device("cpu"))
            halves.append(ClientHalf(self.method, ctx, payload, state))
        return halves

    def aggregated(self, results: Sequence[LocalResult]) -> ServerState:
        """Return the state after the server took the uploads; what ``finish`` adds is left out."""
        sent = {client: result.upload for client, result in enumerate(results)}
        return self.method.aggregate(self._server(), self.state, as_uploads(self.method, sent))

    def _server(self) -> ServerContext:
        streams = [_Noise(self.run, client) for client in range(len(SIZES))]
        labels = {c: tuple(s.labels(self.at.task).tolist()) for c, s in enumerate(streams)}
        held = ServerData(*streams[0].train(0), streams[0].train(0)[0])
        limits = streams[0].limits()
        return ServerContext(
            self.run, self.at, (0, 1), server_data=held, labels=labels, limits=limits
        )


@dataclass(frozen=True)
class _Noise:
    """The data of a made-up client: half of the classes or one alone, others in the next task.

    What has a row for each of a client's classes then differs in shape.
    """

    run: RunFacts
    client: int

    def labels(self, task: int) -> Tensor:
        """Return the classes of a task."""
        known = self.run.problem.num_classes
        first = (self.client + 2 * task) * known // 4
        return (first + torch.arange(1 if self.client else known // 2 + 1)) % known

    def train(self, task: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of a task; where targets are learned, those, each 0 or 1."""
        draw = torch.Generator().manual_seed(2 * task + self.client)
        labels, shape = self.labels(task), self.run.problem.input_shape
        y = labels[torch.arange(SIZES[self.client]) % len(labels)]
        x = torch.randn(len(y), *shape, generator=draw)
        if (targets := self.run.targets) is not None:
            return x, torch.randint(2, (len(y), len(targets.names)), generator=draw).float()
        return x, y

    def train_up_to(self, task: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of all tasks so far."""
        each = self.train_each(task).values()
        return torch.cat([x for x, _ in each]), torch.cat([y for _, y in each])

    def train_each(self, task: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the same by task."""
        return {earlier: self.train(earlier) for earlier in range(task + 1)}

    def contents(self, task: int, *, up_to: bool = False) -> NDArray[np.uint64]:
        """Nobody asks: clients that hide examples train one by one."""
        raise AssertionError("made-up examples have no content")

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return black and white, of noise."""
        return torch.tensor([-3.0]), torch.tensor([3.0])
