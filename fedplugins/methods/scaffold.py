"""SCAFFOLD — Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020, Algorithm 1 with option II. https://arxiv.org/abs/1910.06378

    paper   here                                paper    here
    x       base/…, head/… of the state         c        weights "control/…" of the state
    y_i     ctx.net                             c_i      private weights "control/…"
    eta_l   training.lr                         eta_g    server_lr
    K       refs.steps                          |S|, N   uploads that count, schedule.clients

Deviations: c_i+ is the mean of the steps' gradients, which (x - y_i) / (K eta_l) + c_i - c equals
for the paper's plain SGD, and which stays a gradient with momentum, Adam and weight decay; a client
sends c + Delta c_i; statistics of batch normalisation are averaged as FedAvg averages them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import Positive
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.numerics.weight_terms import tilt
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.roles import filled_like, part_of, under, without
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Reduced
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output

CONTROL = "control"


@dataclass
class Controls:
    """What corrects a client's steps, and the sum of the corrected gradients so far."""

    correction: dict[str, Tensor]  # c - c_i
    total: dict[str, Tensor]
    steps: Tensor  # ()


@register("scaffold")
class Scaffold(FedAvg):
    """FedAvg whose clients correct every step by what everybody's gradient has and theirs lacks."""

    citation: ClassVar[str] = "Karimireddy et al., ICML 2020"
    takes_targets: ClassVar[bool] = True

    weighting: Literal["examples", "uniform"] = "uniform"
    server_lr: Positive = 1.0
    """eta_g, the part of the clients' mean step that the server takes."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        return ServerState(Bundle({**run.initial_weights, **_zeros(run, run.initial_weights)}))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return super().upload_spec(run) | BundleSpec.of(Bundle(_zeros(run, run.forms)))

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        steps = dict.fromkeys(ctx.run.parameters, self.server_lr)  # x + eta_g mean(y_i - x)
        share = uploads.took_part() / ctx.run.experiment.schedule.clients
        steps |= {f"{CONTROL}/{key}": share for key in steps}  # c + |S|/N mean(Delta c_i)
        before, mean = ctx.before.common.weights, state.common.weights
        moved = {key: torch.lerp(before[key], mean[key], step) for key, step in steps.items()}
        return replace(state, common=Bundle({**mean, **moved})), {}

    def global_weights(self, common: Bundle) -> Weights:
        return without(common.weights, CONTROL)

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle(_zeros(run, run.initial_weights))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Controls:
        shared, own = (part_of(bundle.weights, CONTROL) for bundle in (payload, state))
        live = ctx.net.parameters_by_key()
        apart = {key: (shared[key] - own[key]).to(w.device) for key, w in live.items()}
        total = {key: torch.zeros_like(w) for key, w in live.items()}
        return Controls(apart, total, torch.zeros((), dtype=torch.int64, device=ctx.device))

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Controls) -> Tensor:
        live = ctx.net.parameters_by_key()
        linear = tilt(live.values(), [refs.correction[key] for key in live])  # 0; gradient c - c_i
        return super().loss(ctx, batch, out, refs) + linear

    @torch.no_grad()
    def after_step(self, ctx: ClientContext, batch: Batch, refs: Controls) -> None:
        refs.steps += 1
        live = ctx.net.parameters_by_key().items()
        moved = [(refs.total[key], w.grad) for key, w in live if w.grad is not None]
        if moved:
            torch._foreach_add_(*map(list, zip(*moved, strict=True)))

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Controls) -> Bundle:
        steps = int(refs.steps)
        if not steps:
            return state
        mean = {key: (t / steps - refs.correction[key]).cpu() for key, t in refs.total.items()}
        return Bundle({**state.weights, **under(CONTROL, mean)})  # c_i+

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Controls) -> Bundle:
        moved = {k: c.cpu() + state.weights[f"{CONTROL}/{k}"] for k, c in refs.correction.items()}
        sent = super().uplink(ctx, state, refs)
        controls = {**_zeros(ctx.run, sent.weights), **under(CONTROL, moved)}  # c + Delta c_i
        return replace(sent, weights={**sent.weights, **controls})


def _zeros(run: RunFacts, weights: Weights) -> Weights:
    """Return control variates of nothing: for each parameter, a tensor of its shape."""
    return under(CONTROL, filled_like(weights, run.parameters))
