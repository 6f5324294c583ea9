"""The distance between real and generated images, over their features."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedmodels.errors import DataError


def fid(real: Tensor | ArrayLike, fake: Tensor | ArrayLike) -> float:
    """Return the Fréchet distance of two sets of features, each taken as a Gaussian.

    Heusel et al., GANs Trained by a Two Time-Scale Update Rule, NeurIPS 2017, equation 6. Use at
    least ten times as many rows as columns.

    Args:
        real: (n, d).
        fake: (m, d).
    """
    r, f = (_rows(x) for x in (real, fake))
    if min(len(r), len(f)) < 2 or r.shape[1:] != f.shape[1:]:
        raise DataError("FID needs two sets of at least two features of one width")
    return frechet_distance(r.mean(0), np.cov(r.T), f.mean(0), np.cov(f.T))


def frechet_distance(mu1: ArrayLike, cov1: ArrayLike, mu2: ArrayLike, cov2: ArrayLike) -> float:
    """Return ‖μ1−μ2‖² + Tr(Σ1 + Σ2 − 2(Σ1^½ Σ2 Σ1^½)^½), by symmetric eigenvalues.

    Means are (d,), covariances (d, d).
    """
    s1, s2 = (np.atleast_2d(np.asarray(c, dtype=np.float64)) for c in (cov1, cov2))
    apart = np.atleast_1d(np.subtract(mu1, mu2, dtype=np.float64))
    values, vectors = np.linalg.eigh(s1)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.linalg.eigvalsh(root @ s2 @ root)
    distance = apart @ apart + np.trace(s1) + np.trace(s2) - 2 * np.sqrt(cross.clip(0)).sum()
    return max(float(distance), 0.0)


def _rows(features: Tensor | ArrayLike) -> NDArray[np.float64]:
    """Return features as float64 rows."""
    if isinstance(features, Tensor):
        features = features.detach().cpu().numpy()
    return np.asarray(features, dtype=np.float64)
