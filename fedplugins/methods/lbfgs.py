"""L-BFGS of many problems at a time: each row has the steps that it would have alone.

Nocedal and Wright, Numerical Optimization, algorithm 7.4, with the steps of fixed length, the
curvature test and the conditions of ``torch.optim.LBFGS`` without a line search. The history holds
the last iterations in which any row moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From points (n, d) to gradients (n, d) and values (n,)."""
ITERATIONS, HISTORY = 20, 100
"""Of a step, and the changes that a direction is made of: those of torch."""
LEAST_GRADIENT, LEAST_CHANGE, LEAST_CURVATURE = 1e-7, 1e-9, 1e-10


@dataclass
class RowsLBFGS:
    """The state of the rows ``x`` (n, d), which a step moves in place."""

    x: Tensor
    lr: float
    moves: list[Tensor] = field(default_factory=list)  # (n, d) each
    changes: list[Tensor] = field(default_factory=list)  # (n, d) each
    rho: list[Tensor] = field(default_factory=list)  # (n, 1) each, 0 where a row left it out

    def __post_init__(self) -> None:
        """Begin without a history."""
        n = len(self.x)
        self.scale = self.x.new_ones(n, 1)
        self.last = self.last_move = torch.zeros_like(self.x)
        self.has_begun = torch.zeros(n, 1, dtype=torch.bool, device=self.x.device)

    @torch.no_grad()
    def step(self, evaluate: Evaluate) -> tuple[Tensor, bool]:
        """Take up to ``ITERATIONS`` steps; return the values (n,) before, and whether a row moved.

        Once no row moves, none ever will.
        """
        gradient, value = evaluate(self.x)
        first, moved = value, False
        active = gradient.abs().amax(1, keepdim=True) > LEAST_GRADIENT
        for iteration in range(ITERATIONS):
            direction = self._direction(gradient, active)
            self.last = torch.where(active, gradient, self.last)
            slope = (gradient * direction).sum(1, keepdim=True)
            active = active & (slope <= -LEAST_CHANGE)
            if not bool(active.any()):
                break
            cautious = (1 / gradient.abs().sum(1, keepdim=True)).clamp(max=1.0)
            length = torch.where(self.has_begun, torch.ones_like(cautious), cautious) * self.lr
            move = torch.where(active, length * direction, 0.0)
            self.has_begun, moved = self.has_begun | active, True
            self.last_move = torch.where(active, move, self.last_move)
            self.x += move
            if iteration + 1 == ITERATIONS:
                break
            gradient, now = evaluate(self.x)
            active = active & (gradient.abs().amax(1, keepdim=True) > LEAST_GRADIENT)
            active = active & (move.abs().amax(1, keepdim=True) > LEAST_CHANGE)
            active = active & ((now - value).abs() >= LEAST_CHANGE)[:, None]
            value = now
        return first, moved

    def _direction(self, gradient: Tensor, active: Tensor) -> Tensor:
        """Take the last move of active rows into the history; return the directions (n, d)."""
        change = gradient - self.last
        curvature = (change * self.last_move).sum(1, keepdim=True)
        kept = active & self.has_begun & (curvature > LEAST_CURVATURE)
        if bool(kept.any()):
            self._remember(change, curvature, kept)
        q, alphas = -gradient, list[Tensor]()
        for s, y, r in zip(self.moves[::-1], self.changes[::-1], self.rho[::-1], strict=True):
            alphas.append(r * (s * q).sum(1, keepdim=True))
            q = q - alphas[-1] * y
        q = q * self.scale
        for s, y, r, a in zip(self.moves, self.changes, self.rho, alphas[::-1], strict=True):
            q = q + s * (a - r * (y * q).sum(1, keepdim=True))
        return q

    def _remember(self, change: Tensor, curvature: Tensor, kept: Tensor) -> None:
        if len(self.moves) == HISTORY:
            for listed in (self.moves, self.changes, self.rho):
                listed.pop(0)
        self.moves.append(torch.where(kept, self.last_move, 0.0))
        self.changes.append(torch.where(kept, change, 0.0))
        self.rho.append(torch.where(kept, 1 / curvature, 0.0))
        squared = change.square().sum(1, keepdim=True)
        self.scale = torch.where(kept, curvature / squared, self.scale)
