"""How far examples moved from earlier ones, by a test that needs no earlier example.

The test is that of Rabanser, Günnemann and Lipton, Failing Loudly: An Empirical Study of Methods
for Detecting Dataset Shift, NeurIPS 2019, https://arxiv.org/abs/1810.11953: reduce each example to
a few numbers, run a two-sample Kolmogorov-Smirnov test on each number, and correct for their count
as Bonferroni. Inputs are reduced by a random projection, or not at all where they are short.
Predictions are a net's softmax (BBSDs).

Deviations: of earlier inputs only quantiles of each number are left. That moves the statistic by at
most 1 / (2 Q), and the p-value is of a statistic that is smaller by that. The projection is dense.

Shapes: m earlier and n present examples, d numbers of each, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmodels.numerics.metric_tables import DRIFT_PARTS

QUANTILES = 64
"""Q."""
MAX_NUMBERS = 32
"""d at most; examples of more numbers are projected."""
MAX_EXAMPLES = 1000
"""Examples that are looked at."""
ALPHA = 0.01
"""A smaller p-value is told."""
NAMES = tuple(f"{part}_drift{end}" for part in DRIFT_PARTS for end in ("", "_p"))
"""What a client reports, each from 0 to 1."""


@dataclass(frozen=True)
class Summary:
    """What is kept of the inputs of a task."""

    task: int
    count: int
    """m."""
    quantiles: Tensor  # (Q, d)

    @classmethod
    def of(cls, task: int, numbers: Tensor) -> Summary:
        """Summarise the numbers (m, d) of a task's inputs."""
        levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
        found = np.quantile(numbers.numpy(), levels, axis=0, method="inverted_cdf")
        return cls(task, len(numbers), torch.from_numpy(found.astype(np.float32)))

    def tensors(self, place: str) -> dict[str, Tensor]:
        """Return the summary as tensors under a place."""
        facts = torch.tensor([self.task, self.count])
        return {f"{place}/facts": facts, f"{place}/quantiles": self.quantiles}

    @classmethod
    def under(cls, tensors: Mapping[str, Tensor], place: str) -> Summary | None:
        """Return the summary under a place, if there is one."""
        if f"{place}/facts" not in tensors:
            return None
        task, count = tensors[f"{place}/facts"].tolist()
        return cls(task, count, tensors[f"{place}/quantiles"])

    def drift(self, numbers: Tensor) -> tuple[float, float]:
        """Return how far later inputs, of numbers (n, d), lie from these, and its p-value."""
        return drift(self.quantiles, numbers, self.count, slack=1 / (2 * QUANTILES))


def reduced(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return at most ``MAX_NUMBERS`` numbers (n, d) of each of n examples (n, …).

    Args:
        x: the examples.
        generator: draws the projection; of one seed for all examples that are compared.
    """
    flat = x.flatten(1).float().cpu()
    if flat.shape[1] <= MAX_NUMBERS:
        return flat
    projection = torch.randn(flat.shape[1], MAX_NUMBERS, generator=generator)
    return torch.matmul(flat, projection / MAX_NUMBERS**0.5)


def drift(
    earlier: Tensor, present: Tensor, count: int | None = None, slack: float = 0.0
) -> tuple[float, float]:
    """Return the largest Kolmogorov-Smirnov statistic over d numbers, and its p-value.

    Args:
        earlier: numbers (m, d), or quantiles (Q, d) of them.
        present: numbers (n, d).
        count: m, where there are quantiles.
        slack: by how much the statistic may be too large.
    """
    from scipy.stats import kstwo  # takes a second to import

    columns = zip(earlier.T.numpy(), present.T.numpy(), strict=True)
    furthest = max(_distance(*column) for column in columns)
    m, n, d = count or len(earlier), len(present), present.shape[1]
    p = kstwo.sf(max(furthest - slack, 0.0), max(round(m * n / (m + n)), 1))
    return furthest, min(1.0, d * float(p))


def _distance(earlier: NDArray[np.float32], present: NDArray[np.float32]) -> float:
    """Return the Kolmogorov-Smirnov statistic: the largest gap between two distributions."""
    both = np.concatenate([earlier, present])
    one, other = (np.searchsorted(np.sort(x), both, "right") / len(x) for x in (earlier, present))
    return float(np.abs(one - other).max())
