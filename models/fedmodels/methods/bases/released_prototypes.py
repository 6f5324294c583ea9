"""What the methods share whose clients send prototypes: limits on what the prototypes give away."""

from __future__ import annotations

from dataclasses import dataclass

from fedmodels.methods.fedavg import FedAvg
from fedmodels.numerics.prototypes import released
from fedmodels.tensors.bundle import Prototypes
from fedmodels.training.method import ClientContext


@dataclass(frozen=True, kw_only=True)
class ReleasedPrototypes(FedAvg):
    """FedAvg with the switches for what leaves a client of its prototypes."""

    clip_norm: float = 0.0
    """Longer prototypes are scaled to this norm before they leave a client; 0 is off."""
    noise_std: float = 0.0
    """Standard deviation of Gaussian noise on prototypes that leave a client."""
    min_count: int = 1
    """Prototypes and counts of classes of fewer examples do not leave a client."""

    def released(self, ctx: ClientContext, prototypes: Prototypes) -> Prototypes:
        """Return the prototypes that may leave a client."""
        return released(
            prototypes,
            ctx.secret_normal,
            clip_norm=self.clip_norm,
            noise_std=self.noise_std,
            min_count=self.min_count,
        )
