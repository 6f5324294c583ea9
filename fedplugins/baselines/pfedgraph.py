"""pFedGraph — Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs,
ICML 2023, Algorithm 1. https://proceedings.mlr.press/v202/ye23b.html

    paper       here                                paper       here
    theta_i     clients[i].weights                  w_ij        own.weights["aggregation_weights"]
    u_i         clients[i].weights "neighbours/…"   alpha, lam  alpha, lam
    p           shares                              d_ij        d

``pfedgraph-replay`` is pFedGraph whose clients replay the classes they met, as in pFedGRP: Tan and
Liu, arXiv 2410.01502v2, appendices B and D.1. Generators never leave a client. The personal model
filters; the model trained from it says which generators are trained again.

Deviations: docs/methods/pfedgraph.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedmodels.config.bounds import NonNegative
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
from fedmodels.numerics.algebra import padded, simplex_projection
from fedmodels.numerics.weight_terms import inner_product, squared_norm
from fedmodels.techniques.class_replay import (
    Rehearsal,
    Replay,
    nothing_met,
    reported_by_replay,
)
from fedmodels.techniques.collaboration import ROWS, graph_metrics, mix
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import TrainsOn
from fedmodels.tensors.roles import part_of, under, without
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.pictures import Picture
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output

NEIGHBOURS = "neighbours"
"""Role of u_i, the normed mean of a client's neighbours."""

SAME = -0.9
"""Distances below this count as -1 (official code)."""


def parameter_keys(net: nn.Module, prefix: str = "") -> list[str]:
    """Return the keys of a net's parameters that start with ``prefix``; no buffers."""
    keys = [key.replace(".", "/", 1) for key, _ in net.named_parameters()]
    return [key for key in keys if key.startswith(prefix)]


def distances(models: Sequence[Weights], start: Weights, keys: Iterable[str]) -> Tensor:
    """Return d (n, n) float64: minus the cosine of what each model moved since ``start``."""
    n = len(models)
    products = torch.zeros(n, n, dtype=torch.float64)
    for key in keys:
        moved = torch.stack([m[key].reshape(-1) for m in models]).double()
        moved -= start[key].reshape(-1)
        products += moved @ moved.T
    norms = products.diagonal().sqrt()
    cosines = products / (norms[:, None] * norms).clamp_min(1e-300)
    d = torch.where(-cosines < SAME, torch.tensor(-1.0, dtype=torch.float64), -cosines)
    return d.fill_diagonal_(-1.0)


def collaboration_graph(d: Tensor, shares: Tensor, alpha: float) -> Tensor:
    """Return w (n, n); row i minimises ``sum_j w_ij d_ij + alpha ‖w_i - p‖²`` on the simplex.

    Eq. 3; that is the projection of ``p - d_i / (2 alpha)``. With ``alpha`` 0 a row is shared among
    its nearest clients.

    Args:
        d: (n, n) distances.
        shares: p (n,), on the simplex.
        alpha: how much p counts.
    """
    if not alpha:
        nearest = (d == d.min(1, keepdim=True).values).double()
        return nearest / nearest.sum(1, keepdim=True)
    points = shares.double() - d / (2 * alpha)
    return torch.stack([simplex_projection(row) for row in points])


def proportions(counts: Sequence[float]) -> Tensor:
    """Return p (n,) from numbers of examples; uniform where there are none."""
    found = torch.tensor(counts, dtype=torch.float64)
    return found / found.sum() if float(found.sum()) else torch.full_like(found, 1 / len(found))


def neighbours(models: Sequence[Weights], row: Tensor, keys: Iterable[str]) -> Weights:
    """Return u_i = sum_j w_ij theta_j / ‖theta_j‖ over the parameters."""
    keys = list(keys)
    norms = [float(sum(m[k].double().square().sum() for k in keys)) ** 0.5 for m in models]
    scaled = [w / norm if norm else 0.0 for w, norm in zip(row.tolist(), norms, strict=True)]
    return {
        key: sum((s * m[key].double() for s, m in zip(scaled, models, strict=True))).float()  # type: ignore[union-attr]
        for key in keys
    }


def likeness(net: nn.Module, reference: Mapping[str, Tensor]) -> Tensor:
    """Return ``<u_i, theta> / ‖theta‖``: the mean of cosines with the neighbours (eq. 5)."""
    theta = dict(net.named_parameters())
    product = inner_product(theta.values(), [reference[k.replace(".", "/", 1)] for k in theta])
    squares = squared_norm(theta.values())
    return product / squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt()  # of no weights: 0


@register("pfedgraph")
class PFedGraph(FedAvg):
    """Each client gets a mean weighted towards clients whose updates are like its own."""

    citation: ClassVar[str] = "Ye et al., ICML 2023"
    takes_targets: ClassVar[bool] = False
    takes_frozen: ClassVar[bool] = False
    takes_means: ClassVar[bool] = False
    views: ClassVar[tuple[str, ...]] = ("after_local", "after_downlink")
    reduction: ClassVar[Reduction] = "each"

    alpha: NonNegative = 0.8
    """How much the data shares count against likeness; 0 is likeness alone."""
    lam: NonNegative = 0.01
    """Weight of the likeness to the neighbours in the local loss."""
    similarity: Literal["all", "head"] = "all"
    """Parameters that are compared."""
    official_sign: bool = False
    """Repel, as all official ports do by their sign, instead of attract, as the paper says."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        return ServerState(Bundle())

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        first = Bundle(ctx.run.initial_weights)  # of one that never trained
        return state.common, {c: state.clients.get(c, first) for c in ctx.cohort}

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        near = {key: run.forms[key] for key in parameter_keys(run.make_net())}
        later = BundleSpec.of(Bundle(under(NEIGHBOURS, near))).required  # from round 1 on
        return BundleSpec(), BundleSpec(BundleSpec.of(Bundle(run.forms)).required, later)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        if not uploads:
            return state
        models, net = [u.weights for u in uploads.values()], ctx.run.make_net()
        compared = parameter_keys(net, "head/" if self.similarity == "head" else "")
        d = distances(models, ctx.run.initial_weights, compared)
        shares = proportions([self.count(upload) for upload in uploads.values()])
        graph = collaboration_graph(d, shares, self.alpha)  # eq. 3
        clients, every = dict(state.clients), parameter_keys(net)
        for client, row in zip(uploads, graph, strict=True):
            near = under(NEIGHBOURS, neighbours(models, row, every))  # u_i
            clients[client] = Bundle({**mix(models, row), **near})  # eq. 4
        return ServerState(state.common, Bundle({ROWS: graph}), clients)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        return state, graph_metrics(ctx, state.own.weights[ROWS], uploads) if uploads else {}

    # --- client half ---------------------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, without(payload.weights, NEIGHBOURS))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Weights | None:
        return _neighbours_in(ctx, payload)

    def grown(self, run: RunFacts, state: Bundle) -> Weights:
        """Return the neighbours' means, which say nothing of a new class, and the graph's rows."""
        near = part_of(state.weights, NEIGHBOURS)
        kept = under(NEIGHBOURS, {key: padded(t, run.forms[key].shape) for key, t in near.items()})
        rows = {key: t for key, t in state.weights.items() if key == ROWS}  # of clients
        return under("weights", {**kept, **rows})

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Weights | None) -> Tensor:
        plain = super().loss(ctx, batch, out, refs)
        if refs is None or not self.lam:
            return plain
        sign = 1 if self.official_sign else -1
        return plain + sign * self.lam * likeness(ctx.net, refs)  # eq. 5


@dataclass(frozen=True)
class ReplayReferences:
    """References of the loss in one interaction."""

    replay: Rehearsal
    neighbours: Weights | None  # u_i


@register("pfedgraph-replay")
class PFedGraphReplay(PFedGraph):
    """pFedGraph with class replay; no alignment."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2, baseline"
    tells_classes: ClassVar[bool] = True
    trains_on: ClassVar[TrainsOn] = "replay"

    replay: Replay = field(default_factory=Replay)
    """How generated examples are made, chosen and used."""

    def reported(self, run: RunFacts) -> frozenset[str]:
        return reported_by_replay(run)

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return nothing_met(run)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Any:
        replay = self.replay.of(ctx.run).prepared(ctx, state)
        return ReplayReferences(replay, _neighbours_in(ctx, payload))

    def training_data(self, ctx: ClientContext, refs: ReplayReferences) -> tuple[Tensor, Tensor]:
        return refs.replay.training_data()

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        return super().loss(ctx, batch, out, refs.neighbours)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: ReplayReferences) -> Bundle:
        return self.replay.of(ctx.run).kept(ctx, state, refs.replay)

    def pictures(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
    ) -> Mapping[str, Picture]:
        """Return images that the client's generators draw."""
        return self.replay.of(ctx.run).pictures(ctx, state)


def _neighbours_in(ctx: ClientContext, payload: Bundle) -> Weights | None:
    """Return u_i in what a client was sent; None in round 0."""
    near = part_of(payload.weights, NEIGHBOURS)
    return {key: t.to(ctx.device) for key, t in near.items()} or None
