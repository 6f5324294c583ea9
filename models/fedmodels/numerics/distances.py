"""Distances between embeddings, and between the distributions that logits stand for."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import log_softmax, smooth_l1_loss


def smooth_l1(z: Tensor, target: Tensor) -> Tensor:
    """Return the smooth-L1 distance of each row, a mean over coordinates: (n, d), (n, d) -> (n,).

    It turns from a square into a line at a distance of 1 (Girshick, Fast R-CNN, ICCV 2015).
    """
    return smooth_l1_loss(z, target, reduction="none").mean(1)


def divergence(z: Tensor, c: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL(z || c) of each row, both turned into distributions by a softmax: (n,)."""
    p, q = log_softmax(z / tau, 1), log_softmax(c / tau, 1)
    return _apart(p, q).sum(1)


def distillation(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL(teacher || student) of logits (B, K) at a temperature, batch mean; no factor T².

    The teacher gets no gradient.
    """
    wanted, found = log_softmax(teacher.detach() / tau, 1), log_softmax(student / tau, 1)
    return _apart(wanted, found).sum() / len(found)


def _apart(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the terms of KL(p || q); what torch's kl_div does, and torch.vmap maps."""
    return log_p.exp() * (log_p - log_q)
