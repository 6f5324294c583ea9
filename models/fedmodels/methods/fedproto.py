"""FedProto — Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients,
AAAI 2022, Algorithm 1. https://arxiv.org/abs/2105.00243

    paper        here                               paper     here
    C_i^(j)      uplink, prototypes["class"]        lambda    lam
    C-bar^(j)    payload.prototypes["class"]        eq. 6     aggregate
    N_j          clients that report class j        eq. 7     loss

Deviations: the regulariser is the squared distance's mean over coordinates, as in the released
code, which takes class means while the last epoch trains where we take them after it, in evaluation
mode; means over clients weigh by examples of the class (eq. 6 without its further factor 1/|N_j|,
which would shrink a mean), there they are plain (``weighting``); classes that nobody reports keep
their prototype. There is no global model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import NonNegative
from fedmodels.methods import register
from fedmodels.methods.bases.released_prototypes import ReleasedPrototypes
from fedmodels.nets.embedding import embeddings
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.prototypes import (
    ByClass,
    class_prototypes,
    distance_per_example,
    moved,
    nearest_scores,
)
from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Batch, Output
from fedmodels.training.run import RunFacts


@dataclass
class FedProtoReferences:
    """References of the loss in one interaction."""

    everyone: ByClass
    fresh: Prototypes = field(default_factory=lambda: Prototypes.of({}, 0))
    """Class means after local training."""


@register("fedproto")
@dataclass(frozen=True, kw_only=True)
class FedProto(ReleasedPrototypes):
    """Clients keep their own models, share class means, and pull embeddings to these means."""

    citation: ClassVar[str] = "Tan et al., AAAI 2022"
    trains_together: ClassVar[bool] = True

    lam: NonNegative = 1.0
    """Weight of the pull; 0 is Local-only."""
    inference: Literal["nearest", "classifier"] = "nearest"
    """The rule the method is scored by: nearest global prototype, or the logits; both are taken."""
    candidates: Literal["local", "all"] = "local"
    """Classes the nearest prototype is searched among: those the client has trained on, or all."""

    @property
    def views(self) -> tuple[str, ...]:
        return ("after_local", "after_downlink")

    @property
    def rules(self) -> tuple[str, ...]:
        other = "classifier" if self.inference == "nearest" else "nearest"
        return (self.inference, other)

    def shares(self, name: str) -> bool:
        return False

    def init_server(self, run: RunFacts) -> ServerState:
        return ServerState(Bundle(prototypes={"class": self.nothing(run)}))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return self.prototype_spec(run)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        return self.prototype_spec(run, counted=False), BundleSpec()

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        reported = {c: u.prototypes["class"] for c, u in uploads.items()}
        found = self.everyones(ctx.run, reported, uniform=self.weighting == "uniform")  # eq. 6
        now = moved(state.common.prototypes["class"], found, beta=0.0)
        return ServerState(Bundle(prototypes={"class": now}), state.own, state.clients)

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, state.weights)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> FedProtoReferences:
        return FedProtoReferences(self.by_class(ctx, payload.prototypes.get("class")))

    def loss(
        self, ctx: ClientContext, batch: Batch, out: Output, refs: FedProtoReferences
    ) -> Tensor:
        pull = distance_per_example(out.features, batch.y, refs.everyone)
        return super().loss(ctx, batch, out, refs) + self.lam * pull  # eq. 7

    def after_local(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: FedProtoReferences
    ) -> Bundle:
        x, y = self.training_data(ctx, refs)
        refs.fresh = class_prototypes(embeddings(ctx.net, x), y, ctx.run.problem.num_classes)
        own = moved(state.prototypes.get("class"), refs.fresh, beta=0.0)
        return Bundle(weights=weights_of(ctx.net), prototypes={"class": own})

    def uplink(
        self, ctx: ClientContext, state: Bundle, refs: FedProtoReferences, num_examples: int
    ) -> Bundle:
        sent = self.released(ctx, refs.fresh)
        return Bundle(prototypes={"class": sent})

    def predict(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor
    ) -> Mapping[str, Tensor]:
        z = ctx.net.features(x)
        met = self.by_class(ctx, state.prototypes.get("class")).known
        among = met if self.candidates == "local" else torch.ones_like(met)
        nearest = nearest_scores(z, self.by_class(ctx, payload.prototypes.get("class")), among)
        rules = {"nearest": nearest, "classifier": ctx.net.head(z)}
        return {self.inference: rules.pop(self.inference), **rules}
