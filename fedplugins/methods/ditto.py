"""Ditto — Li et al., Fair and Robust Federated Learning Through Personalization, ICML 2021,
Algorithm 1. https://arxiv.org/abs/2012.04221

    paper   here                          paper    here
    w^t     the broadcast, refs.global_   lambda   lam
    w_k     ctx.net                       eq. 2    after_step
    v_k     refs.twin.net, ``twin/…``     s, r     training.local_epochs, for both

Deviations: both updates run over the same batches; aggregation weighs by examples, where the
released code takes the plain mean (``weighting``); lambda is one number, not chosen by client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedmodels.config.bounds import NonNegative
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.weight_terms import squared_distance
from fedmodels.techniques.twins import TWIN, Twin, begin_twin
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.roles import part_of, under
from fedmodels.training.contexts import ClientContext
from fedmodels.training.optimizer import descend
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch


@dataclass
class DittoReferences:
    """References of the loss in one interaction."""

    twin: Twin
    global_: list[Tensor]
    trained: Weights = field(default_factory=dict)
    """w_k after local training."""


@register("ditto")
class Ditto(FedAvg):
    """FedAvg, and beside it personal models held near the global one."""

    citation: ClassVar[str] = "Li et al., ICML 2021"
    takes_targets: ClassVar[bool] = True
    views: ClassVar[tuple[str, ...]] = ("global", "after_local", "after_downlink")

    lam: NonNegative = 1.0
    """Pull of the personal model towards the broadcast; lr * lam has to stay below 2."""

    @property
    def steps_per_batch(self) -> int:
        return 2  # of w_k and of v_k

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle(weights=under(TWIN, run.initial_weights))

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, part_of(state.weights, TWIN) or payload.weights)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> DittoReferences:
        twin = begin_twin(ctx, state)
        load_weights(ctx.net, payload.weights)  # the net trains as in FedAvg
        return DittoReferences(
            twin, [w.detach().clone() for w in ctx.net.parameters_by_key().values()]
        )

    def after_step(self, ctx: ClientContext, batch: Batch, refs: DittoReferences) -> None:
        twin = refs.twin
        with twin.apart():
            distance = squared_distance(twin.net.parameters_by_key().values(), refs.global_)
            loss = ctx.criterion(twin.net(batch.x), batch.y) + self.lam / 2 * distance  # eq. 2
            descend(loss, twin.optimizer)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: DittoReferences) -> Bundle:
        refs.trained, personal = weights_of(ctx.net), weights_of(refs.twin.net)
        load_weights(ctx.net, personal)  # what the client is scored with
        return Bundle(weights=under(TWIN, personal))

    def uplink(self, ctx: ClientContext, state: Bundle, refs: DittoReferences) -> Bundle:
        return Bundle(weights=refs.trained, scalars={"num_examples": float(ctx.num_examples)})
