"""pFedGraph's collaboration graph: who learns from whom, from how alike their updates are.

Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs, ICML 2023, eqs. 3-5.
https://proceedings.mlr.press/v202/ye23b.html

    paper       here                        paper       here
    theta_i     uploads[i]                  w_ij        graph[i, j]
    p_j         share of client j           alpha       alpha
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedmodels.config.bounds import NonNegative
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.algebra import padded, simplex_projection
from fedmodels.techniques.aggregation_weights import entropy
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.roles import part_of, under
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.contexts import Metrics, ServerContext, ServerState
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import Part

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


def mix(models: Sequence[Weights], row: Tensor) -> Weights:
    """Return ``sum_j w_ij theta_j``, buffers too; a row of a single 1 returns that model."""
    return weighted_mean(models, row.tolist())


def likeness(net: nn.Module, reference: Mapping[str, Tensor]) -> Tensor:
    """Return ``<u_i, theta> / ‖theta‖``: the mean of cosines with the neighbours (eq. 5)."""
    pairs = [(p, reference[k.replace(".", "/", 1)]) for k, p in net.named_parameters()]
    product = torch.stack([(p * u).sum() for p, u in pairs]).sum()
    squares = torch.stack([p.square().sum() for p, _ in pairs]).sum()
    return product / squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt()  # of no weights: 0


# --- a server that keeps a model for each client --------------------------------------------------

ROWS = "aggregation_weights"
"""Where the server's own state holds the last graph."""
MAX_RECORDED_CLIENTS = 200
"""Clients of a run up to which its records hold the weights of all of them; of more, a record would
grow with their square, and holds those of its cohort."""


def personal_models(
    run: RunFacts, state: ServerState, clients: Iterable[int]
) -> dict[ClientId, Bundle]:
    """Return each client's model; one that never trained gets what everybody starts from."""
    first = Bundle(weights=run.initial_weights)
    return {c: state.clients.get(c, first) for c in clients}


def model_spec(run: RunFacts) -> BundleSpec:
    """Return what a client is sent: its model, and from round 1 on its neighbours' normed mean."""
    keys = parameter_keys(run.make_net())
    near = under(NEIGHBOURS, {key: run.forms[key] for key in keys})
    model = BundleSpec.of(Bundle(weights=run.forms))
    return BundleSpec(model.required, BundleSpec.of(Bundle(weights=near)).required)


def reference_in(weights: Mapping[str, Tensor], device: torch.device) -> Weights | None:
    """Return u_i in what a client was sent; None in round 0."""
    return {k: t.to(device) for k, t in part_of(weights, NEIGHBOURS).items()} or None


def grown_graph(run: RunFacts, state: Bundle) -> Mapping[str, Tensor]:
    """Return what a state holds beside models, with room for one class more.

    Neighbours say nothing of that class, and the graph has rows of clients.
    """
    near = part_of(state.weights, NEIGHBOURS)
    kept = under(NEIGHBOURS, {key: padded(t, run.forms[key].shape) for key, t in near.items()})
    return under("weights", {**kept, **{k: t for k, t in state.weights.items() if k == ROWS}})


@dataclass(frozen=True, kw_only=True)
class Graph(Part):
    """How clients are compared, and how much they learn from each other."""

    alpha: NonNegative = 0.8
    """How much the data shares count against likeness; 0 is likeness alone."""
    lam: NonNegative = 0.01
    """Weight of the likeness to the neighbours in the local loss."""
    similarity: Literal["all", "head"] = "all"
    """Parameters that are compared."""
    official_sign: bool = False
    """Repel, as all official ports do by their sign, instead of attract, as the paper says."""

    def collaborated(
        self,
        ctx: ServerContext,
        state: ServerState,
        uploads: Mapping[int, Bundle],
        count: Callable[[Bundle], float],
    ) -> ServerState:
        """Return the state in which the cohort has its mixtures; other clients keep theirs."""
        if not uploads:
            return state
        models, net = [u.weights for u in uploads.values()], ctx.run.make_net()
        compared = parameter_keys(net, "head/" if self.similarity == "head" else "")
        d = distances(models, ctx.run.initial_weights, compared)
        shares = proportions([count(upload) for upload in uploads.values()])
        graph = collaboration_graph(d, shares, self.alpha)
        clients, every = dict(state.clients), parameter_keys(net)
        for client, row in zip(uploads, graph, strict=True):
            near = under(NEIGHBOURS, neighbours(models, row, every))
            clients[client] = Bundle(weights={**mix(models, row), **near})
        return ServerState(state.common, Bundle(weights={ROWS: graph}), clients)

    def attracted(self, net: SplitNet, plain: Tensor, neighbours: Weights | None) -> Tensor:
        """Return the plain loss with the likeness of the net to its neighbours u_i (eq. 5)."""
        if neighbours is None or not self.lam:
            return plain
        sign = 1 if self.official_sign else -1
        return plain + sign * self.lam * likeness(net, neighbours)


def graph_metrics(ctx: ServerContext, rows: Tensor, clients: Iterable[int]) -> Metrics:
    """Put the weights into the run's series; return how spread out they are."""
    total = ctx.run.experiment.schedule.clients
    ctx.series[ROWS] = (
        square(rows, list(clients), total) if total <= MAX_RECORDED_CLIENTS else round_weights(rows)
    )
    spread = [entropy(row) for row in rows]
    return {
        "weights_entropy": sum(spread) / len(spread),
        "weights_self": float(rows.diagonal().mean()),
    }


def square(rows: Tensor, clients: Sequence[int], total: int) -> list[list[float]]:
    """Return weights (n, n) of a cohort as a matrix of all clients; others have zero rows."""
    out = torch.zeros(total, total, dtype=torch.float64)
    index = torch.tensor(clients, dtype=torch.int64)
    out[index[:, None], index] = rows.double()
    return round_weights(out)


def round_weights(rows: Tensor) -> list[list[float]]:
    """Return weights (n, m) as a record holds them."""
    return [[round(value, 6) for value in row] for row in rows.double().tolist()]
