"""How credible drawn embeddings are among a client's own, and what holds a net to its predecessor.

Wuerkaixi et al. (AF-FCL), ICLR 2024. https://openreview.net/forum?id=ShQrnAsbPI

Shapes: B batch, m drawn points, d coordinates of an embedding, K classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

TEMPERATURE = 2.0
MIN_VARIANCE = 1e-2
"""Of a class's Gaussian, in each coordinate; embeddings of few examples would have none."""


def credibility(z: Tensor, y: Tensor, drawn: Tensor, labels: Tensor, otherwise: Tensor) -> Tensor:
    """Return w (m,), the density per coordinate of drawn points under their classes' Gaussians.

    Args:
        z: the batch's real points (B, d).
        y: their labels (B,).
        drawn: points (m, d).
        labels: their labels (m,).
        otherwise: w of classes of which the batch has fewer than two.
    """
    w = otherwise.expand(len(labels)).clone()
    for label in torch.unique(labels).tolist():
        own, rows = z[y == label], labels == label
        if len(own) > 1:
            variance = own.var(0, correction=0).clamp_min(MIN_VARIANCE)
            log_density = -0.5 * (
                (drawn[rows] - own.mean(0)).square() / variance + (2 * math.pi * variance).log()
            )
            w[rows] = log_density.exp().mean(1)
    return w


def distillation(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher ‖ student) of logits (B, K) at temperature 2, not times its square."""
    wanted, found = (log_softmax(logits / TEMPERATURE, 1) for logits in (teacher, student))
    return kl_div(found, wanted, reduction="batchmean", log_target=True)
