"""FedDyn — Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated Learning Based on
Dynamic Regularization, ICLR 2021, Algorithm 1. https://arxiv.org/abs/2111.04263

    paper            here                              paper     here
    theta^t          base/…, head/… of the state       alpha     alpha
    theta_k^t        ctx.net                           m         schedule.clients
    grad L_k         private weights "gradient/…"      P_t       the uploads that count
    h^t              state.own.weights                 eq. 1     loss

Deviations: local work is epochs of the run's optimiser, not an exact minimum; statistics of batch
normalisation are averaged as FedAvg averages them (docs/methods/feddyn.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import Positive
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.numerics.weight_terms import squared_distance, tilt
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.roles import filled_like, part_of, under
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Reduced
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output

GRADIENT = "gradient"
Pulls = tuple[list[Tensor], list[Tensor]]
"""The broadcast theta^{t-1} and -grad L_k(theta_k^{t-1}) of the kept one, by parameter."""


@register("feddyn")
class FedDyn(FedAvg):
    """Clients keep a gradient that bends their loss, so that all local minima lie in one place."""

    citation: ClassVar[str] = "Acar et al., ICLR 2021"
    takes_targets: ClassVar[bool] = True
    counts_all_clients: ClassVar[bool] = True

    weighting: Literal["examples", "uniform"] = "uniform"
    alpha: Positive = 0.01
    """Weight of the regulariser."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        zeros = filled_like(run.initial_weights, run.parameters)
        return replace(super().init_server(run), own=Bundle(zeros))  # h^0

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        reduced = super().aggregate(ctx, state, uploads)
        if reduced is state:  # P_t is empty
            return state
        share = uploads.took_part() / ctx.run.experiment.schedule.clients  # |P_t| / m
        before, mean = state.common.weights, reduced.common.weights
        h = {
            k: t - self.alpha * share * (mean[k] - before[k]) for k, t in state.own.weights.items()
        }
        return replace(reduced, own=Bundle(h))

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        if state is ctx.before:
            return state, {}
        weights = state.common.weights
        moved = {k: weights[k] - t / self.alpha for k, t in state.own.weights.items()}
        return replace(state, common=Bundle({**weights, **moved})), {}

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        zeros = filled_like(run.initial_weights, run.parameters)
        return Bundle(under(GRADIENT, zeros))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Pulls:
        live, kept = ctx.net.parameters_by_key(), part_of(state.weights, GRADIENT)
        start = [w.detach().clone() for w in live.values()]
        return start, [-kept[key].to(ctx.device) for key in live]

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Pulls) -> Tensor:
        live, (start, kept) = [*ctx.net.parameters_by_key().values()], refs
        linear = tilt(live, kept)  # 0; its gradient is -grad L_k
        proximal = squared_distance(live, start)
        return super().loss(ctx, batch, out, refs) + linear + self.alpha / 2 * proximal  # eq. 1

    @torch.no_grad()
    def after_local(self, ctx: ClientContext, state: Bundle, refs: Pulls) -> Bundle:
        live = ctx.net.parameters_by_key().items()
        moved = {
            key: -(negative + self.alpha * (w - begun)).cpu()
            for (key, w), begun, negative in zip(live, *refs, strict=True)
        }
        return Bundle({**state.weights, **under(GRADIENT, moved)})
