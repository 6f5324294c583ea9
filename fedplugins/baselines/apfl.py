"""APFL — Deng et al., Adaptive Personalized Federated Learning, 2020, Algorithm 1.
https://arxiv.org/abs/2003.13461

    paper     here                         paper     here
    w_i       ctx.net                      alpha_i   refs.alpha, scalars["alpha"]
    v_i       refs.twin.net, ``twin/…``    eta       training.lr
    v-bar_i   mixed(…)

Deviations: v_i steps after w_i and so mixes with its newest value; all local steps are taken before
one aggregation; ``mix = "logits"`` is what the authors' code does, equal only for linear models;
their extra term 0.02 alpha in alpha's gradient is left out. Running statistics of v-bar are mixed
like weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from fedmodels.config.bounds import Share
from fedmodels.host.devices import to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques.twins import TWIN, Twin, begin_twin
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.roles import part_of, under
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Scores
from fedmodels.training.optimizer import descend, lr_of
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch


def mix(
    v: Mapping[str, Tensor], w: Mapping[str, Tensor], alpha: Tensor | float
) -> dict[str, Tensor]:
    """Return ``alpha v + (1 - alpha) w``; integer tensors are the larger ones."""
    return {
        k: alpha * v[k] + (1 - alpha) * w[k]
        if v[k].is_floating_point()
        else torch.maximum(v[k], w[k])
        for k in v
    }


@dataclass
class ApflReferences:
    """References of the loss in one interaction."""

    twin: Twin
    alpha: Tensor  # ()
    adapts: bool = False
    """Whether the next step changes alpha."""
    trained: Weights = field(default_factory=dict)
    """w_i after local training."""
    is_zero: bool = False
    """Whether alpha is 0, for steps that do not change it."""


@register("apfl")
class Apfl(FedAvg):
    """Every client predicts with a mixture of the global model and one of its own."""

    citation: ClassVar[str] = "Deng et al., 2020"
    takes_targets: ClassVar[bool] = True
    views: ClassVar[tuple[str, ...]] = ("global", "after_local", "after_downlink")

    weighting: Literal["examples", "uniform"] = "uniform"
    alpha: Share = 0.5
    """Weight of the own model; the first one if adaptive."""
    adaptive: bool = True
    """Whether alpha follows its gradient."""
    alpha_every: Literal["round", "step"] = "round"
    """When it does: on the first batch of an interaction, as in the authors' code, or on each."""
    mix: Literal["params", "logits"] = "params"
    """What is mixed."""

    @property
    def rules(self) -> tuple[str, ...]:
        return ("mixture",) if self.mix == "logits" else super().rules

    @property
    def steps_per_batch(self) -> int:
        return 2  # of w_i and of v_i

    def reported(self, run: RunFacts) -> frozenset[str]:
        return frozenset({"alpha"})

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle(weights=under(TWIN, run.initial_weights), scalars={"alpha": self.alpha})

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        v, weights = part_of(state.weights, TWIN), payload.weights
        if v and self.mix == "params":
            weights = mix(v, weights, state.scalars["alpha"])
        load_weights(ctx.net, weights)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> ApflReferences:
        twin = begin_twin(ctx, state)
        load_weights(ctx.net, payload.weights)  # the net trains as in FedAvg
        alpha = state.scalars["alpha"]
        held = torch.tensor(alpha, device=ctx.device)
        return ApflReferences(twin, held, adapts=self.adaptive, is_zero=not alpha)

    def mixture_loss(
        self, ctx: ClientContext, batch: Batch, refs: ApflReferences, alpha: Tensor
    ) -> Tensor:
        """Return f_i(v-bar_i) on a batch; w_i is a constant in it."""
        twin = refs.twin.net
        if self.mix == "logits":
            buffers = {k: b.clone() for k, b in ctx.net.named_buffers()}  # w_i's do not move
            with torch.no_grad():
                fixed = functional_call(ctx.net, buffers, (batch.x,))
            return ctx.criterion(alpha * twin(batch.x) + (1 - alpha) * fixed, batch.y)
        w = {k: p.detach() for k, p in ctx.net.named_parameters()}
        weights = mix(dict(twin.named_parameters()), w, alpha)
        logits: Tensor = functional_call(twin, weights, (batch.x,))
        return ctx.criterion(logits, batch.y)

    def after_step(self, ctx: ClientContext, batch: Batch, refs: ApflReferences) -> None:
        if not refs.adapts and refs.is_zero:
            return  # the gradient of v is alpha times something
        with refs.twin.apart():
            alpha = refs.alpha.clone().requires_grad_(refs.adapts)
            descend(self.mixture_loss(ctx, batch, refs, alpha), refs.twin.optimizer)
        if alpha.grad is not None:  # <v - w, grad f(v-bar)>, section 4.1 (adaptive alpha)
            refs.alpha.sub_(lr_of(ctx) * alpha.grad).clamp_(0, 1)
            if self.alpha_every == "round":  # later steps ask
                refs.adapts, refs.is_zero = False, not float(refs.alpha)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: ApflReferences) -> Bundle:
        refs.trained, v = weights_of(ctx.net), weights_of(refs.twin.net)
        alpha = float(refs.alpha)
        ctx.metrics["alpha"] = alpha
        new = Bundle(weights=under(TWIN, v), scalars={"alpha": alpha})
        self.load(ctx, Bundle(weights=refs.trained), new)  # what the client is scored with
        return new

    def uplink(self, ctx: ClientContext, state: Bundle, refs: ApflReferences) -> Bundle:
        return Bundle(weights=refs.trained, scalars={"num_examples": float(ctx.num_examples)})

    def predict(self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor) -> Scores:
        mixes = self.mix == "logits" and ctx.view != "global"
        v = ctx.once(_own_model, state) if mixes else {}
        if not v:
            return {self.rules[0]: ctx.net(x)}
        alpha = state.scalars["alpha"]
        logits: Tensor = functional_call(ctx.net, v, (x,))
        return {"mixture": alpha * logits + (1 - alpha) * ctx.net(x)}


def _own_model(ctx: ClientContext, state: Bundle) -> dict[str, Tensor]:
    """Return v on the client's device, by the names that modules have."""
    own = part_of(state.weights, TWIN)
    return {k.replace("/", ".", 1): to_device(t, ctx.device) for k, t in own.items()}
