"""Distances between embeddings and prototypes, row by row."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, normalize, smooth_l1_loss


def smooth_l1(z: Tensor, target: Tensor, threshold: float, reduction: str) -> Tensor:
    """Return the smooth-L1 distance of each row, (n, d) and (n, d) give (n,)."""
    per_coordinate = smooth_l1_loss(z, target, reduction="none", beta=threshold)
    return per_coordinate.mean(1) if reduction == "mean" else per_coordinate.sum(1)


def divergence(z: Tensor, c: Tensor, tau: float, norm: str, direction: str) -> Tensor:
    """Return KL(z || c) of each row, or KL(c || z), both turned into distributions over d: (n,)."""
    if norm == "l2_softmax":
        z, c = normalize(z, dim=1), normalize(c, dim=1)
    p, q = log_softmax(z / tau, 1), log_softmax(c / tau, 1)
    # torch's kl_div(log q, log p) is KL(p || q)
    first, second = (q, p) if direction == "z_c" else (p, q)
    return kl_div(first, second, reduction="none", log_target=True).sum(1)
