"""FedPAC's mixtures of heads: what clients tell of their examples, and the weights that follow.

Xu, Tong, Huang, ICLR 2023, section 4.2. https://arxiv.org/abs/2306.11867

    paper    here                          paper      here
    h_i^k    Statistics.h: p_k mu_k        V_i        Statistics.variance
    alpha    mixtures (eq. 13)

Shapes: n clients, K classes, d coordinates of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.nets.embedding import embeddings
from fedmodels.numerics.algebra import class_means, nnls_simplex
from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.training.contexts import ClientContext
from fedmodels.training.run import RunFacts


@dataclass(frozen=True)
class Statistics:
    """What a client's examples look like to one model."""

    means: dict[int, tuple[Tensor, int]]
    """Mean feature (d,) and number of examples of each class it has."""
    h: Prototypes
    """p_k mu_k of each class."""
    variance: float
    """V: variance of the mean of one-hot label times feature, over the examples."""


def statistics_of(ctx: ClientContext) -> Statistics:
    """Describe a client's training data as the net in its present state sees them (eq. 11, 12)."""
    x, y = ctx.stream.train(ctx.task)
    classes, width, n = ctx.run.problem.num_classes, ctx.run.width, len(y)
    if not n:
        return Statistics({}, Prototypes.of({}, width), 0.0)
    z = embeddings(ctx.net, x)  # (n, d)
    means = class_means(z, y, classes)
    h = {k: (mean.double() * (count / n), count) for k, (mean, count) in means.items()}
    squares = sum(float(row.square().sum()) for row, _ in h.values())
    variance = (float(z.double().square().sum(1).mean()) - squares) / n
    return Statistics(means, Prototypes.of(h, width), max(variance, 0.0))


def mixtures(
    uploads: Mapping[int, Bundle], run: RunFacts, *, min_weight: float
) -> list[list[float]]:
    """Return alpha, a row on the simplex for each client (eq. 13).

    min over alpha of alpha^T (diag(V) + H_i H_i^T) alpha, where row j of H_i is h_i - h_j. With
    h^T = Q R, the columns of R are as far from each other as the rows of h are.

    Args:
        uploads: h in ``prototypes["statistics"]`` and V in ``scalars["variance"]`` of each client.
        run: the run.
        min_weight: weights below it become 0.

    Raises:
        PayloadError: a client reports statistics of a class that does not exist.
    """
    classes = run.problem.num_classes
    h = np.zeros((len(uploads), classes, run.width))
    for row, (client, upload) in zip(h, uploads.items(), strict=True):
        for k, (vector, _) in upload.prototypes["statistics"].rows().items():
            if not 0 <= k < classes:
                raise PayloadError(f"client {client} reports statistics of class {k}")
            row[k] = vector.numpy()
    corner = np.asarray(np.linalg.qr(h.reshape(len(uploads), -1).T, mode="r"))
    deviations = np.diag(np.sqrt([max(u.scalars["variance"], 0.0) for u in uploads.values()]))
    found = []
    for i in range(len(uploads)):
        apart = corner[:, i, None] - corner
        apart[np.abs(apart) < 1e-12 * np.abs(corner).max()] = 0  # rounding of equal rows of h
        alpha = nnls_simplex(np.vstack([deviations, apart]))
        kept = np.where(alpha < min_weight, 0.0, alpha)
        kept = kept if kept.any() else alpha  # many alike clients have small weights each
        found.append((kept / kept.sum()).tolist())
    return found
