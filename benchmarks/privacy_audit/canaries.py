"""Methods whose clients, or examples, are canaries: each moves one number, or does not.

Whose number moves, and whose is there, is known to nobody but the auditor. The canaries touch
different numbers, and the noise on each is its own. So each canary is a play by itself, and one run
is as many plays as it has canaries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedtide import FedAvg

FAR = 1000.0
"""Length of what a canary does, before it is bounded."""


def there(number: int, seed: int) -> Tensor:
    """Return which of so many canaries are there: a chance of one half each (n,)."""
    return torch.rand(number, generator=torch.Generator().manual_seed(seed)) < 0.5


class CanaryClients(FedAvg):
    """Client k moves number k of the classifier's weights by as much as it may, if it is there."""

    canaries: int = 0
    """Seed of who is there."""

    def prepare(self, ctx: Any, payload: Any, state: Any) -> Any:
        """Keep what the client was given."""
        return {name: weight.clone() for name, weight in payload.weights.items()}

    def uplink(self, ctx: Any, state: Any, refs: Any) -> Any:
        """Send what was given, with one number moved."""
        upload = super().uplink(ctx, state, refs)
        weights = {name: weight.clone() for name, weight in refs.items()}
        is_there = there(ctx.run.experiment.schedule.clients, self.canaries)[ctx.client]
        weights["head/weight"].view(-1)[ctx.client] += FAR * float(is_there)
        return replace(upload, weights=weights)


class CanaryExamples(FedAvg):
    """Example k pulls at number k of the classifier's weights as hard as it may, if it is there."""

    canaries: int = 0
    """Seed of which are there."""

    def prepare(self, ctx: Any, payload: Any, state: Any) -> Any:
        """Draw who is there: under vmap a draw would be another one for each example."""
        return there(ctx.net.head.weight.numel(), self.canaries).float()

    def loss(self, ctx: Any, batch: Any, out: Any, refs: Any) -> Tensor:
        """Return a loss that is linear in one number of the model for each example."""
        numbers = ctx.net.head.weight.flatten()
        return (FAR * refs[batch.index] * numbers[batch.index]).sum() + 0.0 * out.logits.sum()
