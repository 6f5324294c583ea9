"""FedBABU — Oh, Kim, Yun, FedBABU: Toward Enhanced Representation for Federated Image
Classification, ICLR 2022, Algorithm 1. https://arxiv.org/abs/2106.06042

    paper        here                           paper    here
    theta_ext    weights "base/…"               tau      training.local_epochs
    theta_cls    weights "head/…", the first    tau_f    fine_tune_epochs

Clients train the body under the head that the run began with. A client's own model is the body,
fine-tuned with the head on its training data of the task whenever it is scored.

Deviations: everyone is fine-tuned at every score, not once at the end; the head goes down with the
body, so that everybody's model is whole, and never comes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from fedmodels.config.bounds import Count
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.criterion import fitting
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Phase

PARTS = {"all": ("base/", "head/"), "body": ("base/",), "head": ("head/",)}


@register("fedbabu")
class FedBABU(FedAvg):
    """The body alone is trained and averaged; a client fine-tunes the model it predicts with."""

    citation: ClassVar[str] = "Oh et al., ICLR 2022"
    takes_targets: ClassVar[bool] = True
    fits_for_scores: ClassVar[bool] = True
    looks_at_examples: ClassVar[str] = "fine-tunes on them without noise for each score"
    views: ClassVar[tuple[str, ...]] = ("global", "after_downlink")

    weighting: Literal["examples", "uniform"] = "uniform"
    fine_tune_epochs: Count = 5
    """Epochs behind a personal score; with 0 it is everybody's model."""
    fine_tune: Literal["all", "body", "head"] = "all"
    """The part of the net that they train."""

    def shares(self, run: RunFacts, name: str) -> bool:
        return not name.startswith("head/")

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        return ServerState(Bundle(run.initial_weights))

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        after = super().aggregate(ctx, state, uploads)
        return replace(after, common=Bundle({**state.common.weights, **after.common.weights}))

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle()

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        super().load(ctx, payload, state)
        if ctx.view == "after_downlink":
            x, y = ctx.stream.train(ctx.task)
            with fitting(ctx, y):
                self.fit(ctx, x, y, None)

    def training_length(self, ctx: ClientContext) -> str:
        own = ctx.run.experiment.training.local_epochs
        return f"{own} (and {self.fine_tune_epochs} before a score)"

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        if ctx.view:
            return [Phase(self.fine_tune_epochs, PARTS[self.fine_tune])]
        return [Phase(ctx.run.experiment.training.local_epochs, PARTS["body"])]
