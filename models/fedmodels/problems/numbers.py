"""Numbers to predict (``[data.columns] target``): regression.

In training a target is counted from its mean, in deviations. Figures are in the unit of its column.
Of several targets a figure is the unweighted mean over them, as scikit-learn's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from fedmodels.problems.targets import Targets

LARGEST = 1e300
POSITIVE = (0.0, LARGEST)


@dataclass(frozen=True)
class Numbers(Targets):
    """One number or several of each example."""

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The quantiles (Q,) that are predicted of each target; none with another loss."""
        return self.columns.quantiles or ()

    @property
    def figures(self) -> Mapping[str, tuple[float, float]]:
        """The figures; ``pinball`` of quantiles alone."""
        found = {"mae": POSITIVE, "rmse": POSITIVE, "r2": (-LARGEST, 1.0)}
        return found | {"mae_of_mean": POSITIVE} | ({"pinball": POSITIVE} if self.quantiles else {})

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the squared, Huber or pinball loss, a mean over the outputs of an example.

        The Huber loss is e²/2 for errors up to delta; beyond, it is linear (Huber, 1964).
        """
        if self.quantiles:
            return self._pinball(outputs, y).mean(1)
        if self.training.loss == "huber":
            delta = self.training.huber_delta
            return huber_loss(outputs, y, reduction="none", delta=delta).mean(1)
        return (outputs - y).square().mean(1)

    def _pinball(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return max(q e, (q - 1) e) of each output (B, K), e the target minus the output.

        Koenker and Bassett, Regression Quantiles, Econometrica 1978.
        """
        q = torch.tensor(self.quantiles, dtype=outputs.dtype, device=outputs.device)
        error = y[:, :, None] - outputs.reshape(len(y), -1, len(q))
        return torch.maximum(q * error, (q - 1) * error).flatten(1)

    def point(self, outputs: Tensor) -> Tensor:
        """Return the prediction (n, T) of outputs (n, K): of quantiles that nearest to 0.5."""
        if not self.quantiles:
            return outputs
        nearest = min(range(len(self.quantiles)), key=lambda k: abs(self.quantiles[k] - 0.5))
        return outputs.reshape(len(outputs), -1, len(self.quantiles))[:, :, nearest]

    def score(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return the figures, in the unit of the targets."""
        found, true = outputs.double().cpu(), y.double().cpu()
        std = torch.from_numpy(self.std)
        error = self.point(found) - true
        squares, around = error.square().mean(0), (true - true.mean(0)).square().mean(0)
        told = {
            "mae": error.abs().mean(0) @ std / len(std),
            "rmse": squares.sqrt() @ std / len(std),
            "mae_of_mean": true.abs().mean(0) @ std / len(std),
        }
        if bool((around > 0).all()):
            told["r2"] = (1 - squares / around).mean()
        if self.quantiles:
            each = self._pinball(found, true).mean(0).reshape(len(std), -1).mean(1)
            told["pinball"] = each @ std / len(std)
        return {name: float(value) for name, value in told.items()}

    def answers(self, outputs: Tensor) -> Tensor:
        """Return what outputs say, in the unit of their target (B, K)."""
        each = len(self.outputs) // len(self.names)
        mean, std = (torch.from_numpy(np.repeat(n, each)) for n in (self.mean, self.std))
        return outputs.double() * std.to(outputs.device) + mean.to(outputs.device)
