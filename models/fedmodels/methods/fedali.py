"""FedAli — Ek, Wang, Portet, Lalanda, Cao, FedAli: Personalized Federated Learning with Aligned
Prototypes through Optimal Transport, 2024. https://arxiv.org/abs/2411.10595

    paper        here                                   paper        here
    w            weights, the gates of the ALP too      n_c          scalars["num_examples"]
    P_loc        ALP.local_prototypes; in an upload     beta_r       ALP.beta
                 prototypes["alp/<block>"]              P_centroid   aggregate (line 8)
    P_glo        ALP.global_prototypes; in a payload    KmeanFit     finish (line 11)
                 prototypes["alp/<block>"]

The layer, equations 3 to 7 and the switches of its own are in ``nets/alp.py``; they are options of
the net: ``[net] alp = true``, ``prototypes``, ``alignment = {beta, gamma, …}``.

Deviations: P_loc and P_glo leave the server equal and P_glo never changes at a client, so that one
of them travels each way; a cluster is never lost, where the published code drops empty ones; a
client without examples has no part in the clusters (docs/methods/fedali.md). What else the paper
and its code do is in variants/fedali.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from fedmodels.config.bounds import PositiveCount
from fedmodels.errors import ConfigError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.alp import (
    INFLUENCE,
    alp_layers,
    influence_of,
    is_prototypes,
    put_prototypes,
    sets_of,
)
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.neighbour_clustering import Solver, cluster_sets
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Reduced
from fedmodels.training.run import RunFacts


@register("fedali")
class FedAli(FedAvg):
    """FedAvg of nets whose blocks draw tokens to prototypes, which the server clusters."""

    citation: ClassVar[str] = "Ek et al., 2024 (arXiv 2411.10595)"
    reduction: ClassVar[Reduction] = "each"

    round0_beta: float | Literal["same"] = 0.0
    """Influence of the prototypes while training in round 0, when they are noise."""
    kmeans_solver: Solver = "lloyd"
    """scikit-learn's; ``torch``: the same, on a GPU where there is one; ``neighbours``: points are
    compared with the nearest centres only, for many prototypes."""
    kmeans_neighbours: PositiveCount = 16
    """Centres a point is compared with by ``neighbours``."""
    kmeans_max_iter: PositiveCount = 300
    """Most iterations of a clustering."""

    def shared(self, run: RunFacts, weights: Weights) -> Weights:
        """Return the weights that are averaged: all but prototypes, which the server clusters."""
        return {name: w for name, w in weights.items() if not is_prototypes(name)}

    # --- server half: lines 2 to 4 and 8 to 13 -------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        prototypes = sets_of(run.initial_weights)
        if not prototypes:
            raise ConfigError(
                f"method 'fedali' needs a net with alignment layers; net "
                f"{run.experiment.net.name!r} has none here: set [net] alp = true of hart or "
                "vit-tiny"
            )
        return ServerState(Bundle(self.shared(run, run.initial_weights), prototypes))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        sets = Bundle(prototypes=sets_of(run.forms))
        return super().upload_spec(run) | BundleSpec.of(sets)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        after = super().aggregate(ctx, state, uploads)  # w <- sum_c n_c/n w_c
        if after is state:
            return state
        means = uploads.mean_sets(state.common.prototypes)  # P_centroid <- sum_c n_c/n P_loc,c
        return replace(after, common=replace(after.common, prototypes=means))

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        voters = [u for u in uploads.values() if u.scalars["num_examples"]]
        if len(voters) < 2:  # one: P_glo = its P_loc
            return state, {}
        prototypes, moved = {}, []
        for block, start in state.common.prototypes.items():  # line 9
            points = [u.prototypes[block].vectors for u in voters]  # line 10
            centres, labels = cluster_sets(  # line 11
                points,
                start.vectors,
                self.kmeans_solver,
                neighbours=self.kmeans_neighbours,
                max_iter=self.kmeans_max_iter,
            )
            prototypes[block] = Prototypes.by_position(centres)
            rows = torch.arange(len(centres)).repeat(len(points))
            moved.append((labels.flatten() != rows).double())
        common = replace(state.common, prototypes=prototypes)
        return replace(state, common=common), {"prototypes_moved": float(torch.cat(moved).mean())}

    # --- client half: lines 5 to 7 -------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, payload.weights, strict=False)  # its spec has fixed the keys
        put_prototypes(ctx.net, payload.prototypes)  # P_loc := P_glo
        for layer in alp_layers(ctx.net):
            layer.beta = layer.configured_beta

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        for layer in alp_layers(ctx.net):
            if ctx.round == 0 and self.round0_beta != "same":
                layer.beta = self.round0_beta

    def reported(self, run: RunFacts) -> frozenset[str]:
        blocks = range(len(sets_of(run.forms))) if run.experiment.evaluate.influence else ()
        return frozenset(f"{name}_{block}" for name in INFLUENCE for block in blocks)

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        evaluate = ctx.run.experiment.evaluate
        if evaluate.influence:
            x, _ = ctx.stream.train(ctx.task)
            ctx.metrics.update(influence_of(ctx.net, x[: evaluate.at_once]))
        upload = super().uplink(ctx, state, refs)
        return replace(upload, prototypes=sets_of(weights_of(ctx.net)))
