"""Distances between embeddings, and between the distributions that logits stand for."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, smooth_l1_loss


def smooth_l1(z: Tensor, target: Tensor) -> Tensor:
    """Return the smooth-L1 distance of each row, a mean over coordinates: (n, d), (n, d) -> (n,).

    It turns from a square into a line at a distance of 1 (Girshick, Fast R-CNN, ICCV 2015).
    """
    return smooth_l1_loss(z, target, reduction="none").mean(1)


def divergence(z: Tensor, c: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL(z || c) of each row, both turned into distributions by a softmax: (n,)."""
    p, q = log_softmax(z / tau, 1), log_softmax(c / tau, 1)
    return kl_div(q, p, reduction="none", log_target=True).sum(1)  # torch's kl_div(log q, log p)


def distillation(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL(teacher || student) of logits (B, K) at a temperature, batch mean; no factor T².

    The teacher gets no gradient.
    """
    wanted, found = log_softmax(teacher.detach() / tau, 1), log_softmax(student / tau, 1)
    return kl_div(found, wanted, reduction="batchmean", log_target=True)
