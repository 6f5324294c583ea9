"""What methods with class prototypes share: class means, their mean over clients, what is let out.

Shapes: n examples, K classes, d coordinates of an embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedmodels.config.bounds import Count, NonNegative
from fedmodels.errors import TrainingFailed
from fedmodels.nets.split import embeddings
from fedmodels.numerics.prototypes import (
    ByClass,
    class_prototypes,
    nearest_scores,
    released,
    uncounted,
)
from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Scores
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import SharedSettings


@dataclass
class PullReferences:
    """What the loss of one interaction pulls to, and the class means that it leaves."""

    everyone: ByClass
    fresh: Prototypes = field(default_factory=lambda: Prototypes.of({}, 0))
    """Class means after local training."""


@dataclass(frozen=True, kw_only=True)
class PrototypeLimits(SharedSettings):
    """What is let out of prototypes that leave a client."""

    clip_norm: NonNegative = 0.0
    """Longer prototypes are scaled to this norm before they leave a client; 0 is off."""
    noise_std: NonNegative = 0.0
    """Standard deviation of Gaussian noise on prototypes that leave a client."""
    min_count: Count = 1
    """Prototypes and counts of classes of fewer examples do not leave a client."""

    def released(self, ctx: ClientContext, prototypes: Prototypes) -> dict[str, Prototypes]:
        """Return the prototypes that may leave a client, as an upload has them."""
        limits = {"clip_norm": self.clip_norm, "noise_std": self.noise_std}
        sent = released(prototypes, ctx.secret_normal, **limits, min_count=self.min_count)
        return {"class": sent}


def no_prototypes(run: RunFacts) -> dict[str, Prototypes]:
    """Return the empty set of everyone's prototypes, before any client has reported one."""
    return {"class": uncounted(Prototypes.of({}, run.width))}


def prototype_upload(run: RunFacts) -> BundleSpec:
    """Return the spec of class prototypes with counts."""
    return prototype_spec("class", run.width, run.problem.num_classes)


def by_class(ctx: ClientContext, bundle: Bundle) -> ByClass:
    """Return a bundle's class prototypes laid out by class, on the client's device."""
    found = bundle.prototypes.get("class")
    return ByClass.of(found, ctx.run.problem.num_classes, ctx.net.width, ctx.device)


def mean_class_prototypes(run: RunFacts, uploads: Uploads, *, uniform: bool = True) -> Prototypes:
    """Return the mean prototype of each class over the clients that report it, without counts."""
    classes, width = run.problem.num_classes, run.width
    return uncounted(uploads.mean_prototypes("class", classes, width, uniform=uniform))


def class_means(ctx: ClientContext, x: Tensor, y: Tensor) -> Prototypes:
    """Return the mean embedding of each class of inputs (n, …) and labels (n,).

    Raises:
        TrainingFailed: it is not finite.
    """
    z, classes = embeddings(ctx.net, x), ctx.run.problem.num_classes
    means = class_prototypes(z, y, classes)
    check_prototypes(ctx, means)
    if ctx.hidden is not None:
        means = ctx.hidden.class_means(ctx, z, y, means)
    return means


def check_prototypes(ctx: ClientContext, prototypes: Prototypes) -> None:
    """Check prototypes before they are clustered; TrainingFailed if training has diverged."""
    if bool(torch.isfinite(prototypes.vectors).all()):
        return
    rows = prototypes.rows().items()
    label = next(k for k, (row, _) in rows if not bool(torch.isfinite(row).all()))
    raise TrainingFailed(f"training diverged: its prototype of class {label} is not finite")


def nearest_and_logits(
    ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, inference: str
) -> Scores:
    """Return scores (B, K) of inputs by the nearest of everyone's prototypes and by the logits.

    The nearest is among the classes that the client has trained on. ``all_classes`` are those of
    the rule ``inference`` without this limit; logits never have it.
    """
    z, everyone = ctx.net.features(x), ctx.once(by_class, payload)
    met, logits = ctx.once(by_class, state).known, ctx.net.head(z)
    is_nearest = inference == "nearest"
    among_all = nearest_scores(z, everyone, torch.ones_like(met)) if is_nearest else logits
    nearest = nearest_scores(z, everyone, met)
    return {"nearest": nearest, "all_classes": among_all, "classifier": logits}
