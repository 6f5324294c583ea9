"""pFedMe — Dinh, Tran, Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
Algorithm 1. https://arxiv.org/abs/2006.08848

    paper        here                        paper     here
    w            state.common.weights        lambda    lam
    w_i,r        refs.local                  eta       eta
    theta_i      ctx.net, the private state  K         inner_steps
    beta         beta                        R         batches of training.local_epochs

Deviations: the run's optimiser solves for theta_i, at training.lr, which the published code calls
the personal learning rate; theta_i goes on from the last batch, as there; a model is scored with
the theta_i of its last training; statistics of batch normalisation are those of theta_i's net.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import NonNegative, Positive, PositiveCount
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.weight_terms import squared_distance
from fedmodels.techniques.twins import TWIN
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.roles import part_of, under
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.loop import EpochLoop
from fedmodels.training.method import Reduced
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output


@dataclass(frozen=True)
class Envelope:
    """The local model w_i,r, by parameter."""

    local: dict[str, Tensor]


@register("pfedme")
class PFedMe(FedAvg):
    """Clients step towards their personal models, which are held near the model they step from."""

    citation: ClassVar[str] = "Dinh et al., NeurIPS 2020"
    takes_targets: ClassVar[bool] = True
    views: ClassVar[tuple[str, ...]] = ("global", "after_local", "after_downlink")

    weighting: Literal["examples", "uniform"] = "uniform"
    lam: NonNegative = 15.0
    """Pull of theta_i towards w_i,r."""
    eta: Positive = 0.005
    """Learning rate of w_i,r; eta * lam is the part of the way to theta_i that one step goes."""
    inner_steps: PositiveCount = 5
    """K, the steps on one batch that solve for theta_i."""
    beta: Positive = 1.0
    """The part of the clients' mean step that the server takes."""

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        before, mean = ctx.before.common.weights, state.common.weights
        moved = {k: torch.lerp(before[k], mean[k], self.beta) for k in ctx.run.parameters}
        return replace(state, common=Bundle({**mean, **moved})), {}

    # --- client half ---------------------------------------------------------------------------

    @property
    def steps_per_batch(self) -> int:
        return self.inner_steps

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle(under(TWIN, run.initial_weights))

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        theta = part_of(state.weights, TWIN) if ctx.view else None  # training begins at w
        load_weights(ctx.net, theta or payload.weights)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Envelope:
        live = ctx.net.parameters_by_key()
        return Envelope({key: w.detach().clone() for key, w in live.items()})

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Envelope) -> float:
        return EpochLoop(self, ctx, x, y, refs).run(self.inner_steps)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Envelope) -> Tensor:
        live = ctx.net.parameters_by_key()
        distance = squared_distance(live.values(), [refs.local[key] for key in live])
        return super().loss(ctx, batch, out, refs) + self.lam / 2 * distance

    @torch.no_grad()
    def after_step(self, ctx: ClientContext, batch: Batch, refs: Envelope) -> None:
        live = ctx.net.parameters_by_key()
        for key, w in refs.local.items():
            w -= self.eta * self.lam * (w - live[key])

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Envelope) -> Bundle:
        return Bundle(under(TWIN, weights_of(ctx.net)))

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Envelope) -> Bundle:
        sent = super().uplink(ctx, state, refs)
        local = {key: w.cpu() for key, w in refs.local.items()}
        return replace(sent, weights={**sent.weights, **local})
