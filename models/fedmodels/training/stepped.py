"""A method whose clients train by the steps of the stock loop (``training/loop.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import Tensor

from fedmodels.host.devices import to_device
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Method


@dataclass(frozen=True)
class Phase:
    """One part of local training: which weights train, for how long, and how."""

    epochs: int
    trains: tuple[str, ...] = ("",)
    """Prefixes of the weights that train, e.g. ``("base/",)``; the rest is frozen."""
    lr: float | None = None
    """Learning rate; by default the run's."""
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    """By prefix of the weights; the run's for all other weights."""
    bn_of_frozen: Literal["train", "eval"] = "train"
    """Mode of frozen submodules: in ``train`` their running statistics still move."""


@dataclass(frozen=True)
class Batch:
    """A mini-batch."""

    x: Tensor  # (B, …)
    y: Tensor  # (B,) int64
    index: Tensor  # (B,) position in the training set of this interaction
    drawn: Tensor | None = None
    """``index`` on the processor, where the stock loop has drawn it."""
    taught: tuple[Tensor, ...] = field(default=(), kw_only=True)
    """What the method's ``taught`` says of the inputs, with a row for each."""

    @property
    def positions(self) -> Tensor:
        """Return ``index`` on the processor; of the stock loop's batches, nobody waits for it."""
        return self.index.cpu() if self.drawn is None else self.drawn

    def rows(self, wanted: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows of the batch (r,) whose positions are wanted.

        The processor chooses them: whoever indexes by a mask of a GPU waits for the GPU.

        Args:
            wanted: tells of positions (B,) on the processor which are wanted, (B,) bool.
        """
        return to_device(wanted(self.positions).nonzero().flatten(), self.index.device)


@dataclass(frozen=True)
class Output:
    """The net's output for a mini-batch."""

    features: Tensor  # (B, d)
    logits: Tensor  # (B, K)


class Stepped(Method):
    """What a step of local training is; the stock loop runs the phases."""

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        """Return the phases of local training, in order."""
        return [Phase(epochs=ctx.run.experiment.training.local_epochs)]

    @property
    def steps_per_batch(self) -> int:
        """Optimiser steps that one mini-batch takes, over all classifiers that a client trains."""
        return 1

    def training_length(self, ctx: ClientContext) -> str:
        """Say how long an interaction trains, for the line in what a study's rows differ."""
        return str(sum(phase.epochs for phase in self.phases(ctx)))

    def begin_epoch(self, ctx: ClientContext, phase: Phase, epoch: int, refs: Any) -> None:
        """Act before an epoch of a phase, counted from 0 in each phase."""
        return None

    def taught(self, ctx: ClientContext, x: Tensor, refs: Any) -> tuple[Tensor, ...]:
        """Return what teachers, which do not train, say of inputs (B, …): a row for each.

        The loss finds it in ``batch.taught``. The stock loop asks without gradients: once for all
        examples where their inputs stay the same, for each batch where they do not.
        """
        return ()

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        """Return the scalar loss of a mini-batch: a mean over its examples."""
        return ctx.criterion(out.logits, batch.y)

    def after_step(self, ctx: ClientContext, batch: Batch, refs: Any) -> None:
        """Act after an optimiser step."""
        return None


def root_of(method: Method) -> type[Method]:
    """Return the class that a method's own inherits all from: FedAvg."""
    kinds = [kind for kind in type(method).__mro__ if issubclass(kind, Method)]
    return kinds[-3] if Stepped in kinds else Method


def in_steps(method: Method) -> Stepped:
    """Return a method as one that trains in steps: all that inherit from FedAvg do."""
    return cast("Stepped", method)
