"""Flash — Panchal, Choudhary, Mitra, Mukherjee, Sarkhel, Mitra, Guan, Flash: Concept Drift
Adaptation in Federated Learning, ICML 2023. https://proceedings.mlr.press/v202/panchal23a.html

    paper        here                         paper      here
    x_t          state.common.weights         eta        eta
    Delta_t      mean - ctx.before            beta_1,2   beta_1, beta_2
    m, v, d      own weights "m/…", "v/…",    tau        tau
                 "d/…"                        gamma      gamma

Deviations: a step never turns round, as max(sqrt(v) - d, 0) stands for sqrt(v) - d; what clients
stop by, and where v begins, is read from published code (docs/methods/flash.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmodels.config.bounds import MAX_COUNT, NonNegative, Positive
from fedmodels.host.devices import to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import weights_of
from fedmodels.techniques.several_models import losses_of
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.roles import filled_like, part_of, under
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.loop import EpochLoop
from fedmodels.training.method import Reduced
from fedmodels.training.run import RunFacts

Memory = Annotated[float, Field(ge=0, lt=1)]
Every = Literal[0] | Annotated[int, Field(ge=2, le=MAX_COUNT)]
"""Each so many-th, but not all of them; 0: none."""


@dataclass
class Watched:
    """The examples whose loss tells a client when to stop."""

    x: Tensor
    y: Tensor
    rows: list[int]
    """Which examples of the task it trains on."""


@register("flash")
class Flash(FedAvg):
    """Clients stop early; the server takes longer steps where clients move more than before."""

    citation: ClassVar[str] = "Panchal et al., ICML 2023"
    takes_targets: ClassVar[bool] = True
    is_server_optimizer: ClassVar[bool] = True
    looks_at_examples: ClassVar[str] = "stops by the loss of its examples"

    weighting: Literal["examples", "uniform"] = "uniform"
    eta: Positive = 0.01
    """Learning rate of the server."""
    beta_1: Memory = 0.9
    """Memory of the moves, m."""
    beta_2: Memory = 0.99
    """Memory of their squares, v."""
    tau: Positive = 1e-3
    """Degree of adaptivity: it is added to the denominator, and v begins at its square."""
    gamma: NonNegative = 0.004
    """A client stops after epoch e if its loss fell by less than gamma / e."""
    watched: Every = 10
    """Each so many-th example is not trained on, and the loss of these tells when to stop. With 0,
    or where there are none, all are trained on, and tell."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        zeros = filled_like(run.initial_weights, run.parameters)
        first = filled_like(zeros, zeros, self.tau**2)
        own = {**under("m", zeros), **under("v", first), **under("d", zeros)}
        return replace(super().init_server(run), own=Bundle(own))

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        if state is ctx.before:  # nobody counts
            return state, {}
        before, mean = ctx.before.common.weights, state.common.weights
        m, v, d = (part_of(state.own.weights, name) for name in "mvd")
        moved, own = dict[str, Tensor](), dict[str, Tensor]()
        for key in m:
            delta = mean[key] - before[key]
            now = self._moments(delta, m[key], v[key], d[key])
            room = (now["v"].sqrt() - now["d"]).clamp(min=0) + self.tau
            moved[key] = before[key] + self.eta * now["m"] / room
            own |= {f"{name}/{key}": tensor for name, tensor in now.items()}
        return replace(state, common=Bundle({**mean, **moved}), own=Bundle(own)), {}

    def _moments(self, delta: Tensor, m: Tensor, v: Tensor, d: Tensor) -> dict[str, Tensor]:
        """Return the three moments after a move of the clients' mean."""
        square, before = delta.square(), v
        m = self.beta_1 * m + (1 - self.beta_1) * delta
        v = self.beta_2 * v + (1 - self.beta_2) * square
        apart = square - v
        beta_3 = before / (apart.abs() + before)  # v is never negative
        return {"m": m, "v": v, "d": beta_3 * d + (1 - beta_3) * apart}

    # --- client half ---------------------------------------------------------------------------

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Watched:
        x, y = super().training_data(ctx, None)
        first = self.watched - 1 if 0 < self.watched <= len(y) else None
        if first is None:
            return Watched(x, y, [*range(len(y))])
        rows = [row for row in range(len(y)) if row % self.watched != first]
        return Watched(x[first :: self.watched], y[first :: self.watched], rows)

    def training_data(self, ctx: ClientContext, refs: Watched) -> tuple[Tensor, Tensor]:
        x, y = super().training_data(ctx, refs)
        rows = to_device(torch.tensor(refs.rows, dtype=torch.int64), y.device)
        return x[rows], y[rows]

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Watched) -> float:
        losses: list[float] = []

        def is_enough(epochs: int) -> bool:
            own = weights_of(ctx.net)
            losses.append(float(losses_of(ctx, [own], refs.x, refs.y).mean()))
            ctx.net.train()
            return epochs > 1 and losses[-2] - losses[-1] < self.gamma / epochs

        return EpochLoop(self, ctx, x, y, refs, stops=is_enough).run()
