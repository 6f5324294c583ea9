"""Denoising diffusion: the U-Net, its noise schedule and its training loss.

Ho et al., Denoising Diffusion Probabilistic Models, NeurIPS 2020, https://arxiv.org/abs/2006.11239;
sampled by :mod:`fedmodels.nets.generative.dpm_solver`. pFedGRP's generator on CIFAR-10.

Images are (B, C, S, S) in [-1, 1], S divisible by 2 for each level but the first. Times are indices
t in 0…999, floats where the solver asks between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.host.devices import to_device
from fedmodels.nets.split import in_bfloat16

STEPS = 1000
"""T, the steps of the noise schedule."""


def alpha_bars() -> Tensor:
    """Return the share of signal left after each step, (T,) float64; betas are linear (eq. 4)."""
    betas = torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64)
    return (1 - betas).cumprod(0)


def time_embedding(t: Tensor, width: int) -> Tensor:
    """Return sines and cosines of a time (B,) at falling frequencies, (B, width)."""
    half = width // 2
    frequencies = torch.exp(-math.log(10_000) * torch.arange(half, device=t.device) / half)
    angles = t.float()[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class _ResBlock(nn.Module):
    """Two convolutions with the time added between them, a shortcut, and maybe attention."""

    def __init__(self, fan_in: int, width: int, time: int, groups: int, *, attention: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, fan_in), nn.Conv2d(fan_in, width, 3, 1, 1)
        self.time = nn.Linear(time, width)
        self.norm2, self.conv2 = nn.GroupNorm(groups, width), nn.Conv2d(width, width, 3, 1, 1)
        self.shortcut = nn.Conv2d(fan_in, width, 1) if fan_in != width else nn.Identity()
        self.attention = _Attention(width, groups) if attention else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        h = self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, self.training))
        y: Tensor = self.attention(h + self.shortcut(x))
        return y


class _Attention(nn.Module):
    """Self-attention of one head over all pixels, added to its input."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(groups, width), nn.Conv2d(width, 3 * width, 1)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).chunk(3, 1)  # (B, c, P) each
        weights = (q.transpose(1, 2) @ k * x.shape[1] ** -0.5).softmax(-1)  # (B, P, P)
        gathered = (v @ weights.transpose(1, 2)).view_as(x)
        y: Tensor = x + self.proj(gathered)
        return y


class UNet(nn.Module):
    """Predicts the noise in an image: (B, C, S, S) and times (B,) -> (B, C, S, S).

    Args:
        channels: C.
        width: channels of the first level; group normalisation takes 32 groups, 16 for a width of
            48.
        mult: channels of each level over ``width``; a level has half the side of the one before.
        res_blocks: residual blocks per level on the way down; one more on the way up.
        attention: the levels with attention; 1 is 16x16 of 32x32.
        mixed_precision: compute in bfloat16, as autocast has it; weights and noise are float32.

    Raises:
        ConfigError: no group size divides the widths.
    """

    def __init__(
        self,
        channels: int = 3,
        width: int = 32,
        mult: Sequence[int] = (1, 2, 2),
        res_blocks: int = 1,
        attention: Sequence[int] = (1,),
        *,
        mixed_precision: bool = False,
    ) -> None:
        super().__init__()
        self.mixed_precision = mixed_precision
        if width % 16:
            raise ConfigError(f"the U-Net's width must be a multiple of 16, not {width}")
        groups, time = 32 if width % 32 == 0 else 16, 4 * width
        self.width, self.levels = width, len(mult)
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(channels, width, 3, 1, 1)

        def block(fan_in: int, fan_out: int, level: int) -> _ResBlock:
            return _ResBlock(fan_in, fan_out, time, groups, attention=level in attention)

        self.down, self.smaller = nn.ModuleList(), nn.ModuleList()
        self.up, self.larger = nn.ModuleList(), nn.ModuleList()
        skips, now = [width], width
        for level, factor in enumerate(mult):
            for _ in range(res_blocks):
                self.down.append(block(now, factor * width, level))
                now = factor * width
                skips.append(now)
            if level < self.levels - 1:
                self.smaller.append(nn.Conv2d(now, now, 3, 2, 1))
                skips.append(now)
        self.middle1 = _ResBlock(now, now, time, groups, attention=True)
        self.middle2 = _ResBlock(now, now, time, groups, attention=False)
        for level in reversed(range(self.levels)):
            for _ in range(res_blocks + 1):
                self.up.append(block(now + skips.pop(), mult[level] * width, level))
                now = mult[level] * width
            if level:
                self.larger.append(nn.Conv2d(now, now, 3, 1, 1))
        self.norm, self.last = nn.GroupNorm(groups, now), nn.Conv2d(now, channels, 3, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the noise predicted in images (B, C, S, S) at times (B,), 0-based."""
        return in_bfloat16(self._noise, x, t) if self.mixed_precision else self._noise(x, t)

    def _noise(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.time(time_embedding(t, self.width))
        h = self.stem(x)
        skips, per_level = [h], len(self.down) // self.levels
        for index, block in enumerate(self.down):
            h = block(h, time)
            skips.append(h)
            level, last = divmod(index + 1, per_level)
            if last == 0 and level < self.levels:
                h = self.smaller[level - 1](h)
                skips.append(h)
        h = self.middle2(self.middle1(h, time), time)
        for index, block in enumerate(self.up):
            h = block(torch.cat([h, skips.pop()], 1), time)
            level, last = divmod(index + 1, per_level + 1)
            if last == 0 and level < self.levels:
                h = self.larger[level - 1](_double(h))
        noise: Tensor = self.last(F.silu(self.norm(h)))
        return noise


def _double(x: Tensor) -> Tensor:
    """Return every pixel as 2x2 pixels; written out, so that its gradient is deterministic."""
    batch, channels, height, width = x.shape
    tiled = x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
    return tiled.reshape(batch, channels, 2 * height, 2 * width)


def ddpm_loss(net: nn.Module, images: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """Return the mean squared error of the predicted noise (equation 14).

    Args:
        net: maps noisy images and times to noise.
        images: (B, C, S, S) in [-1, 1].
        t: (B,) int64 in 0…T-1, uniform.
        noise: (B, C, S, S), N(0, 1).
    """
    bar = to_device(alpha_bars(), images.device)[t].to(images.dtype).view(-1, 1, 1, 1)
    noisy = bar.sqrt() * images + (1 - bar).sqrt() * noise
    return F.mse_loss(net(noisy, t), noise)


@torch.no_grad()
def follow(average: nn.Module, net: nn.Module, decay: float = 0.999) -> None:
    """Move the moving average of a net one step, in place; the average is what is uploaded."""
    for mean, value in zip(average.parameters(), net.parameters(), strict=True):
        mean.mul_(decay).add_(value, alpha=1 - decay)
