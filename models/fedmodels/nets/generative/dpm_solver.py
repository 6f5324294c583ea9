"""Sampling of a diffusion model in some twenty evaluations.

Lu et al., DPM-Solver: A Fast ODE Solver for Diffusion Probabilistic Model Sampling in Around 10
Steps, NeurIPS 2022, section 3. https://arxiv.org/abs/2206.00927

    paper         here                          paper        here
    alpha_t       exp(log_alpha(lam))           lambda_t     lam, half the log signal-to-noise ratio
    sigma_t       sqrt(1 - alpha_t²)            eps_theta    noise: (x, index) -> predicted noise

The schedule is the discrete one of :mod:`fedmodels.nets.generative.ddpm`: ln alpha is
linear between the times 1/T, 2/T, …, 1. Coefficients are computed in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmodels.errors import ConfigError
from fedmodels.host.devices import to_device
from fedmodels.nets.generative.ddpm import STEPS, alpha_bars

Noise = Callable[[Tensor, float], Tensor]
"""The predicted noise in ``x`` at the 0-based index of a time, which may lie between two steps."""

_TIMES = np.arange(1, STEPS + 1) / STEPS
_LOG_ALPHAS = 0.5 * np.log(alpha_bars().numpy())  # falls with the time


def lam_of(time: float) -> float:
    """Return lambda at a time in [1/T, 1]."""
    log_alpha = float(np.interp(time, _TIMES, _LOG_ALPHAS))
    return log_alpha - 0.5 * math.log(-math.expm1(2 * log_alpha))


def _log_alpha(lam: float) -> float:
    """Return ln alpha: -½ ln(1 + e^(-2 lambda))."""
    return -0.5 * float(np.logaddexp(0, -2 * lam))


def _sigma(lam: float) -> float:
    """Return sigma: sqrt(1 - alpha²)."""
    return math.sqrt(-math.expm1(2 * _log_alpha(lam)))


def index_of(lam: float) -> float:
    """Return the 0-based index, 1000 t - 1, of the time at which lambda is reached."""
    time = float(np.interp(-_log_alpha(lam), -_LOG_ALPHAS, _TIMES))
    return STEPS * time - 1


def solver_orders(evaluations: int, order: int = 3) -> list[int]:
    """Return the order of each step so that exactly ``evaluations`` are spent.

    Steps of the highest order, the last one or two lower, as in the paper's DPM-Solver-fast; 20 at
    order 3 are six steps of order 3 and one of order 2.

    Raises:
        ConfigError: there is nothing to spend, or no such order.
    """
    if evaluations < 1 or order not in (1, 2, 3):
        raise ConfigError(f"no solver of order {order} with {evaluations} evaluations")
    whole, rest = divmod(evaluations, order)
    if order == 3 and rest == 0:
        return [3] * (whole - 1) + [2, 1]
    return [order] * whole + ([rest] if rest else [])


def dpm_solve(
    noise: Noise, x: Tensor, orders: Sequence[int], *, end: float = 1e-3, clamp: bool = True
) -> Tensor:
    """Integrate from noise at time 1 to an image at time ``end``, in steps uniform in lambda.

    Args:
        noise: the predicted noise; one call per order of a step.
        x: (B, …), drawn from N(0, 1).
        orders: of each step, see :func:`solver_orders`.
        end: the last time, 1/T at least.
        clamp: cut the result to [-1, 1].

    Returns:
        (B, …), in the dtype of ``x``.
    """
    marks = np.linspace(lam_of(1.0), lam_of(end), len(orders) + 1).tolist()
    with torch.no_grad():
        for start, stop, order in zip(marks[:-1], marks[1:], orders, strict=True):
            x = _STEPS[order](noise, x, start, stop)
    return x.clamp(-1, 1) if clamp else x


def _shift(x: Tensor, e: Tensor, s: float, t: float) -> Tensor:
    """Return (alpha_t / alpha_s) x - sigma_t (e^h - 1) e, exact for constant noise (eq. 3.7)."""
    scale = math.exp(_log_alpha(t) - _log_alpha(s))
    return scale * x - _sigma(t) * math.expm1(t - s) * e


def _first(noise: Noise, x: Tensor, s: float, t: float) -> Tensor:
    """Take one step of order 1, from lambda s to lambda t (DDIM)."""
    return _shift(x, noise(x, index_of(s)), s, t)


def _second(noise: Noise, x: Tensor, s: float, t: float) -> Tensor:
    """Take one step of order 2, by the middle in lambda (algorithm 1)."""
    middle, r = (s + t) / 2, 0.5
    e = noise(x, index_of(s))
    slope = noise(_shift(x, e, s, middle), index_of(middle)) - e
    return _shift(x, e, s, t) - _sigma(t) / (2 * r) * math.expm1(t - s) * slope


def _third(noise: Noise, x: Tensor, s: float, t: float) -> Tensor:
    """Take one step of order 3, by a third and two thirds (algorithm 2)."""
    r1, r2, h = 1 / 3, 2 / 3, t - s
    s1, s2 = s + r1 * h, s + r2 * h
    e = noise(x, index_of(s))
    slope1 = noise(_shift(x, e, s, s1), index_of(s1)) - e
    bend = math.expm1(r2 * h) / (r2 * h) - 1
    u2 = _shift(x, e, s, s2) - r2 / r1 * _sigma(s2) * bend * slope1
    slope2 = noise(u2, index_of(s2)) - e
    return _shift(x, e, s, t) - _sigma(t) / r2 * (math.expm1(h) / h - 1) * slope2


_STEPS = {1: _first, 2: _second, 3: _third}


def sample(
    net: torch.nn.Module, shape: tuple[int, ...], generator: torch.Generator, evaluations: int
) -> Tensor:
    """Return images (B, C, S, S) in [-1, 1] from a trained U-Net, in evaluation mode.

    Args:
        net: maps noisy images and times (B,) to noise; its mode is as before afterwards.
        shape: (B, C, S, S).
        generator: a CPU generator, so that every device starts from the same noise.
        evaluations: calls of the net.
    """
    mode, device = net.training, next(net.parameters()).device

    def noise(x: Tensor, index: float) -> Tensor:
        predicted: Tensor = net(x, torch.full((len(x),), index, device=device))
        return predicted

    net.eval()
    try:
        start = to_device(torch.randn(shape, generator=generator), device)
        return dpm_solve(noise, start, solver_orders(evaluations))
    finally:
        net.train(mode)
