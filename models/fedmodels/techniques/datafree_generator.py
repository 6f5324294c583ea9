"""MFCL's generator: trained without data, against a frozen classifier alone.

Babakniya et al., NeurIPS 2023, section 4.1. https://arxiv.org/abs/2311.07784

    L_CE   confidence      L_BN      statistics_distance
    L_IE   balance         L_noise   smoothness

Shapes: B batch, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, mse_loss, pad

from fedmodels.techniques.datafree import LayerMoments

EPSILON = 1e-5


def confidence(logits: Tensor, t_c: float) -> Tensor:
    """Return L_CE: the cross-entropy of logits (B, K) over T_c with their own likeliest class."""
    return cross_entropy(logits / t_c, logits.argmax(1))


def balance(logits: Tensor) -> Tensor:
    """Return L_IE: 1 minus the mean prediction's entropy over log K; 0 if classes are even."""
    if logits.shape[1] == 1:
        return logits.sum() * 0.0
    mean = logits.softmax(1).mean(0)
    return 1 + (mean * mean.clamp_min(1e-12).log()).sum() / math.log(logits.shape[1])


def statistics_distance(layers: Sequence[LayerMoments]) -> Tensor:
    """Return L_BN: KL(N(mu, sigma²) || N(batch)), mean over channels and then over layers."""
    if not layers:
        return torch.zeros(())
    found = []
    for each in layers:
        batch, kept = each.var + EPSILON, each.running_var + EPSILON
        apart = kept + (each.running_mean - each.mean).square()
        found.append((0.5 * (batch / kept).log() - 0.5 * (1 - apart / batch)).mean())
    return torch.stack(found).mean()


def smoothness(images: Tensor) -> Tensor:
    """Return L_noise: the mean square between images (B, C, H, W) and their 5x5 Gaussian blur."""
    bell = torch.exp(-0.5 * torch.arange(-2.0, 3.0, device=images.device).square())
    bell = bell / bell.sum()
    channels = images.shape[1]
    kernel = (bell[:, None] * bell).expand(channels, 1, 5, 5)
    return mse_loss(images, conv2d(pad(images, (2, 2, 2, 2), "replicate"), kernel, groups=channels))
