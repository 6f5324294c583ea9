"""The base of methods whose clients send prototypes: class means, and limits on what they tell.

Shapes: n examples, K classes, d coordinates of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmodels.config.bounds import Count, NonNegative
from fedmodels.errors import TrainingFailed
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.embedding import embeddings
from fedmodels.nets.split import weights_of
from fedmodels.numerics.prototypes import (
    ByClass,
    class_prototypes,
    mean_prototypes,
    released,
    uncounted,
)
from fedmodels.tensors.bundle import Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec
from fedmodels.training.contexts import ClientContext
from fedmodels.training.run import RunFacts


@dataclass(frozen=True, kw_only=True)
class ReleasedPrototypes(FedAvg):
    """FedAvg with the switches for what leaves a client of its prototypes."""

    clip_norm: NonNegative = 0.0
    """Longer prototypes are scaled to this norm before they leave a client; 0 is off."""
    noise_std: NonNegative = 0.0
    """Standard deviation of Gaussian noise on prototypes that leave a client."""
    min_count: Count = 1
    """Prototypes and counts of classes of fewer examples do not leave a client."""

    def prototype_spec(self, run: RunFacts, *, counted: bool = True) -> BundleSpec:
        """Return the spec of class prototypes; prototypes that come down have no counts."""
        return prototype_spec("class", run.width, run.problem.num_classes, counted=counted)

    def nothing(self, run: RunFacts) -> Prototypes:
        """Return the empty set of everyone's prototypes, before any client has reported one."""
        return uncounted(Prototypes.of({}, run.width))

    def by_class(self, ctx: ClientContext, prototypes: Prototypes | None) -> ByClass:
        """Return prototypes laid out by class, on the client's device; of None, an empty table."""
        return ByClass.of(prototypes, ctx.run.problem.num_classes, ctx.net.width, ctx.device)

    def everyones(
        self, run: RunFacts, reported: Mapping[int, Prototypes], *, uniform: bool
    ) -> Prototypes:
        """Return the mean prototype of each class over the clients that report it, without counts.

        Args:
            run: the run.
            reported: what each client reports, in client-id order.
            uniform: every client counts alike; otherwise by its number of examples of the class.
        """
        classes = run.problem.num_classes
        return uncounted(mean_prototypes(reported, classes, run.width, uniform=uniform))

    def released(self, ctx: ClientContext, prototypes: Prototypes) -> Prototypes:
        """Return the prototypes that may leave a client."""
        return released(
            prototypes,
            ctx.secret_normal,
            clip_norm=self.clip_norm,
            noise_std=self.noise_std,
            min_count=self.min_count,
        )

    def class_means(self, ctx: ClientContext, x: Tensor, y: Tensor) -> Prototypes:
        """Return the mean embedding of each class of inputs (n, …) and labels (n,).

        Raises:
            TrainingFailed: it is not finite.
        """
        means = class_prototypes(embeddings(ctx.net, x), y, ctx.run.problem.num_classes)
        return self.computed(ctx, means)

    def computed(self, ctx: ClientContext, prototypes: Prototypes) -> Prototypes:
        """Return prototypes that were just computed, before anything is clustered by them.

        Raises:
            TrainingFailed: they are not finite, as training diverged in its last steps.
        """
        if bool(torch.isfinite(prototypes.vectors).all()):
            return prototypes
        rows = prototypes.rows().items()
        label = next(k for k, (row, _) in rows if not bool(torch.isfinite(row).all()))
        largest = max(float(w.abs().max()) for w in weights_of(ctx.net).values() if w.numel())
        raise TrainingFailed(
            f"client {ctx.client} diverged in round {ctx.round}: its prototype of class {label} is "
            f"not finite, and its largest weight is {largest:.4g}; what usually helps is a lower "
            f"[training] lr (it is {ctx.run.experiment.training.lr:g}) or a net that normalises, "
            'such as [net] norm = "layer"'
        )
