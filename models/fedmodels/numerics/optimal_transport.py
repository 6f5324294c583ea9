"""Transport plans between embeddings and prototypes: Sinkhorn's of our own, and those of POT."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmodels.errors import ConfigError

Array = TypeVar("Array", Tensor, NDArray[Any])
SOLVERS = ("entropic", "emd", "unbalanced")
"""The solvers of POT."""
MIN_UNBALANCED_EPSILON = 0.003
"""Smallest epsilon of ``unbalanced`` for cosines: below it POT's numbers underflow, and the plan
that comes out is wrong."""
COSINES = 2.0
"""Bound on the difference of two cosines."""
MIN_LOG = -42.0
"""Logarithm down to which entries of a plan are numbers, with room for twice as small products."""
MIN_LOG_64 = -300.0
"""The same of float64."""


def sinkhorn_plan(
    similarity: Array,
    epsilon: float = 0.05,
    iterations: int = 3,
    *,
    last: str = "prototypes",
    spread: float | None = None,
) -> Array:
    """Return the entropic transport plan between embeddings and prototypes.

    ``exp(similarity / epsilon)``, whose rows and then columns are divided by their sums, again and
    again (FedAli, equation 4). Columns sum to 1; rows come near to P/N with more iterations. The
    divisors are two vectors, one of rows and one of columns, and the plan is multiplied once. Half
    precision is lifted to float32, since e^20 does not fit it. Where e^(similarity / epsilon) would
    underflow, the same is done with logarithms, in float64; for cosines, that is never the case
    from epsilon = 0.048 on.

    Args:
        similarity: (N, P), embeddings by prototypes, cosines in FedAli.
        epsilon: temperature, above 0.
        iterations: how many times both sums are divided out.
        last: which sums are exact, those of the ``"prototypes"`` (columns, as in the paper) or
            those of the ``"samples"`` (rows, as in SwAV).
        spread: bound on the difference of two similarities, ``COSINES`` for cosines; measured when
            omitted, which no vmap and no exported graph can do.

    Returns:
        The plan (N, P), without gradient.

    Raises:
        ConfigError: ``last`` is neither.
    """
    if last not in ("prototypes", "samples"):
        raise ConfigError(f"sinkhorn last={last!r} must be 'prototypes' or 'samples'")
    axes = (1, 0) if last == "prototypes" else (0, 1)
    scores = similarity if isinstance(similarity, Tensor) else torch.tensor(similarity)
    with torch.no_grad(), torch.autocast(scores.device.type, enabled=False):
        scores = scores.detach() if scores.dtype == torch.float64 else scores.float()
        # A factor common to what is summed first cancels there: take the largest out.
        apart = scores - scores.amax(axes[0], keepdim=True)
        if spread is None:
            spread = -float(apart.amin()) if apart.numel() else 0.0
        if -spread / epsilon < MIN_LOG:
            plan = _divide_logs(apart.double() / epsilon, iterations, axes).to(apart.dtype)
        else:
            plan = _scale(apart.div_(epsilon).exp_(), iterations, axes)
    return plan if isinstance(similarity, Tensor) else plan.numpy()


def _scale(kernel: Tensor, iterations: int, axes: tuple[int, int]) -> Tensor:
    """Return the plan of a kernel (N, P), which is overwritten."""
    first = kernel if axes[0] == 1 else kernel.T  # sums over the first axis are products with it
    outer, inner = kernel.new_ones(first.shape[0]), kernel.new_ones(first.shape[1])
    for _ in range(iterations):
        outer = (first @ inner).reciprocal_()
        outer = outer / outer.mean()  # the next vector makes up for any factor
        inner = (first.T @ outer).reciprocal_()
    first.mul_(outer[:, None]).mul_(inner)
    return kernel


def _divide_logs(logs: Tensor, iterations: int, axes: tuple[int, int]) -> Tensor:
    """Return the plan of logarithms (N, P) without calculating a number that underflows."""
    for _ in range(iterations):
        for axis in axes:
            logs = logs - logs.logsumexp(axis, keepdim=True)
    return logs.exp_()


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
    :func:`sinkhorn_plan` do.

    Args:
        similarity: S (N, P), embeddings by prototypes, cosines in FedAli.
        solver: ``entropic`` as above; ``emd`` without the entropy; ``unbalanced`` with both
            marginals as penalties instead of constraints.
        epsilon: weight of the entropy, above 0; ``unbalanced`` takes ``MIN_UNBALANCED_EPSILON`` at
            least.
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
        # Both methods take the same steps; with logarithms a step takes twenty times as long.
        method = "sinkhorn" if -np.ptp(cost) / epsilon > MIN_LOG_64 else "sinkhorn_log"
        plan = ot.sinkhorn(
            rows, columns, cost, epsilon, method=method, numItermax=iterations, warn=False
        )
    else:
        plan = ot.unbalanced.sinkhorn_unbalanced(
            rows, columns, cost, epsilon, marginal_penalty, numItermax=iterations, warn=False
        )
    return torch.from_numpy(plan * cost.shape[1]).to(similarity.device, torch.float32)
