"""FedAli — Ek, Wang, Portet, Lalanda, Cao, FedAli: Personalized Federated Learning with Aligned
Prototypes through Optimal Transport, 2024. https://arxiv.org/abs/2411.10595

    paper        here                                   paper     here
    w            weights, the gates of the ALP too      n_c       scalars["num_examples"]
    P_loc        ALP.local_prototypes; in an upload     beta_r    ALP.beta
                 prototypes["alp/<block>"]              k-means   finish
    P_glo        ALP.global_prototypes; in a payload
                 prototypes["alp/<block>"]

The layer, equations 3 to 7 and the switches of its own are in ``nets/alp.py``; they are options of
the net: ``[net] alp = true``, ``prototypes``, ``alignment = {beta, gamma, …}``.

Deviations: P_loc and P_glo leave the server equal and P_glo never changes at a client, so that one
of them travels each way (``wire_prototypes``); a cluster is never lost, where the published code
drops empty ones; a client without examples has no part in the clusters (docs/methods/fedali.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import PositiveCount
from fedmodels.errors import ConfigError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.alp import ALP, alp_layers
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.clustering import cluster
from fedmodels.numerics.neighbour_clustering import cluster_near
from fedmodels.tensors.bundle import Bundle, ClientId, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, scalar_spec
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.run import RunFacts

LOCAL, GLOBAL = ".local_prototypes", ".global_prototypes"
"""Endings of the names under which a net holds P_loc and P_glo."""
INFLUENCE = ("prototype_share", "prototype_angle")
"""What clients report of each block, see :meth:`fedmodels.nets.alp.ALP.influence`."""


@register("fedali")
@dataclass(frozen=True, kw_only=True)
class FedAli(FedAvg):
    """FedAvg of nets whose blocks draw tokens to prototypes, which the server clusters."""

    citation: ClassVar[str] = "Ek et al., 2024 (arXiv 2411.10595)"
    reduction: ClassVar[Reduction] = "each"

    wire_prototypes: Literal["one", "both"] = "one"
    """Sets of prototypes that travel each way; ``both`` costs what the paper counts and changes
    no result."""
    keep_personal_prototypes: bool = False
    """Clients keep P_loc between rounds, instead of starting from P_glo."""
    round0_beta: float | Literal["same"] = 0.0
    """Influence of the prototypes while training in round 0, when they are noise."""
    aggregate_prototypes: Literal["kmeans", "fedavg"] = "kmeans"
    """Cluster all clients' P_loc, or stop at their weighted mean."""
    kmeans_weighted: bool = False
    """Weigh the points by n_c; the paper's are equal, only the first centres are weighted."""
    kmeans_solver: Literal["lloyd", "neighbours", "torch"] = "lloyd"
    """scikit-learn's; ``torch``: the same, on a GPU where there is one; ``neighbours``: points are
    compared with the nearest centres only, for many prototypes."""
    kmeans_neighbours: PositiveCount = 16
    """Centres a point is compared with by ``neighbours``."""
    kmeans_max_iter: PositiveCount = 300
    """Most iterations of a clustering."""

    @property
    def views(self) -> tuple[str, ...]:
        kept = ("after_downlink",) if self.keep_personal_prototypes else ()
        return ("global", "after_local", *kept)

    def shares(self, name: str) -> bool:
        """Tell whether a tensor is averaged: all are but prototypes, which the server clusters."""
        return not name.endswith((LOCAL, GLOBAL))

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        prototypes = prototypes_of(run.initial_weights)
        if not prototypes:
            raise ConfigError(
                f"method 'fedali' needs a net with alignment layers; net "
                f"{run.experiment.net.name!r} has none here: set [net] alp = true of hart or "
                "vit-tiny"
            )
        return ServerState(Bundle(self.shared(run.initial_weights), prototypes))

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return self._sent(state.common, state.common.prototypes), {}  # P_glo, and P_loc equal to it

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return self._spec(run) | scalar_spec("num_examples")

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        return self._spec(run), BundleSpec()

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        after = super().aggregate(ctx, state, uploads)  # w <- sum_c n_c/n w_c
        if after is state:
            return state
        voters = [u for u in uploads.values() if u.scalars["num_examples"]]
        shares = self._shares(voters)
        means = weighted_mean(  # sum_c n_c/n P_loc,c: where the clusters begin
            [{level: u.prototypes[level].vectors for level in state.common.prototypes}
             for u in voters],
            shares,
        )  # fmt: skip
        prototypes = {level: Prototypes.by_position(mean) for level, mean in means.items()}
        return replace(after, common=replace(after.common, prototypes=prototypes))

    def finish(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[ServerState, Metrics]:
        voters = [u for u in uploads.values() if u.scalars["num_examples"]]
        if self.aggregate_prototypes == "fedavg" or len(voters) < 2:  # one: P_glo = its P_loc
            return state, {}
        prototypes, moved = {}, []
        for level, start in state.common.prototypes.items():
            points = [u.prototypes[level].vectors for u in voters]
            centres, labels = self._cluster(points, start.vectors, self._shares(voters))
            prototypes[level] = Prototypes.by_position(centres)
            rows = torch.arange(len(centres)).repeat(len(points))
            moved.append((labels.flatten() != rows).double())
        common = replace(state.common, prototypes=prototypes)
        return replace(state, common=common), {"prototypes_moved": float(torch.cat(moved).mean())}

    def _cluster(
        self, points: list[Tensor], start: Tensor, shares: list[float]
    ) -> tuple[Tensor, Tensor]:
        """Return the clusters' centres (G, d), row g of ``start`` become row g, and labels."""
        if self.kmeans_solver != "lloyd":
            return cluster_near(
                points,
                start,
                weights=shares if self.kmeans_weighted else None,
                neighbours=self.kmeans_neighbours if self.kmeans_solver == "neighbours" else None,
                device="cuda" if torch.cuda.is_available() else "cpu",
                max_iter=self.kmeans_max_iter,
            )
        each = torch.tensor(shares).repeat_interleave(len(start)) if self.kmeans_weighted else None
        return cluster(torch.cat(points), start, weights=each, max_iter=self.kmeans_max_iter)

    def _shares(self, voters: list[Bundle]) -> list[float]:
        counts = [u.scalars["num_examples"] for u in voters]
        counts = [1.0] * len(counts) if self.weighting == "uniform" else counts
        return [n / sum(counts) for n in counts]

    def _sent(self, bundle: Bundle, other: Mapping[str, Prototypes]) -> Bundle:
        """Return what travels: with ``both``, the other set beside the one that matters."""
        if self.wire_prototypes == "one":
            return bundle
        twins = {f"{level}/twin": rows for level, rows in other.items()}
        return replace(bundle, prototypes={**bundle.prototypes, **twins})

    def _spec(self, run: RunFacts) -> BundleSpec:
        prototypes = prototypes_of(run.forms)
        bundle = Bundle(self.shared(run.forms), prototypes)
        return BundleSpec.of(self._sent(bundle, prototypes))

    # --- client half ---------------------------------------------------------------------------

    def keeps_state(self, run: RunFacts) -> bool:
        return self.keep_personal_prototypes

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle()  # nothing kept yet: P_loc := P_glo

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        self.load_global(ctx, payload)
        load_weights(ctx.net, state.weights, strict=False)

    def load_global(self, ctx: ClientContext, payload: Bundle) -> None:
        load_weights(ctx.net, payload.weights, strict=False)  # its spec has fixed the keys
        for block, layer in enumerate(alp_layers(ctx.net)):
            vectors = payload.prototypes[f"alp/{block}"].vectors
            layer.global_prototypes.copy_(vectors)
            layer.local_prototypes.copy_(vectors)  # P_loc := P_glo
            layer.beta = layer.configured_beta

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        for layer in alp_layers(ctx.net):
            if ctx.round == 0 and self.round0_beta != "same":
                layer.beta = self.round0_beta

    def reported(self, run: RunFacts) -> frozenset[str]:
        blocks = range(len(prototypes_of(run.forms)))
        return frozenset(f"{name}_{block}" for name in INFLUENCE for block in blocks)

    def after_local(self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: Any) -> Bundle:
        ctx.metrics.update(influence_of(ctx))
        if not self.keep_personal_prototypes:
            return Bundle()
        weights = weights_of(ctx.net)
        return Bundle({name: t for name, t in weights.items() if name.endswith(LOCAL)})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any, num_examples: int) -> Bundle:
        weights = weights_of(ctx.net)
        scalars = {"num_examples": float(num_examples)}
        upload = Bundle(self.shared(weights), prototypes_of(weights), scalars=scalars)
        return self._sent(upload, prototypes_of(weights, GLOBAL))


def prototypes_of(weights: Weights, which: str = LOCAL) -> dict[str, Prototypes]:
    """Return one set of prototypes of a net's weights by block, ``alp/0`` nearest to the input."""
    found = [tensor for name, tensor in weights.items() if name.endswith(which)]
    return {f"alp/{block}": Prototypes.by_position(rows) for block, rows in enumerate(found)}


@torch.no_grad()
def influence_of(ctx: ClientContext) -> Metrics:
    """Return how much prototypes change the tokens of a batch of training data, by block."""
    x, found = ctx.stream.train(ctx.task)[0], dict[str, float]()
    x = x[: ctx.run.experiment.evaluate.batch_size]
    if not len(x):
        return found
    ctx.net.eval()  # the prototypes stay as they are

    def measure(block: int, layer: ALP, tokens: Tensor) -> None:
        values = zip(INFLUENCE, layer.influence(tokens), strict=True)
        found.update({f"{name}_{block}": value for name, value in values})

    hooks = [
        layer.register_forward_pre_hook(lambda layer, given, b=block: measure(b, layer, given[0]))
        for block, layer in enumerate(alp_layers(ctx.net))
    ]
    ctx.net(x)
    for hook in hooks:
        hook.remove()
    return found
