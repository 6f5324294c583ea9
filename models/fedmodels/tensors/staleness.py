"""Uploads that were trained from an earlier model than the present one, as FedBuff counts them.

Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022, Algorithm 1.
https://arxiv.org/abs/2106.06639

    paper        here
    w^t          present
    w^(t - tau)  begun: the weights that the client began with
    Delta_i      begun - upload, the client's difference with its sign turned
    tau          staleness: commits since the client's model
    s(tau)       discount, (1 + tau)^-a; the paper's a is 1/2
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from fedmodels.tensors.bundle import Weights


def discount(staleness: int, exponent: float) -> float:
    """Return s(tau) = (1 + tau)^-a, the factor of a client's difference; 1 for a fresh one."""
    return float((1 + staleness) ** -exponent)


def rebase(
    upload: Weights, begun: Weights, present: Weights, factor: float, parameters: Collection[str]
) -> Weights:
    """Return an upload as if its client had begun with the present weights.

    The weighted mean of such uploads is the present weights plus the weighted mean of the clients'
    differences times their factors: FedBuff's step with a server learning rate of 1.

    Args:
        upload: what the client sent, by key.
        begun: what it began with, with the same keys.
        present: everybody's weights now, with the same keys.
        factor: of its difference, 0 … 1.
        parameters: keys of parameters. Of other tensors, such as running variances, a difference
            means nothing: floating ones are mixed by ``factor``, and integers stay the client's.

    Returns:
        The weights, computed in float64 and rounded once to the dtype of the upload.
    """
    found: dict[str, Tensor] = {}
    for key, sent in upload.items():
        if not sent.is_floating_point():
            found[key] = sent
            continue
        base = begun[key] if key in parameters else present[key]
        moved = (sent.double() - base.double()) * factor
        found[key] = moved.add_(present[key]).to(sent.dtype)
    return found
