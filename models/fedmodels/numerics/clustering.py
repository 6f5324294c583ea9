"""Lloyd's k-means with scikit-learn's rules, on one thread so that a result can be repeated."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmodels.errors import ConfigError

Array = TypeVar("Array", Tensor, NDArray[Any])


def kmeans(
    points: Array,
    init: Array | int,
    *,
    max_iter: int = 300,
    tol: float = 1e-4,
    n_init: int = 10,
    seed: int = 0,
) -> Array:
    """Return the centres of :func:`cluster`, (k, d); row g of ``init`` becomes row g."""
    return cluster(points, init, max_iter=max_iter, tol=tol, n_init=n_init, seed=seed)[0]


def cluster(
    points: Array,
    init: Array | int,
    *,
    max_iter: int = 300,
    tol: float = 1e-4,
    n_init: int = 10,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Cluster points by Lloyd's algorithm (FedAli, section 4; FedMLP, "semantic prototype").

    An empty cluster moves to the point farthest from its own centre, scikit-learn's rule; a row is
    never lost. In the end each centre is the float64 mean of the points assigned to it; a centre
    without points (there are fewer distinct points than centres) stays where it was.

    Args:
        points: (n, d), n at least k.
        init: the first centres (k, d), for one run; or k, for ``n_init`` runs from k-means++.
        max_iter: most iterations of a run.
        tol: a run ends when the centres move less than ``tol`` times the mean variance of a
            coordinate.
        n_init: runs from k-means++, of which the best is kept.
        seed: seeds k-means++.

    Returns:
        Centres (k, d), in the dtype of ``points``, and the cluster of each point (n,), int64.

    Raises:
        ConfigError: there are fewer points than centres.
    """
    x = _floats(points)
    start = init if isinstance(init, int) else _floats(init).astype(x.dtype, copy=False)
    k = start if isinstance(start, int) else len(start)
    if len(x) < k:
        raise ConfigError(f"k-means needs a point per centre: {len(x)} points for {k} centres")
    fitted = _fit(x, k, start, max_iter=max_iter, tol=tol, n_init=n_init, seed=seed)
    labels = fitted.labels_.astype(np.int64)
    centres = _means(x, labels, fitted.cluster_centers_.astype(x.dtype, copy=False))
    if not isinstance(points, Tensor):
        return centres, labels
    device = points.device
    dtype = points.dtype if points.is_floating_point() else torch.float64
    return torch.from_numpy(centres).to(device, dtype), torch.from_numpy(labels).to(device)


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Return the index of the centre nearest to each point, (n,) int64; the first among equals."""
    return torch.cdist(points.double(), centres.double()).argmin(1)


def _fit(x: NDArray[Any], k: int, start: NDArray[Any] | int, **options: Any) -> Any:
    """Run scikit-learn's k-means on one thread and return the fitted estimator."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    from_points = isinstance(start, int)
    estimator = KMeans(
        k,
        init="k-means++" if from_points else start,
        n_init=options["n_init"] if from_points else 1,
        max_iter=options["max_iter"],
        tol=options["tol"],
        random_state=options["seed"] % 2**32,
        algorithm="lloyd",
    )
    with threadpool_limits(1), warnings.catch_warnings():
        # Fewer distinct points than centres is no error here: the row stays.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(x)


def _means(x: NDArray[Any], labels: NDArray[np.int64], centres: NDArray[Any]) -> NDArray[Any]:
    """Return the mean of each cluster's points, exact where they are equal."""
    result = centres.copy()
    order = np.argsort(labels, kind="stable")
    found, first = np.unique(labels[order], return_index=True)
    for g, members in zip(found, np.split(order, first[1:]), strict=True):
        origin = x[members[0]].astype(np.float64)
        result[g] = origin + (x[members] - origin).mean(0)
    return result


def _floats(values: Any) -> NDArray[Any]:
    """Return a C-contiguous array of float32 or float64."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values if values.dtype in (torch.float32, torch.float64) else values.double()
    array = np.ascontiguousarray(values)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)
