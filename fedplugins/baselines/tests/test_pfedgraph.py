"""pFedGraph: the graph in closed form, its limits, and the pull towards the neighbours."""

import numpy as np
import pytest
import torch
from torch import nn

from fedmodels.nets.split import SplitNet
from fedmodels.techniques.collaboration import graph_metrics, square
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import START, ServerContext
from fedmodels.training.hooks import as_uploads
from fedmodels.training.run import RunFacts
from fedplugins.baselines.pfedgraph import (
    collaboration_graph,
    distances,
    likeness,
    neighbours,
    proportions,
)
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, method_of, payload_of, tiny_experiment


def random_problem(n, seed=0):
    rng = np.random.default_rng(seed)
    d = torch.tensor(rng.uniform(-1, 1, (n, n)))
    p = torch.tensor(rng.dirichlet(np.ones(n)))
    return d, p


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("alpha", [0.1, 0.8, 5.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_closed_form_is_the_best_on_a_grid(n, alpha, seed):
    d, p = random_problem(n, seed)
    rows = collaboration_graph(d, p, alpha)
    steps = np.linspace(0, 1, 201)
    if n == 2:
        grid = np.array([[a, 1 - a] for a in steps])
    else:
        grid = np.array([[a, b, 1 - a - b] for a in steps for b in steps if a + b <= 1 + 1e-9])
    for i in range(n):
        values = grid @ d[i].numpy() + alpha * ((grid - p.numpy()) ** 2).sum(1)
        mine = float(rows[i] @ d[i] + alpha * (rows[i] - p).square().sum())
        assert mine <= values.min() + 1e-9
        assert mine >= values.min() - 0.05


def test_rows_are_on_the_simplex():
    rows = collaboration_graph(*random_problem(6), 0.05)
    assert float(rows.min()) >= 0
    torch.testing.assert_close(rows.sum(1), torch.ones(6, dtype=torch.float64))


def test_large_alpha_is_the_data_shares():
    d, p = random_problem(5)
    torch.testing.assert_close(collaboration_graph(d, p, 1e12), p.expand(5, 5), rtol=0, atol=1e-9)
    torch.testing.assert_close(collaboration_graph(torch.full((5, 5), 0.3), p, 0.8), p.expand(5, 5))


def test_alpha_zero_is_the_nearest():
    """d_ii = -1 always; near duplicates are at -1 too and share."""
    d = torch.tensor([[-1.0, 0.2, -1.0], [0.2, -1.0, 0.1], [-1.0, 0.1, -1.0]])
    expected = [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]]
    assert collaboration_graph(d, torch.full((3,), 1 / 3), 0).tolist() == expected
    small = collaboration_graph(d, torch.full((3,), 1 / 3), 1e-6)
    torch.testing.assert_close(
        small, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0
    )


def test_distances_by_hand():
    """Moves (1, 0), (0, 2) and (3, 1): cosines 0, 3/√10 = .948683 > .9 -> -1, 1/√10."""
    start = {"base/w": torch.tensor([1.0, 1.0])}
    models = [{"base/w": start["base/w"] + torch.tensor(m)} for m in ([1.0, 0], [0, 2.0], [3.0, 1])]
    d = distances(models, start, ["base/w"])
    expected = [[-1, 0, -1], [0, -1, -0.316228], [-1, -0.316228, -1]]
    torch.testing.assert_close(d, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_model_that_did_not_move_is_like_nobody():
    start = {"w": torch.zeros(2)}
    d = distances([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], start, ["w"])
    assert d.tolist() == [[-1, 0], [0, -1]]


def test_likeness_is_the_weighted_mean_of_cosines():
    net = SplitNet(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), 2)
    keys = ["base/weight", "head/weight"]
    torch.manual_seed(0)
    models = [{k: torch.randn(2, 2) for k in keys} for _ in range(3)]
    row = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    own = torch.cat([p.detach().flatten() for p in net.parameters()])
    flats = [torch.cat([m[k].flatten() for k in keys]) for m in models]
    cosines = [float(torch.cosine_similarity(own, f, dim=0)) for f in flats]
    expected = sum(w * c for w, c in zip(row.tolist(), cosines, strict=True))
    reference = neighbours(models, row, keys)
    assert float(likeness(net, reference).detach()) == pytest.approx(expected, rel=1e-5)


def test_likeness_of_a_net_of_zeros_is_a_number_with_a_gradient():
    net = nn.Linear(2, 2)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    found = likeness(net, {key.replace(".", "/", 1): p + 1 for key, p in net.named_parameters()})
    found.backward()
    assert float(found.detach()) == 0
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters())


def uploads_of(run, moves):
    start = run.initial_weights
    return {
        c: Bundle(
            weights={k: t + move if t.is_floating_point() else t for k, t in start.items()},
            scalars={"num_examples": n},
        )
        for c, (move, n) in moves.items()
    }


@pytest.mark.parametrize("method", [{}, {"similarity": "head"}, {"weighting": "uniform"}])
def test_large_alpha_gives_everybody_the_fedavg_model(method):
    run = RunFacts(
        tiny_experiment(method={"name": "pfedgraph", "alpha": 1e12, **method}),
        Problem((1, 8, 8), 10),
    )
    plain = {"weighting": method.get("weighting", "examples")}
    graph = method_of(run.experiment)
    mean = method_of(tiny_experiment(method={"name": "fedavg", **plain}))
    uploads = uploads_of(run, {0: (1.0, 10.0), 1: (-2.0, 30.0), 2: (0.5, 0.0)})
    ctx = ServerContext(run, START, (0, 1, 2))
    mine = graph.aggregate(ctx, graph.init_server(run), as_uploads(graph, uploads))
    theirs = mean.aggregate(ctx, mean.init_server(run), as_uploads(mean, uploads)).common.weights
    for client in range(3):
        for key, tensor in theirs.items():
            torch.testing.assert_close(mine.clients[client].weights[key], tensor)


def test_absent_clients_keep_their_model():
    run = RunFacts(tiny_experiment(method={"name": "pfedgraph"}), Problem((1, 8, 8), 10))
    method, ctx = method_of(run.experiment), ServerContext(run, START, (0, 1))
    first = method.aggregate(
        ctx,
        method.init_server(run),
        as_uploads(method, uploads_of(run, {0: (1.0, 5.0), 1: (2.0, 5.0)})),
    )
    second = method.aggregate(
        ctx, first, as_uploads(method, uploads_of(run, {1: (-1.0, 5.0), 2: (3.0, 5.0)}))
    )
    assert second.clients[0] is first.clients[0]
    assert second.clients[1] is not first.clients[1]
    _, metrics = method.finish(ctx, second, as_uploads(method, {1: Bundle(), 2: Bundle()}))
    matrix = ctx.series["aggregation_weights"]
    assert matrix[0] == [0, 0, 0]
    assert sum(matrix[1]) == pytest.approx(1, abs=1e-5)
    assert 0 <= metrics["weights_entropy"] <= 1


@pytest.mark.parametrize(("official", "closer"), [(False, True), (True, False)])
def test_the_sign_attracts_or_repels(official, closer, digits):
    """One more step of the term alone changes the cosine in its direction."""
    experiment = tiny_experiment(
        method={"name": "pfedgraph", "lam": 1e3, "official_sign": official},
        training={"lr": 1e-6, "batch_size": 64},
    )
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    keys = [k.replace(".", "/", 1) for k, _ in ctx.net.named_parameters()]
    torch.manual_seed(0)
    other = {f"neighbours/{k}": torch.randn(payload.weights[k].shape) for k in keys}
    payload = Bundle(weights={**payload.weights, **other})
    method.load(ctx, payload, state)
    refs = method.prepare(ctx, payload, state)
    before = float(likeness(ctx.net, refs).detach())
    method.fit(ctx, *ctx.stream.train(0), refs)
    after = float(likeness(ctx.net, refs).detach())
    assert (after > before) == closer


def test_round_zero_is_fedavgs_local_training(digits):
    results = {}
    for name in ("pfedgraph", "fedavg"):
        experiment = tiny_experiment(method={"name": name})
        method, ctx = method_of(experiment), context_of(experiment, digits)
        payload, state = payload_of(experiment, ctx)
        method.load(ctx, payload, state)
        refs = method.prepare(ctx, payload, state)
        assert refs is None
        method.fit(ctx, *ctx.stream.train(0), refs)
        results[name] = [p.detach().clone() for p in ctx.net.parameters()]
    for mine, theirs in zip(*results.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_without_pull_and_with_large_alpha_a_run_is_fedavg(digits, tmp_path):
    """Every client then holds FedAvg's global model."""
    runs = {}
    for method in ({"name": "pfedgraph", "lam": 0.0, "alpha": 1e12}, {"name": "fedavg"}):
        out = tmp_path / method["name"]
        runs[method["name"]] = run_in_process(tiny_experiment(method=method), digits, out)[
            "metrics"
        ]
    assert runs["pfedgraph"]["a_loc"] == pytest.approx(runs["fedavg"]["a_glo"], abs=0.02)


def test_shares():
    assert proportions([1.0, 3.0]).tolist() == [0.25, 0.75]
    assert proportions([0.0, 0.0]).tolist() == [0.5, 0.5]


def test_matrix_of_a_cohort():
    rows = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert square(rows, [0, 2], 3) == [[0.25, 0, 0.75], [0, 0, 0], [1.0, 0, 0.0]]


@pytest.mark.parametrize(("clients", "size"), [(200, 200), (201, 2)])
def test_a_record_of_many_clients_holds_the_weights_of_its_cohort(clients, size):
    experiment = tiny_experiment(schedule={"clients": clients})
    ctx = ServerContext(RunFacts(experiment, Problem((1, 8, 8), 10)), START, (3, 7))
    found = graph_metrics(ctx, torch.tensor([[0.25, 0.75], [1.0, 0.0]]), (3, 7))
    assert found["weights_self"] == 0.125
    matrix = ctx.series["aggregation_weights"]
    assert {len(row) for row in matrix} == {len(matrix)} == {size}
    row = matrix[3 if size > 2 else 0]
    assert [value for value in row if value] == [0.25, 0.75]
