"""The loss of labels: cross-entropy with weights and smoothing, or the focal loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.config.training import Training
from fedmodels.errors import ConfigError
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import SharedPart

if TYPE_CHECKING:
    from fedmodels.training.loop import ClientHalf

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Returns the loss () of logits (B, K) and labels (B,), or targets (B, T)."""


def criterion_of(run: RunFacts, y: Tensor) -> Criterion:
    """Return the loss of a client for labels ``y`` (n,), or for targets.

    Raise ConfigError if there is not one weight for each class.
    """
    if run.targets is not None:
        return run.targets
    training = run.experiment.training
    weights = _class_weights(training, y, run.problem.num_classes)
    if training.loss == "cross-entropy":
        return CrossEntropy(weights, training.label_smoothing)
    return Focal(weights, training.focal_gamma)


@contextmanager
def fitting(ctx: ClientContext, y: Tensor) -> Iterator[None]:
    """Let a model that is fitted for a score have the loss and the seed of a training on ``y``."""
    before = ctx.criterion
    if ctx.run.experiment.training.own_loss:
        ctx.criterion = criterion_of(ctx.run, y)
    try:
        with seeded(ctx.seed("dropout")):
            yield
    finally:
        ctx.criterion = before


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy with weights of classes (K,) and smoothed labels."""

    weights: Tensor | None
    smoothing: float

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        return cross_entropy(logits, y, self.weights, label_smoothing=self.smoothing)


@dataclass(frozen=True)
class Focal:
    """The focal loss: a mean by weights of classes (K,), as that of the cross-entropy is."""

    weights: Tensor | None
    gamma: float

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        log_p = logits.log_softmax(1).gather(1, y[:, None])[:, 0]
        own = self.weights
        weight = torch.ones_like(log_p) if own is None else own.to(log_p.dtype)[y]
        lack = -torch.expm1(log_p).clamp_max(-1e-12)  # 1 - p, with a gradient for every exponent
        return -(weight * lack**self.gamma * log_p).sum() / weight.sum()


@dataclass(frozen=True)
class Noted:
    """A loss that notes that it was asked."""

    loss: Criterion
    asked: set[str]

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        self.asked.add("criterion")
        return self.loss(logits, y)


class OwnLoss(SharedPart):
    """Clients train on another loss of labels than the plain cross-entropy."""

    @classmethod
    def begins(cls, half: ClientHalf) -> None:
        """Give the training its loss, by the labels of the client."""
        ctx = half.ctx
        loss = criterion_of(ctx.run, half.y)
        ctx.criterion = Noted(loss, ctx.asked)

    @classmethod
    def ends(cls, half: ClientHalf, state: Bundle) -> None:
        """Check that the training took it; raise ConfigError if the method has its own loss."""
        training = half.ctx.run.experiment.training
        keys = [k for k in ("loss", "label_smoothing", "class_weights") if training.differs(k)]
        if len(half.y) and "criterion" not in half.ctx.asked:
            raise ConfigError(
                f"[training] {keys[0]} has no effect: {type(half.method).__name__} trains with a "
                "loss of its own; leave it out"
            )


def check_own_loss(method: Method, run: RunFacts) -> None:
    """Check that the method's clients can train on the config's loss; raise ConfigError if not."""
    training = run.experiment.training
    if training.own_loss and method.trains_on == "memory":
        raise ConfigError(
            f"method {run.experiment.method.name!r} has a loss of its own for earlier tasks: leave "
            "[training] loss, label_smoothing and class_weights out"
        )
    if training.class_weights != "balanced":
        _class_weights(training, torch.zeros(0, dtype=torch.int64), run.problem.num_classes)


def _class_weights(training: Training, y: Tensor, classes: int) -> Tensor | None:
    given = training.class_weights
    if given is None:
        return None
    if given == "balanced":
        counts = torch.bincount(y, minlength=classes)
        known = counts > 0
        return torch.where(known, len(y) / (known.sum() * counts.clamp_min(1)), 0.0).float()
    if len(given) != classes:
        raise ConfigError(
            f"[training] class_weights has {len(given)} weights for {classes} classes"
        )
    return torch.tensor(given, dtype=torch.float32, device=y.device)
