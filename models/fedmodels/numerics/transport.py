"""Transport plans that POT solves; our own is :func:`fedmodels.numerics.algebra.sinkhorn_plan`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedmodels.errors import ConfigError

SOLVERS = ("entropic", "emd", "unbalanced")


def pot_plan(
    similarity: Tensor,
    solver: str,
    epsilon: float = 0.05,
    iterations: int = 1000,
    marginal_penalty: float = 1.0,
) -> Tensor:
    r"""Return the transport plan between embeddings and prototypes, as POT solves it.

    .. math:: P \cdot \arg\min_{C \ge 0} \langle C, 1 - S \rangle - \epsilon H(C),
        \quad C 1 = 1/N, \quad C^T 1 = 1/P

    where S is the similarity and H the entropy. The factor P makes columns sum to one, as those of
    :func:`~fedmodels.numerics.algebra.sinkhorn_plan` do.

    Args:
        similarity: S (N, P), embeddings by prototypes, cosines in FedAli.
        solver: ``entropic`` as above; ``emd`` without the entropy; ``unbalanced`` with both
            marginals as penalties instead of constraints.
        epsilon: weight of the entropy, above 0.
        iterations: of Sinkhorn's algorithm at most.
        marginal_penalty: weight of the marginals' Kullback-Leibler divergences (``unbalanced``).

    Returns:
        The plan (N, P), float32 on the device of the similarity, without gradient.

    Raises:
        ConfigError: the solver is unknown.

    Reference:
        Flamary et al., POT: Python Optimal Transport, JMLR 2021.
    """
    if solver not in SOLVERS:
        raise ConfigError(f"transport solver={solver!r} must be one of {', '.join(SOLVERS)}")
    import ot  # imports slowly, and most runs need none of it

    cost = 1.0 - similarity.detach().cpu().numpy().astype(np.float64)
    rows, columns = (np.full(n, 1 / n) for n in cost.shape)
    if solver == "emd":
        plan = ot.emd(rows, columns, cost)
    elif solver == "entropic":
        plan = ot.sinkhorn(
            rows, columns, cost, epsilon, method="sinkhorn_log", numItermax=iterations, warn=False
        )
    else:
        plan = ot.unbalanced.sinkhorn_unbalanced(
            rows, columns, cost, epsilon, marginal_penalty, numItermax=iterations, warn=False
        )
    return torch.from_numpy(plan * cost.shape[1]).to(similarity.device, torch.float32)
