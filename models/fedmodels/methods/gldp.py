"""GLDP — Guo et al., STHFL: Spatio-Temporal Heterogeneous Federated Learning, 2025, Algorithm 1.
https://arxiv.org/abs/2501.05775. The method is its Global-Local Dynamic Prototype framework.

    paper           here                             paper     here
    Theta           state.common.weights             t, s      t, s
    mu_i, nu_i      base/…, head/… of ctx.net        beta      beta
    C_i^{n,(m)}     refs.fresh                       lambda    lam
    C-hat_i^n       state.prototypes["class"]        tau       tau
    C-tilde^n       payload.prototypes["class"]      z         problem.num_classes
    eq. 2, 8, 10    loss, local_loss, global_loss    eq. 12    loss

The paper's stage m is a task here, and one interaction trains one; the schedule ``rounds_outer``
visits every task in every round.
Deviations: docs/methods/gldp.md. Other readings of the paper: variants/gldp.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fedmodels.config.bounds import Count, Positive, Share
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.prototypes import ByClass, moved, nearest_scores
from fedmodels.techniques.class_prototypes import (
    PrototypeLimits,
    by_class,
    class_means,
    mean_class_prototypes,
    no_prototypes,
    prototype_upload,
)
from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Scores
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output, Phase


@dataclass
class Tables:
    """The prototypes that the loss refers to, by class, and those of the training that it ends."""

    own: ByClass  # C-hat_i, as it was before this interaction
    everyone: ByClass  # C-tilde
    fresh: Prototypes = field(default_factory=lambda: Prototypes.of({}, 0))


@register("gldp")
class Gldp(FedAvg):
    """Shared base, private heads, and prototypes of old and of rare classes as regularisers."""

    citation: ClassVar[str] = "Guo et al., 2025"
    private: ClassVar[tuple[str, ...]] = ("head/",)
    has_global_head: ClassVar[bool] = False
    rules_of_met: ClassVar[tuple[str, ...]] = ("gldp_gp", "gldp_lp")

    lam: Share = 0.5
    """Weight of the local prototype loss; the global one has 1 - lam."""
    beta: Share = 0.5
    """Share of the old prototype in both moving averages."""
    tau: Positive = 1.0
    """Temperature of the local prototype loss; the paper has none, which is 1."""
    t: Count = 10
    """Epochs of the representation; ``training.local_epochs`` is not used."""
    s: Count = 20
    """Epochs of the head."""
    use_lp: bool = True
    """Whether the local prototype relation (eq. 8) is part of the loss."""
    use_gp: bool = True
    """Whether the global-local relation (eq. 10) is part of the loss."""
    inference: Literal["gldp_gp", "gldp_lp", "classifier"] = "gldp_gp"
    """The rule whose scores count: nearest global or local prototype, or the head. All three are
    reported."""
    weighting: Literal["examples", "uniform"] = "uniform"
    """Aggregation weights: 1 / the number of participants, as the paper's; or n_k / n."""
    limits: PrototypeLimits = field(default_factory=PrototypeLimits)
    """What is let out of prototypes."""

    @property
    def views(self) -> tuple[str, ...]:
        headless = self.inference == "classifier" and not self.has_global_head
        return (*(() if headless else ("global",)), "after_local", "after_downlink")

    @property
    def rules(self) -> tuple[str, ...]:
        rules = (self.inference, "gldp_gp", "gldp_lp", "all_classes", "classifier")
        return tuple(dict.fromkeys(rules))  # everyone's model may have no head: it is last

    # --- server half: lines 1 to 8 -------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        return ServerState(Bundle(self.shared(run, run.initial_weights), no_prototypes(run)))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return BundleSpec.of(Bundle(self.shared(run, run.forms))) | prototype_upload(run)

    def count(self, upload: Bundle) -> float:
        """Return 1, but 0 of a client that shows no prototype, as it has no example."""
        withheld = self.limits.min_count > 1
        return float(withheld or len(upload.prototypes["class"].labels) > 0)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        theta = super().aggregate(ctx, state, uploads).common.weights  # eq. 5
        found = mean_class_prototypes(ctx.run, uploads)
        kept = moved(state.common.prototypes["class"], found, self.beta)  # eq. 11
        return ServerState(Bundle(theta, {"class": kept}), state.own, state.clients)

    # --- client half: lines 9 to 18 ------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        if ctx.view != "global" or self.has_global_head:
            return super().load(ctx, payload, state)
        load_weights(ctx.net, self.global_weights(payload), strict=False)  # prototypes predict

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Tables:
        return Tables(by_class(ctx, state), by_class(ctx, payload))

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        base = Phase(self.t, ("base/",), bn_of_frozen="eval")  # line 12
        head = Phase(self.s, ("head/",), weight_decay={"head/": 0.0}, bn_of_frozen="eval")
        return [base, head]  # line 13

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Tables) -> Tensor:
        total = super().loss(ctx, batch, out, refs)  # eq. 2
        if self.use_lp:
            total = total + self.lam * self.local_loss(ctx, batch, out, refs.own)
        if self.use_gp:
            total = total + (1 - self.lam) * self.global_loss(batch, out, refs.everyone)
        return total  # eq. 12

    def local_loss(self, ctx: ClientContext, batch: Batch, out: Output, own: ByClass) -> Tensor:
        """Return eq. 8: KL of the client's own old prototype of y and the embedding of x."""
        rows = self.divergence(own.vectors[batch.y], out.features)  # (B,)
        return (rows * own.known[batch.y]).sum() / len(rows)

    def divergence(self, target: Tensor, z: Tensor) -> Tensor:
        """Return eq. 7: KL(target || z) of each row, as distributions over d: (B,)."""
        log_p, log_q = (log_softmax(v.float() / self.tau, dim=1) for v in (target, z))
        return (log_p.exp() * (log_p - log_q)).sum(1)

    def global_loss(self, batch: Batch, out: Output, everyone: ByClass) -> Tensor:
        """Return eq. 10: squared distances to the global prototypes, weighed by b_n / b."""
        z = out.features.float()
        classes = torch.arange(len(everyone.known), device=z.device)
        members = (classes[:, None] == batch.y).to(z.dtype)  # (K, B)
        counts = members.sum(1)  # b_n
        means = members @ z / counts.clamp(min=1)[:, None]  # C_B^n
        squared = (means - everyone.vectors).square().mean(1)  # (K,)
        return (squared * everyone.known * counts).sum() / len(z)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Tables) -> Bundle:
        refs.fresh = self.fresh_prototypes(ctx, refs)
        kept = moved(state.prototypes.get("class"), refs.fresh, self.beta)  # eq. 9
        return replace(super().after_local(ctx, state, refs), prototypes={"class": kept})

    def fresh_prototypes(self, ctx: ClientContext, refs: Tables) -> Prototypes:
        """Return eq. 6: the class means of the task's training set."""
        return class_means(ctx, *self.training_data(ctx, refs))

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Tables) -> Bundle:
        return Bundle(
            self.shared(ctx.run, weights_of(ctx.net)), self.limits.released(ctx, refs.fresh)
        )

    # --- inference -----------------------------------------------------------------------------

    def predict(self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor) -> Scores:
        z, own = ctx.net.features(x), ctx.once(by_class, state)
        everyone = ctx.once(by_class, payload)
        tables = {"gldp_gp": everyone, "gldp_lp": own.or_else(everyone)}  # eq. 13
        rules = {rule: nearest_scores(z, table, own.known) for rule, table in tables.items()}
        if ctx.view != "global" or self.has_global_head:
            rules["classifier"] = ctx.net.head(z)
        if self.inference == "classifier":
            return {**rules, "all_classes": rules["classifier"]}
        table = tables[self.inference]
        return {**rules, "all_classes": nearest_scores(z, table, torch.ones_like(own.known))}
