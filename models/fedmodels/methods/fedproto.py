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

from dataclasses import field
from typing import ClassVar, Literal

from torch import Tensor

from fedmodels.config.bounds import NonNegative
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import weights_of
from fedmodels.numerics.prototypes import (
    distance_per_example,
    moved,
)
from fedmodels.techniques.class_prototypes import (
    PrototypeLimits,
    PullReferences,
    by_class,
    class_means,
    mean_class_prototypes,
    nearest_and_logits,
    no_prototypes,
    prototype_upload,
)
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Scores
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output


@register("fedproto")
class FedProto(FedAvg):
    """Clients keep their own models, share class means, and pull embeddings to these means."""

    citation: ClassVar[str] = "Tan et al., AAAI 2022"
    private: ClassVar[tuple[str, ...]] = ("",)  # all weights
    rules_of_met: ClassVar[tuple[str, ...]] = ("nearest",)

    lam: NonNegative = 1.0
    """Weight of the pull; 0 is Local-only."""
    inference: Literal["nearest", "classifier"] = "nearest"
    """The rule the method is scored by: nearest global prototype, among the classes that the client
    has trained on, or the logits; both are taken."""
    limits: PrototypeLimits = field(default_factory=PrototypeLimits)
    """What is let out of prototypes."""

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.inference, "nearest", "all_classes", "classifier")))

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        return ServerState(Bundle(prototypes=no_prototypes(run)))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return prototype_upload(run)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        uniform = self.weighting == "uniform"
        found = mean_class_prototypes(ctx.run, uploads, uniform=uniform)  # eq. 6
        now = moved(state.common.prototypes["class"], found, beta=0.0)
        return ServerState(Bundle(prototypes={"class": now}), state.own, state.clients)

    # --- client half ---------------------------------------------------------------------------

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> PullReferences:
        return PullReferences(by_class(ctx, payload))

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: PullReferences) -> Tensor:
        pull = distance_per_example(out.features, batch.y, refs.everyone)
        return super().loss(ctx, batch, out, refs) + self.lam * pull  # eq. 7

    def after_local(self, ctx: ClientContext, state: Bundle, refs: PullReferences) -> Bundle:
        refs.fresh = class_means(ctx, *self.training_data(ctx, refs))
        own = moved(state.prototypes.get("class"), refs.fresh, beta=0.0)
        return Bundle(weights=weights_of(ctx.net), prototypes={"class": own})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: PullReferences) -> Bundle:
        return Bundle(prototypes=self.limits.released(ctx, refs.fresh))

    def predict(self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor) -> Scores:
        return nearest_and_logits(ctx, payload, state, x, self.inference)
