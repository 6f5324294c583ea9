"""GLDP — Guo et al., STHFL: Spatio-Temporal Heterogeneous Federated Learning, 2025, Algorithm 1.
https://arxiv.org/abs/2501.05775. The method is its Global-Local Dynamic Prototype framework.

    paper           here                             paper     here
    Theta           state.common.weights             t, s      t, s
    mu_i, nu_i      base/…, head/… of ctx.net        beta      beta
    C_i^{n,(m)}     refs.fresh                       lambda    lam
    C-hat_i^n       state.prototypes["class"]        tau       tau
    C-tilde^n       payload.prototypes["class"]      z         problem.num_classes
    eq. 2, 8, 10    loss, local_loss, global_loss    eq. 12    loss

One interaction is one stage m; the schedule ``rounds_outer`` visits every stage in every round.
Deviations and readings of what the paper leaves open: docs/methods/gldp.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot

from fedmodels.methods import register
from fedmodels.methods.bases.private_parts import PRIVATE_VIEWS, PrivateParts
from fedmodels.methods.bases.released_prototypes import ReleasedPrototypes
from fedmodels.nets.embedding import embeddings
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.algebra import weighted_mean
from fedmodels.numerics.prototypes import (
    ByClass,
    class_prototypes,
    distance_per_example,
    mean_prototypes,
    moved,
    nearest_scores,
    only,
    uncounted,
)
from fedmodels.techniques import evaluation_heads, round_heads
from fedmodels.tensors.announced import STATISTICS
from fedmodels.tensors.bundle import (
    Bundle,
    BundleSpec,
    ClientId,
    Prototypes,
    Weights,
    prototype_spec,
    scalar_spec,
)
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.method import (
    Batch,
    ClientContext,
    Output,
    Phase,
    RunFacts,
    ServerContext,
    ServerState,
)


@dataclass
class Stage:
    """What the loss of one stage refers to, and the class means that follow it."""

    own: ByClass  # C-hat_i, as it was before this stage or epoch
    everyone: ByClass  # C-tilde
    latest: Tensor  # (n, d) each example's embedding when it was last trained on, if kept
    visited: Tensor  # (n,) bool
    held: Prototypes | None = None  # C-hat_i as rows, where it moves within the stage
    fresh: Prototypes = field(default_factory=lambda: Prototypes.of({}, 0))


@register("gldp")
@dataclass(frozen=True, kw_only=True)
class Gldp(PrivateParts, ReleasedPrototypes):
    """Shared base, private heads, and prototypes that hold on to what is old or rare."""

    citation: ClassVar[str] = "Guo et al., 2025"
    trains_together: ClassVar[bool] = True
    # The loss keeps embeddings.
    trains_alone_with: ClassVar[Mapping[str, object]] = {
        "proto_pass": "running",
        "own_moves": "epoch",
    }

    # --- the paper's numbers and parts ---------------------------------------------------------

    lam: float = 0.5
    """Weight of the local prototype loss; the global one has 1 - lam."""
    beta: float = 0.5
    """Share of the old prototype in both moving averages."""
    tau: float = 1.0
    """Temperature of the local prototype loss."""
    t: int = 10
    """Epochs of the representation; ``training.local_epochs`` is not used."""
    s: int = 20
    """Epochs of the head."""
    use_lp: bool = True
    """Whether the local prototype relation (eq. 8) is part of the loss."""
    use_gp: bool = True
    """Whether the global-local relation (eq. 10) is part of the loss."""

    # --- readings of what the paper leaves open ------------------------------------------------

    weighting: Literal["examples", "uniform"] = "uniform"
    order: Literal["base_first", "head_first"] = "base_first"
    """Which phase comes first."""
    wd_head: float = 0.0
    """Weight decay of the head, in place of the run's."""
    kl_space: Literal["embedding", "head"] = "embedding"
    """Where eq. 8 compares: softmax over the embedding's coordinates, or over the head's logits."""
    kl_reduction: Literal["batchmean", "mean", "sum"] = "batchmean"
    """Mean over examples; over examples and coordinates; or the sum."""
    gp_mode: Literal["class_mean", "per_sample"] = "class_mean"
    """What eq. 10 compares with the global prototype: the batch's class mean, or every example."""
    uplink_proto: Literal["raw", "ema"] = "raw"
    """What goes up: this stage's class means, or the client's moving averages of them."""
    proto_pass: Literal["eval", "running"] = "eval"
    """Class means after training, in evaluation mode, or as embedded in the last epoch."""
    own_moves: Literal["stage", "epoch"] = "stage"
    """When eq. 9 moves a client's own prototypes: after the stage, or after each epoch of the
    representation too, by the epoch's embeddings, so that eq. 8 follows (Algorithm 1, line 15)."""
    heads: Literal["private", "round"] = "private"
    """``round``: every round begins with the mean of the participants' heads, which travel; heads
    are private only within it."""
    gp_refresh: Literal["stage", "round"] = "stage"
    """Which global prototypes clients train with: the newest, or those of the round's beginning."""
    bn: Literal["average", "local"] = "average"
    """Whether running statistics belong to the representation or stay with the client."""
    inference: Literal["gldp_gp", "gldp_lp", "classifier"] = "gldp_gp"
    """The rule the method is scored by: nearest global or local prototype, or the head; all are."""
    candidates: Literal["client_seen", "all"] = "client_seen"
    """Classes of eq. 13: those the client has trained on, or all. Methods without such a mask are
    compared with the rule ``all_classes``, which has none."""
    eval_base: Literal["aggregated", "local"] = "aggregated"
    """Representation of a client's personal model: everyone's, or its own of its last training."""
    eval_model: Literal["last", "stage_mean"] = "last"
    """What is scored: the newest representation, or the mean over the stages of the round."""

    @property
    def views(self) -> tuple[str, ...]:
        headless = self.inference == "classifier" and not self._has_global_head
        is_private = headless or self.bn == "local"
        return PRIVATE_VIEWS if is_private else ("global", *PRIVATE_VIEWS)

    @property
    def rules(self) -> tuple[str, ...]:
        unmasked = ("all_classes",) if self.candidates == "client_seen" else ()
        all_of_them = (self.inference, "gldp_gp", "gldp_lp", *unmasked, "classifier")
        return tuple(dict.fromkeys(all_of_them))  # everyone's model may have no head: it is last

    @property
    def _has_global_head(self) -> bool:
        return self.eval_upload_head or self.heads == "round"

    def shares(self, name: str) -> bool:
        if round_heads.is_head(name):
            return self.heads == "round"
        return not (self.bn == "local" and name.endswith(STATISTICS))

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        nothing = uncounted(Prototypes.of({}, run.width))
        return ServerState(Bundle(self.shared(run.initial_weights), {"class": nothing}))

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        common, own = super().broadcast(ctx, state)
        if self.gp_refresh == "round" and self._in_round(ctx, state):
            common = Bundle(common.weights, {"class": state.own.prototypes["class"]})
        return common, own

    def scored(self, state: ServerState) -> Weights:
        return {**super().scored(state), **state.own.weights}

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        sent = BundleSpec.of(Bundle(weights=self.shared(run.forms)))
        counts = scalar_spec("num_examples") if self.weighting == "examples" else BundleSpec()
        return sent | counts | prototype_spec("class", run.width, run.problem.num_classes)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        common, own = super().payload_spec(run)
        if self.eval_model == "stage_mean":
            sent = Bundle(weights=self.shared(run.forms))
            own = own | evaluation_heads.evaluation_spec(
                evaluation_heads.for_scores(evaluation_heads.trained_part(sent).weights)
            )
        known = prototype_spec("class", run.width, run.problem.num_classes, counted=False)
        return common | known, own

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        weights = super().aggregate(ctx, state, uploads).common.weights  # eq. 5
        reported = {c: u.prototypes["class"] for c, u in uploads.items()}
        classes = ctx.run.problem.num_classes
        found = mean_prototypes(reported, classes, ctx.run.width, uniform=True)
        known = state.common.prototypes["class"]
        common = Bundle(weights, {"class": moved(known, uncounted(found), self.beta)})  # eq. 11
        return ServerState(common, self._round_state(ctx, state, common), state.clients)

    def _round_state(self, ctx: ServerContext, state: ServerState, common: Bundle) -> Bundle:
        """Return what the server remembers of the round: its first prototypes, its mean model."""
        stages = state.own.scalars.get("stages", 0.0) if self._in_round(ctx, state) else 0.0
        weights: Weights = {}
        if self.eval_model == "stage_mean":
            weights = evaluation_heads.for_scores(evaluation_heads.trained_part(common).weights)
            if stages:
                share = stages / (stages + 1)
                weights = weighted_mean([state.own.weights, weights], [share, 1 - share])
        prototypes: dict[str, Prototypes] = {}
        if self.gp_refresh == "round":
            prototypes = dict(self.broadcast(ctx, state)[0].prototypes)
        if not weights and not prototypes:
            return state.own
        scalars = {"round": float(ctx.round), "stages": stages + 1}
        return Bundle(weights, prototypes, scalars=scalars)

    def _in_round(self, ctx: ServerContext, state: ServerState) -> bool:
        """Tell whether the server's memory is of the round that goes on."""
        return state.own.scalars.get("round") == ctx.round

    # --- client half ---------------------------------------------------------------------------

    def keeps_state(self, run: RunFacts) -> bool:
        return True

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        received_alone = ctx.view == "" or (self.heads == "round" and self.eval_base != "local")
        own = {k: v for k, v in state.weights.items() if not received_alone or not self.shares(k)}
        if self.heads == "round":
            own |= round_heads.going_on(ctx, state)
        load_weights(ctx.net, {**self.net_weights(payload), **own})

    def load_global(self, ctx: ClientContext, payload: Bundle) -> None:
        load_weights(ctx.net, self.net_weights(payload), strict=False)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Stage:
        own, everyone = self.tables(ctx, payload, state)
        kept = len(ctx.stream.train(ctx.task)[1]) if self._keeps_embeddings else 0
        latest = torch.zeros(kept, ctx.net.width, device=ctx.device)
        visited = torch.zeros(kept, dtype=torch.bool, device=ctx.device)
        moves = self.own_moves == "epoch"  # other clients' rows are of other shapes
        held = state.prototypes.get("class") if moves else None
        return Stage(own, everyone, latest, visited, held)

    @property
    def _keeps_embeddings(self) -> bool:
        return self.proto_pass == "running" or self.own_moves == "epoch"

    def tables(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> tuple[ByClass, ByClass]:
        """Return the client's and everyone's prototypes, laid out by class."""
        held = state.prototypes.get("class"), payload.prototypes.get("class")
        own, everyone = (self._by_class(ctx, rows) for rows in held)
        return own, everyone

    def _by_class(self, ctx: ClientContext, rows: Prototypes | None) -> ByClass:
        return ByClass.of(rows, ctx.run.problem.num_classes, ctx.net.width, ctx.device)

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        base = Phase(self.t, ("base/",), bn_of_frozen="eval")  # line 12
        decay = {"head/": self.wd_head}
        head = Phase(self.s, ("head/",), weight_decay=decay, bn_of_frozen="eval")  # line 13
        return [base, head] if self.order == "base_first" else [head, base]

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Stage) -> Tensor:
        if self.own_moves == "epoch" and out.features.requires_grad:
            self._follow_epoch(ctx, batch, refs)
        total = super().loss(ctx, batch, out, refs)  # eq. 2
        if self.use_lp:
            total = total + self.lam * self.local_loss(ctx, batch, out, refs.own)
        if self.use_gp:
            total = total + (1 - self.lam) * self.global_loss(batch, out, refs.everyone)
        if self._keeps_embeddings:
            refs.latest[batch.index] = out.features.detach().float()
            refs.visited[batch.index] = True
        return total  # eq. 12

    def _follow_epoch(self, ctx: ClientContext, batch: Batch, refs: Stage) -> None:
        """Move the client's own prototypes where this batch begins another epoch (line 15)."""
        if bool(refs.visited[batch.index].any()):
            y = ctx.stream.train(ctx.task)[1]
            found = class_prototypes(
                refs.latest[refs.visited], y[refs.visited], ctx.run.problem.num_classes
            )
            refs.held = moved(refs.held, found, self.beta)  # eq. 9
            refs.own = self._by_class(ctx, refs.held)
            refs.visited.zero_()

    def local_loss(self, ctx: ClientContext, batch: Batch, out: Output, own: ByClass) -> Tensor:
        """Return eq. 8: KL of the client's own old prototype of y and the embedding of x."""
        target, z = own.vectors[batch.y], out.features  # (B, d)
        if self.kl_space == "head":
            with torch.no_grad():
                target = ctx.net.head(target)
            z = out.logits
        log_p, log_q = (log_softmax(v.float() / self.tau, dim=1) for v in (target, z))
        divergence = (log_p.exp() * (log_p - log_q)).sum(1)  # (B,)
        total = (divergence * own.known[batch.y]).sum()
        parts = {"sum": 1, "batchmean": len(z), "mean": z.numel()}
        return total / parts[self.kl_reduction]

    def global_loss(self, batch: Batch, out: Output, everyone: ByClass) -> Tensor:
        """Return eq. 10: squared distances to the global prototypes, weighed by b_n / b."""
        z = out.features.float()
        if self.gp_mode == "per_sample":
            return distance_per_example(z, batch.y, everyone)
        members = one_hot(batch.y, len(everyone.known)).T.to(z.dtype)  # (K, B)
        counts = members.sum(1)  # b_n
        means = members @ z / counts.clamp(min=1)[:, None]  # C_B^n
        squared = (means - everyone.vectors).square().mean(1)  # (K,)
        return (squared * everyone.known * counts).sum() / len(z)

    def after_local(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: Stage
    ) -> Bundle:
        x, y = self.training_data(ctx, refs)
        classes = ctx.run.problem.num_classes
        if self.proto_pass == "running":
            refs.fresh = class_prototypes(refs.latest[refs.visited], y[refs.visited], classes)
        else:
            refs.fresh = class_prototypes(embeddings(ctx.net, x), y, classes)  # eq. 6
        refs.fresh = self.computed(ctx, refs.fresh)
        before = refs.held if self.own_moves == "epoch" else state.prototypes.get("class")
        kept = moved(before, refs.fresh, self.beta)  # eq. 9
        everything = self.eval_base == "local"
        weights = {k: v for k, v in weights_of(ctx.net).items() if everything or not self.shares(k)}
        after = Bundle(weights, {"class": kept})
        return round_heads.kept(ctx, after) if self.heads == "round" else after

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Stage, num_examples: int) -> Bundle:
        ema = self.uplink_proto == "ema"
        found = only(state.prototypes["class"], like=refs.fresh) if ema else refs.fresh
        sent = self.released(ctx, found)
        scalars = {"num_examples": float(num_examples)} if self.weighting == "examples" else {}
        return Bundle(self.shared(weights_of(ctx.net)), {"class": sent}, scalars=scalars)

    def predict(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor
    ) -> Mapping[str, Tensor]:
        z = ctx.net.features(x)
        own, everyone = self.tables(ctx, payload, state)
        among = own.known if self.candidates == "client_seen" else torch.ones_like(own.known)
        local = own if bool(own.known.any()) else everyone
        rules = {"gldp_gp": nearest_scores(z, everyone, among)}  # eq. 13
        rules["gldp_lp"] = nearest_scores(z, local, among)
        if self.candidates == "client_seen":  # what other methods choose from
            rules["all_classes"] = nearest_scores(z, everyone, torch.ones_like(among))
        if ctx.view != "global" or self._has_global_head:  # everyone's model has no head otherwise
            rules["classifier"] = ctx.net.head(z)
        return {rule: rules[rule] for rule in self.rules if rule in rules}
