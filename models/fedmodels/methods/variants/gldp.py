"""Other readings of GLDP's paper; docs/methods/gldp.md says where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmodels.methods.fedavg import FedAvg
from fedmodels.methods.gldp import Gldp, Tables
from fedmodels.methods.variants import Variants
from fedmodels.methods.variants.heads import (
    EVAL,
    HeadsOfARound,
    ScoredHeads,
    as_scored,
    beside_own,
)
from fedmodels.numerics.prototypes import (
    ByClass,
    class_prototypes,
    distance_per_example,
    moved,
    only,
)
from fedmodels.techniques.class_prototypes import by_class, check_prototypes
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, scalar_spec
from fedmodels.tensors.roles import under
from fedmodels.tensors.uploads import Uploads
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Payload
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output, Phase

ROUND, COUNT = "round", "stages"
"""In the server's own state: the round that goes on, and how many of its interactions ended."""


class HeadFirst(Gldp):
    """The head trains before the representation."""

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        return [*reversed(super().phases(ctx))]


class DivergenceOfLogits(Gldp):
    """Eq. 8 compares distributions over the head's logits in place of the embedding's coordinates.

    The target's logits are constants.
    """

    def local_loss(self, ctx: ClientContext, batch: Batch, out: Output, own: ByClass) -> Tensor:
        with torch.no_grad():
            target = ctx.net.head(own.vectors[batch.y])
        rows = self.divergence(target, out.logits)
        return (rows * own.known[batch.y]).sum() / len(rows)


class EveryExample(Gldp):
    """Eq. 10 compares every example with the global prototype, not the mean of its class."""

    def global_loss(self, batch: Batch, out: Output, everyone: ByClass) -> Tensor:
        return distance_per_example(out.features.float(), batch.y, everyone)


class AveragesUp(Gldp):
    """The client's moving averages go up in place of this task's class means."""

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Tables) -> Bundle:
        averages = only(state.prototypes["class"], like=refs.fresh)
        return super().uplink(ctx, state, replace(refs, fresh=averages))


# --- embeddings as they were while they trained ---------------------------------------------------


@dataclass(frozen=True)
class LatestEmbeddings:
    """Each example's embedding when it was last trained on, in the epoch under way."""

    vectors: Tensor  # (n, d)
    visited: Tensor  # (n,) bool

    @classmethod
    def of(cls, examples: int, width: int, device: torch.device) -> LatestEmbeddings:
        """Return room for the embeddings (d,) of so many examples, none of them visited."""
        vectors = torch.zeros(examples, width, device=device)
        return cls(vectors, torch.zeros(examples, dtype=torch.bool, device=device))

    def keep(self, batch: Batch, features: Tensor) -> None:
        """Keep the embeddings (B, d) of a batch."""
        self.vectors[batch.index] = features.detach().float()
        self.visited.index_fill_(0, batch.index, True)

    def forget_visits(self) -> None:
        """Begin another epoch."""
        self.visited.zero_()

    def means(self, labels: Tensor, num_classes: int) -> Prototypes:
        """Return the class means of the examples visited, by the labels (n,) of all."""
        rows = self.visited.nonzero().flatten()
        return class_prototypes(self.vectors[rows], labels[rows], num_classes)


@dataclass
class EmbeddedTables(Tables):
    """The prototypes that the loss refers to, and the embeddings that it saw."""

    held: Prototypes | None = None  # C-hat_i as rows
    latest: LatestEmbeddings | None = None


class KeepsEmbeddings(Gldp):
    """Each example's embedding is kept as it was when the example was last trained on."""

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> EmbeddedTables:
        examples = len(ctx.stream.train(ctx.task)[1])
        latest = LatestEmbeddings.of(examples, ctx.net.width, ctx.device)
        held = state.prototypes.get("class")
        refs = super().prepare(ctx, payload, state)
        return EmbeddedTables(refs.own, refs.everyone, held=held, latest=latest)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Tables) -> Tensor:
        total = super().loss(ctx, batch, out, refs)
        head_is_last = self.phases(ctx)[-1].trains == ("head/",)
        if out.features.requires_grad or head_is_last:  # a head that is first comes too early
            _latest(refs).keep(batch, out.features)
        return total


class RunningMeans(KeepsEmbeddings):
    """Eq. 6 takes embeddings as they were in the last epoch; training mode included."""

    def fresh_prototypes(self, ctx: ClientContext, refs: Tables) -> Prototypes:
        _, y = self.training_data(ctx, refs)
        found = _latest(refs).means(y, ctx.run.problem.num_classes)
        check_prototypes(ctx, found)
        return found


class MovesEachEpoch(KeepsEmbeddings):
    """Eq. 9 moves the own prototypes after each epoch of the representation too, and eq. 8 follows.

    Algorithm 1 has both equations within the epochs (line 15).
    """

    def begin_epoch(self, ctx: ClientContext, phase: Phase, epoch: int, refs: Tables) -> None:
        if epoch and phase.trains == ("base/",):
            assert isinstance(refs, EmbeddedTables)
            latest = _latest(refs)
            found = latest.means(ctx.stream.train(ctx.task)[1], ctx.run.problem.num_classes)
            refs.held = moved(refs.held, found, self.beta)  # eq. 9
            refs.own = by_class(ctx, Bundle(prototypes={"class": refs.held}))
            latest.forget_visits()

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Tables) -> Bundle:
        assert isinstance(refs, EmbeddedTables)
        held = {} if refs.held is None else {"class": refs.held}
        return super().after_local(ctx, replace(state, prototypes=held), refs)


def _latest(refs: Tables) -> LatestEmbeddings:
    assert isinstance(refs, EmbeddedTables)
    assert refs.latest is not None
    return refs.latest


# --- what is averaged, and what is scored ---------------------------------------------------------


class WeighedByExamples(Gldp):
    """Clients count by their examples; their numbers go up."""

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return super().upload_spec(run) | scalar_spec("num_examples")

    def count(self, upload: Bundle) -> float:
        return FedAvg.count(self, upload)

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Tables) -> Bundle:
        upload = super().uplink(ctx, state, refs)
        return replace(upload, scalars={"num_examples": float(ctx.num_examples)})


class ScoredMeanOfARound(Gldp):
    """What is scored is the mean of the models after each interaction of a round.

    A head that travels belongs to it. Clients train from the newest model.
    """

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        after = super().aggregate(ctx, state, uploads)
        before = state.own.scalars[COUNT] if state.own.scalars.get(ROUND) == ctx.round else 0.0
        weights = _scored(after.common)
        if before:
            share = before / (before + 1)
            weights = weighted_mean([state.own.weights, weights], [share, 1 - share])
        own = Bundle(weights, scalars={ROUND: float(ctx.round), COUNT: before + 1})
        return replace(after, own=own)

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        common, own = super().broadcast(ctx, state)
        if ctx.scores:
            own = beside_own(ctx.run, own, state.own.weights)
        return common, own

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        common, own = super().payload_spec(run)
        scored = BundleSpec.of(Bundle(_scored(Bundle(self.shared(run, run.forms)))))
        return common, own | BundleSpec(optional=scored.required)

    def global_weights(self, common: Bundle) -> Weights:
        return super().global_weights(as_scored(common))


class PrototypesAlone(Gldp):
    """Prototypes travel and nothing else: a client's net is its own."""

    private = ("",)

    @property
    def views(self) -> tuple[str, ...]:
        return ("after_local", "after_downlink")


def _scored(common: Bundle) -> Weights:
    """Return the weights that are scored, as ``eval/…``."""
    return under(EVAL, as_scored(common).weights)


OF = {
    "gldp": Variants(
        readings={
            "eval_model": {"last": None, "stage_mean": ScoredMeanOfARound},
            "heads": {"private": None, "round": HeadsOfARound},
            "order": {"base_first": None, "head_first": HeadFirst},
            "kl_space": {"embedding": None, "head": DivergenceOfLogits},
            "gp_mode": {"class_mean": None, "per_sample": EveryExample},
            "uplink_proto": {"raw": None, "ema": AveragesUp},
            "own_moves": {"stage": None, "epoch": MovesEachEpoch},
            "proto_pass": {"eval": None, "running": RunningMeans},
        },
        switches={
            "weighting": {"uniform": None, "examples": WeighedByExamples},
            "eval_upload_head": {False: None, True: ScoredHeads},
            "share": {"base": None, "prototypes": PrototypesAlone},
        },
        apart=tuple(
            ("share", key) for key in ("heads", "eval_model", "eval_upload_head", "weighting")
        ),
    )
}
