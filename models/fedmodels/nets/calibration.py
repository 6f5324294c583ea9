"""What a model's answers are held against: validation examples, which it was not trained on.

A temperature makes of its logits probabilities that are right as often as they say (Guo et al.
2017, "On Calibration of Modern Neural Networks", section 4.2). An input is far from the training
data where its embedding is further from each class's mean embedding than 99 of 100 validation
examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedmodels.nets.split import SplitNet
from fedmodels.numerics.metrics import as_one

if TYPE_CHECKING:
    from fedmodels.problems.targets import Targets

FEW = 20
"""Validation examples below which nothing is said."""
SHARE = 0.99
"""Part of the validation examples that are no further than what is called near."""
SHARPEST, STEPS = 20.0, 60
"""Greatest factor of logits, and halvings of the interval it is looked for in."""
NEVER = -1e9
"""Logit of a class that is part of another one: finite, as its share of a mean is 0."""
BATCH = 256
"""Examples that are looked at together."""
COVERED = 0.9
"""Part of the numbers that lie in the interval of their prediction."""


@dataclass(frozen=True)
class Calibration:
    """What validation examples tell of a model."""

    temperature: float
    """Logits are divided by it."""
    examples: int
    means: Tensor  # (P, D), the mean embedding of each class that has examples
    reach: float
    """The distance to the nearest mean beyond which an input is far; 0 where none can be told."""
    widths: Sequence[float] = ()
    """Of numbers: by how much each prediction may miss, in the unit of its column (T,)."""


def calibrated_targets(
    net: SplitNet, sets: Iterable[tuple[Tensor, Tensor]], targets: Targets
) -> Calibration | None:
    """Look at validation examples: inputs, normalised, and targets (n, T) as they are learned.

    Of :data:`COVERED` of new examples that are like them, a number lies no farther from its
    prediction than ``widths`` says: split conformal prediction (Lei et al. 2018, "Distribution-Free
    Predictive Inference for Regression", section 2.2), for each target by itself. Quantiles say
    their own interval.

    Returns:
        None where there are too few, or outputs are not finite.
    """
    if (seen := _seen_by(net, sets)) is None:
        return None
    outputs, z, y = seen
    means, reach = near_classes(z, torch.zeros(len(z), dtype=torch.int64))
    widths: list[float] = []
    if targets.columns.target and not targets.columns.quantiles:
        misses = (outputs - y).abs().sort(dim=0).values[math.ceil((len(y) + 1) * COVERED) - 1]
        widths = (misses.numpy() * targets.std).tolist()
    temperature = temperature_of_labels(outputs, y) if targets.columns.labels else 1.0
    return Calibration(temperature, len(y), means, reach, widths)


def calibrated(
    net: SplitNet,
    sets: Iterable[tuple[Tensor, Tensor]],
    merged: Sequence[tuple[int, int]] = (),
) -> Calibration | None:
    """Look at validation examples: inputs (n, *input_shape), normalised, and labels (n,).

    ``merged`` has labels of classes that are part of others, each with the label of the other.

    Returns:
        None where there are too few, or outputs are not finite.
    """
    if (seen := _seen_by(net, sets)) is None:
        return None
    logits, z, y = seen
    if merged:
        logits = as_one(logits, merged).clamp(min=NEVER)
    means, reach = near_classes(z, y)
    return Calibration(temperature_of(logits, y), len(y), means, reach)


@torch.no_grad()
def _seen_by(
    net: SplitNet, sets: Iterable[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return outputs (n, K), embeddings (n, D) and what is learned of examples; None of too few."""
    was_training = net.training
    net.eval()
    outputs, labels = list[tuple[Tensor, Tensor]](), list[Tensor]()
    for x, y in sets:
        for xs in net.split(x, BATCH) if len(x) else ():
            z = net.features(xs)
            outputs.append((net.head(z).double().cpu(), z.flatten(1).double().cpu()))
        labels.append(y.cpu())
    net.train(was_training)
    y = torch.cat(labels) if labels else torch.zeros(0, dtype=torch.int64)
    if len(y) < FEW:
        return None
    logits, z = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    if not bool(torch.isfinite(logits).all() and torch.isfinite(z).all()):
        return None
    return logits, z, y


def temperature_of(logits: Tensor, y: Tensor) -> float:
    """Return the temperature T that gives examples (n,) the least loss with ``logits / T`` (n, K).

    The loss is convex in 1 / T, so its slope, the mean logit expected less the true one, is 0 once.
    Where each example is right, nothing tells how sure a model may be, and T is 1 at least.
    """
    true = logits.gather(1, y[:, None])[:, 0]
    found = _flat(
        lambda factor: ((logits * factor).softmax(1) * logits).sum(1).mean() - true.mean()
    )
    return max(found, 1.0) if bool((logits.argmax(1) == y).all()) else found


def temperature_of_labels(logits: Tensor, y: Tensor) -> float:
    """Return the one temperature of all labels, as :func:`temperature_of`, of logits (n, K).

    The loss is that of each label by itself; ``y`` (n, K) has 1 where an example has it.
    """
    best = _flat(lambda factor: ((torch.sigmoid(logits * factor) - y) * logits).mean())
    return max(best, 1.0) if bool(((logits > 0) == (y > 0)).all()) else best


def _flat(slope: Callable[[float], Tensor]) -> float:
    """Return the temperature at whose inverse a slope that rises is 0."""
    low, high = math.log(1 / SHARPEST), math.log(SHARPEST)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if float(slope(math.exp(middle))) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def near_classes(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Return the mean embedding of each class (P, D), and how far from the nearest is still near.

    An example is held against the mean of its class without itself. Classes of one example count
    for others alone.

    Args:
        z: (n, D) embeddings.
        y: (n,) labels.
    """
    classes, rows = torch.unique(y, return_inverse=True)
    counts = torch.bincount(rows).to(z.dtype)
    means = torch.zeros(len(classes), z.shape[1], dtype=z.dtype).index_add_(0, rows, z)
    means /= counts[:, None]
    away = torch.cdist(z, means, compute_mode="donot_use_mm_for_euclid_dist")
    alone = counts / (counts - 1)  # infinite for a class of one
    own = away.gather(1, rows[:, None])[:, 0] * alone[rows]
    away.scatter_(1, rows[:, None], torch.where(own.isnan(), math.inf, own)[:, None])
    nearest = away.amin(1)
    nearest = nearest[torch.isfinite(nearest)].sort().values
    if not len(nearest):
        return means.float(), 0.0
    place = min(math.ceil((len(nearest) + 1) * SHARE), len(nearest)) - 1
    return means.float(), float(nearest[place])
