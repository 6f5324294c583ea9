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
Deviations and readings of what the paper leaves open: docs/methods/gldp.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot

from fedmodels.config.bounds import Count, Positive, Share
from fedmodels.methods import register
from fedmodels.methods.bases.private_parts import PRIVATE_VIEWS
from fedmodels.methods.bases.released_prototypes import ReleasedPrototypes
from fedmodels.methods.bases.round_memory import RoundMemory
from fedmodels.methods.readings.gldp import GldpReading
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.latest_embeddings import LatestEmbeddings
from fedmodels.numerics.prototypes import ByClass, distance_per_example, moved, nearest_scores, only
from fedmodels.tensors.announced import STATISTICS
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, scalar_spec
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Batch, Output, Phase
from fedmodels.training.run import RunFacts


@dataclass
class GldpReferences:
    """References of the loss in one interaction, and the class means that move with it."""

    own: ByClass  # C-hat_i, as it was before this interaction or epoch
    everyone: ByClass  # C-tilde
    held: Prototypes | None = None  # C-hat_i as rows, where it moves within the interaction
    latest: LatestEmbeddings | None = None  # of this interaction, where class means come from them
    fresh: Prototypes = field(default_factory=lambda: Prototypes.of({}, 0))


@register("gldp")
@dataclass(frozen=True, kw_only=True)
class Gldp(RoundMemory, ReleasedPrototypes):
    """Shared base, private heads, and prototypes of old and of rare classes as regularisers."""

    citation: ClassVar[str] = "Guo et al., 2025"
    trains_together: ClassVar[bool] = True
    # The loss keeps embeddings.
    trains_alone_with: ClassVar[Mapping[str, object]] = {
        "reading.proto_pass": "running",
        "reading.own_moves": "epoch",
    }

    lam: Share = 0.5
    """Weight of the local prototype loss; the global one has 1 - lam."""
    beta: Share = 0.5
    """Share of the old prototype in both moving averages."""
    tau: Positive = 1.0
    """Temperature of the local prototype loss. The paper has none, which is 1; no interval tells 8
    apart from it (docs/results/gldp.md)."""
    t: Count = 10
    """Epochs of the representation; ``training.local_epochs`` is not used."""
    s: Count = 20
    """Epochs of the head."""
    use_lp: bool = True
    """Whether the local prototype relation (eq. 8) is part of the loss."""
    use_gp: bool = True
    """Whether the global-local relation (eq. 10) is part of the loss."""
    weighting: Literal["examples", "uniform"] = "uniform"
    """Aggregation weights: 1 / the number of participants, as the paper's; or n_k / n."""
    reading: GldpReading = field(default_factory=GldpReading)
    """How the paper is read where it leaves something open."""

    @property
    def views(self) -> tuple[str, ...]:
        headless = self.reading.inference == "classifier" and not self.has_global_head
        is_private = headless or self.reading.bn == "local"
        return PRIVATE_VIEWS if is_private else ("global", *PRIVATE_VIEWS)

    @property
    def rules(self) -> tuple[str, ...]:
        unmasked = ("all_classes",) if self.reading.candidates == "client_seen" else ()
        all_of_them = (self.reading.inference, "gldp_gp", "gldp_lp", *unmasked, "classifier")
        return tuple(dict.fromkeys(all_of_them))  # everyone's model may have no head: it is last

    def shares(self, name: str) -> bool:
        stays = self.reading.bn == "local" and name.endswith(STATISTICS)
        return super().shares(name) and not stays

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        return ServerState(Bundle(self.shared(run.initial_weights), {"class": self.nothing(run)}))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        sent = BundleSpec.of(Bundle(weights=self.shared(run.forms)))
        counts = scalar_spec("num_examples") if self.weighting == "examples" else BundleSpec()
        return sent | counts | self.prototype_spec(run)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        common, own = super().payload_spec(run)
        return common | self.prototype_spec(run, counted=False), own

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        weights = super().aggregate(ctx, state, uploads).common.weights  # eq. 5
        reported = {c: u.prototypes["class"] for c, u in uploads.items()}
        found = self.everyones(ctx.run, reported, uniform=True)
        known = state.common.prototypes["class"]
        common = Bundle(weights, {"class": moved(known, found, self.beta)})  # eq. 11
        return ServerState(common, self.remembered(ctx, state, common), state.clients)

    # --- client half ---------------------------------------------------------------------------

    def keeps_state(self, run: RunFacts) -> bool:
        return True

    def own_weights(self, ctx: ClientContext, state: Bundle) -> Weights:
        if self.reading.eval_base == "local" and ctx.view:
            return state.weights
        return super().own_weights(ctx, state)

    def load_global(self, ctx: ClientContext, payload: Bundle) -> None:
        load_weights(ctx.net, self.net_weights(payload), strict=False)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> GldpReferences:
        own, everyone = self.tables(ctx, payload, state)
        moves = self.reading.own_moves == "epoch"  # other clients' rows are of other shapes
        held = state.prototypes.get("class") if moves else None
        if not self.reading.keeps_embeddings:
            return GldpReferences(own, everyone, held)
        examples = len(ctx.stream.train(ctx.task)[1])
        latest = LatestEmbeddings.of(examples, ctx.net.width, ctx.device)
        return GldpReferences(own, everyone, held, latest)

    def tables(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> tuple[ByClass, ByClass]:
        """Return the client's and everyone's prototypes, laid out by class."""
        own, everyone = (bundle.prototypes.get("class") for bundle in (state, payload))
        return self.by_class(ctx, own), self.by_class(ctx, everyone)

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        base = Phase(self.t, ("base/",), bn_of_frozen="eval")  # line 12
        decay = {"head/": self.reading.wd_head}
        head = Phase(self.s, ("head/",), weight_decay=decay, bn_of_frozen="eval")  # line 13
        return [base, head] if self.reading.order == "base_first" else [head, base]

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: GldpReferences) -> Tensor:
        if self.reading.own_moves == "epoch" and out.features.requires_grad:
            self._follow_epoch(ctx, batch, refs)
        total = super().loss(ctx, batch, out, refs)  # eq. 2
        if self.use_lp:
            total = total + self.lam * self.local_loss(ctx, batch, out, refs.own)
        if self.use_gp:
            total = total + (1 - self.lam) * self.global_loss(batch, out, refs.everyone)
        counts = out.features.requires_grad or self.reading.order == "base_first"
        if refs.latest is not None and counts:  # epochs of a head that comes first do not
            refs.latest.keep(batch.index, out.features)
        return total  # eq. 12

    def _follow_epoch(self, ctx: ClientContext, batch: Batch, refs: GldpReferences) -> None:
        """Move the client's own prototypes where this batch begins another epoch (line 15)."""
        if refs.latest is not None and refs.latest.comes_again(batch.index):
            y = ctx.stream.train(ctx.task)[1]
            found = refs.latest.means(y, ctx.run.problem.num_classes)
            refs.held = moved(refs.held, found, self.beta)  # eq. 9
            refs.own = self.by_class(ctx, refs.held)
            refs.latest.forget_visits()

    def local_loss(self, ctx: ClientContext, batch: Batch, out: Output, own: ByClass) -> Tensor:
        """Return eq. 8: KL of the client's own old prototype of y and the embedding of x."""
        target, z = own.vectors[batch.y], out.features  # (B, d)
        if self.reading.kl_space == "head":
            with torch.no_grad():
                target = ctx.net.head(target)
            z = out.logits
        log_p, log_q = (log_softmax(v.float() / self.tau, dim=1) for v in (target, z))
        divergence = (log_p.exp() * (log_p - log_q)).sum(1)  # (B,)
        total = (divergence * own.known[batch.y]).sum()
        parts = {"sum": 1, "batchmean": len(z), "mean": z.numel()}
        return total / parts[self.reading.kl_reduction]

    def global_loss(self, batch: Batch, out: Output, everyone: ByClass) -> Tensor:
        """Return eq. 10: squared distances to the global prototypes, weighed by b_n / b."""
        z = out.features.float()
        if self.reading.gp_mode == "per_sample":
            return distance_per_example(z, batch.y, everyone)
        members = one_hot(batch.y, len(everyone.known)).T.to(z.dtype)  # (K, B)
        counts = members.sum(1)  # b_n
        means = members @ z / counts.clamp(min=1)[:, None]  # C_B^n
        squared = (means - everyone.vectors).square().mean(1)  # (K,)
        return (squared * everyone.known * counts).sum() / len(z)

    def after_local(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: GldpReferences
    ) -> Bundle:
        refs.fresh = self.means_after(ctx, refs)  # eq. 6
        before = refs.held if self.reading.own_moves == "epoch" else state.prototypes.get("class")
        kept = moved(before, refs.fresh, self.beta)  # eq. 9
        weights = weights_of(ctx.net)
        if self.reading.eval_base != "local":
            weights = self.withheld(weights)
        return self.with_head(ctx, Bundle(weights, {"class": kept}))

    def means_after(self, ctx: ClientContext, refs: GldpReferences) -> Prototypes:
        """Return the class means of a task's training set."""
        x, y = self.training_data(ctx, refs)
        if self.reading.proto_pass == "running" and refs.latest is not None:
            return self.computed(ctx, refs.latest.means(y, ctx.run.problem.num_classes))
        return self.class_means(ctx, x, y)

    def count(self, upload: Bundle) -> float:
        """Return n_k, or 1; but 0 of a client that shows no prototype, as it has no example."""
        if self.weighting == "examples" or self.min_count > 1:  # which withholds prototypes
            return super().count(upload)
        return float(len(upload.prototypes["class"].labels) > 0)

    def uplink(
        self, ctx: ClientContext, state: Bundle, refs: GldpReferences, num_examples: int
    ) -> Bundle:
        ema = self.reading.uplink_proto == "ema"
        found = only(state.prototypes["class"], like=refs.fresh) if ema else refs.fresh
        sent = self.released(ctx, found)
        scalars = {"num_examples": float(num_examples)} if self.weighting == "examples" else {}
        return Bundle(self.shared(weights_of(ctx.net)), {"class": sent}, scalars=scalars)

    def predict(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor
    ) -> Mapping[str, Tensor]:
        z = ctx.net.features(x)
        own, everyone = self.tables(ctx, payload, state)
        masked, anything = self.reading.candidates == "client_seen", torch.ones_like(own.known)
        among = own.known if masked else anything
        local = own if bool(own.known.any()) else everyone
        rules = {"gldp_gp": nearest_scores(z, everyone, among)}  # eq. 13
        rules["gldp_lp"] = nearest_scores(z, local, among)
        if masked:  # what other methods choose from
            rules["all_classes"] = nearest_scores(z, everyone, anything)
        if ctx.view != "global" or self.has_global_head:  # everyone's model has no head otherwise
            rules["classifier"] = ctx.net.head(z)
        return {rule: rules[rule] for rule in self.rules if rule in rules}
