"""FedAVG-replay — FedAvg whose clients replay the classes they met, as in pFedGRP.
Tan and Liu, https://arxiv.org/abs/2410.01502v2, appendices B and D.1

    paper    here                          paper       here
    C        state.common.weights          A_{i,c}     private generators, one for each class

Generators never leave a client. The received model filters; the model trained from it says which
generators are trained again. Deviations: docs/methods/fedavg-replay.md.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch import Tensor

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.techniques.class_replay import (
    Rehearsal,
    Replay,
    nothing_met,
    reported_by_replay,
)
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.declared_counts import TrainsOn
from fedmodels.training.contexts import ClientContext
from fedmodels.training.run import RunFacts


@register("fedavg-replay")
class FedAvgReplay(FedAvg):
    """FedAvg with class replay; no alignment, no personal model."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2, baseline"
    trains_on: ClassVar[TrainsOn] = "replay"

    replay: Replay = field(default_factory=Replay)
    """How generated examples are made, chosen and used."""

    def reported(self, run: RunFacts) -> frozenset[str]:
        return reported_by_replay(run)

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return nothing_met(run)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Rehearsal:
        return self.replay.of(ctx.run).prepared(ctx, state)

    def training_data(self, ctx: ClientContext, refs: Rehearsal) -> tuple[Tensor, Tensor]:
        return refs.training_data()

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Rehearsal) -> Bundle:
        return self.replay.of(ctx.run).kept(ctx, state, refs)
