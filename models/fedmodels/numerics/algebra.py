"""The small numerical problems the methods share.

Functions take tensors or arrays and answer in kind. All of them are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmodels.errors import ConfigError, DataError

Array = TypeVar("Array", Tensor, NDArray[Any])
LARGE = 1e6
"""Coordinates beyond which a sum of them would lose the 1 that weights sum to."""


def simplex_projection(point: Array) -> Array:
    """Return the point of the probability simplex nearest to ``point``.

    Duchi et al., Efficient Projections onto the l1-Ball, ICML 2008, figure 1: O(n log n).

    Args:
        point: (n,), n at least 1.

    Returns:
        (n,) floats of at least 0 that sum to 1, float64 unless ``point`` has another float dtype.
    """
    v = _rows(point, np.float64)
    if np.abs(v).max() > LARGE:  # the projection is that of any point shifted along (1, …, 1)
        v = v - v.max()
    falling = np.sort(v)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(v) + 1)
    threshold = excess[np.flatnonzero(falling > excess)[-1]]
    return _in_kind(np.maximum(v - threshold, 0), point)


def nnls_simplex(factor: Array) -> Array:
    """Solve min over the simplex of ``‖factor @ alpha‖²``: FedPAC's quadratic program.

    With P = LᵀL, min αᵀPα is one non-negative least squares problem, [L; 1ᵀ]α ≈ [0; 1], divided by
    the sum of its solution: for a fixed direction of α with αᵀPα = q, the best scale leaves a
    residual q/(1+q), which grows with q.

    Args:
        factor: L (m, n), for FedPAC ``[diag(sqrt(V)); H_iᵀ]``.

    Returns:
        alpha (n,) on the simplex.
    """
    from scipy.optimize import nnls

    rows = _rows(factor, np.float64)
    largest = float(np.sqrt(np.square(rows).sum(0).max(initial=0)))
    scaled = rows / largest if largest else rows  # the solution does not depend on the scale
    system = np.vstack([scaled, np.ones((1, rows.shape[1]))])
    target = np.append(np.zeros(len(rows)), 1.0)
    if not largest:
        return _in_kind(np.full(rows.shape[1], 1 / rows.shape[1]), factor)
    alpha, _ = nnls(system, target)
    return _in_kind(alpha / alpha.sum(), factor)


def replay_volumes(total: Array, current: Array, *, cap: str = "total") -> Array:
    """Return how many examples of each class to replay beside this round's real ones.

    pFedGRP, local data distribution reconstruction: the history is shrunk by the smallest factor
    that still holds all real data, capped at the largest real class, and what is real is taken off.
    Computed in integers, so that the floor is exact.

    Args:
        total: S (K,), examples of each class met so far, this round's included.
        current: Y (K,), real examples of each class in this round.
        cap: whether the cap applies to real and replayed examples together, ``"total"``, or to the
            ``"generated"`` ones alone.

    Returns:
        (K,) int64, each between 0 and ``max(current)``.

    Raises:
        DataError: a class has more examples now than in total.
        ConfigError: ``cap`` is unknown.
    """
    if cap not in ("total", "generated"):
        raise ConfigError(f"replay cap={cap!r} must be 'total' or 'generated'")
    history, now = _rows(total, np.int64), _rows(current, np.int64)
    if history.shape != now.shape or bool((now > history).any()):
        raise DataError("the history must count at least this round's examples of every class")
    met = np.flatnonzero(now)
    if not len(met):
        return _in_kind(np.zeros_like(history), total)
    # alpha = max Y_c / S_c, kept as the fraction of the class that attains it
    top = max(met, key=lambda c: now[c] / history[c])
    shrunk = history * now[top] // history[top]
    highest = now.max()
    if cap == "total":
        volumes = np.maximum(np.minimum(shrunk, highest) - now, 0)
    else:
        volumes = np.minimum(np.maximum(shrunk - now, 0), highest)
    return _in_kind(volumes, total)


def class_means(
    features: Tensor, labels: Tensor, num_classes: int
) -> dict[int, tuple[Tensor, int]]:
    """Return the mean embedding and the number of examples of each class that is present.

    Args:
        features: (n, d) embeddings.
        labels: (n,) class of each.
        num_classes: K; labels lie in 0…K-1.

    Returns:
        ``{class: (mean (d,), count)}``, in order of the class; the means are summed in float64 and
        have the dtype and device of ``features``.

    Raises:
        DataError: a label is out of range.
    """
    features, labels = features.detach(), labels.to(features.device)
    counts = torch.bincount(labels.cpu().long(), minlength=num_classes).tolist()
    if len(counts) > num_classes:
        raise DataError(f"label {len(counts) - 1} is out of range for {num_classes} classes")
    return {
        k: (features[labels == k].double().mean(0).to(features.dtype), count)
        for k, count in enumerate(counts)
        if count
    }


def _in_kind(result: NDArray[Any], example: Array) -> Array:
    """Return a tensor where the input was one; floats keep a float input's dtype."""
    if not isinstance(example, Tensor):
        return result
    tensor = torch.from_numpy(result).to(example.device)
    both_floats = tensor.is_floating_point() and example.is_floating_point()
    return tensor.to(example.dtype) if both_floats else tensor


def _rows(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the values as an array of this dtype, whatever holds them."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    return np.asarray(values, dtype=dtype)


def padded(tensor: Tensor, shape: Sequence[int], rest: float = 0.0) -> Tensor:
    """Return a tensor of a larger shape that begins with this one, and holds one value beyond."""
    found = tensor.new_full(tuple(shape), rest)
    found[tuple(slice(n) for n in tensor.shape)] = tensor
    return found
