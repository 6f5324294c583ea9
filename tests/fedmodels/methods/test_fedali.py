"""FedAli: what travels, how the server clusters prototypes, and what a client starts from.

The alignment layer itself is tested in ``tests/fedmodels/nets/test_alp.py``.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.nets.alp import ALP, alp_layers
from fedmodels.nets.split import weights_of
from fedmodels.numerics.neighbour_clustering import (
    _assign,
    _nearest,
    _neighbours,
    cluster_near,
    cluster_sets,
)
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.training.asked import reported
from fedmodels.training.contexts import START, Position, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedsrv.engine.summary import run_metrics
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, method_of, payload_of, records_of, tiny_experiment

NET = {"name": "vit-tiny", "mlp_ratio": 1, "blocks": 2, "alp": True, "prototypes": [16, 8]}
HAR = Problem((128, 6), 6)
SOLVERS = pytest.mark.parametrize("solver", ["lloyd", "neighbours", "torch"])


ONE_ROUND = {"schedule": {"rounds": 1}}
"""One interaction for each of two tasks."""


def aligned(method=None, alignment=None, **tables):
    net = {**NET, "alignment": alignment} if alignment else NET
    return tiny_experiment(net=net, method={"name": "fedali", **(method or {})}, **tables)


def server_state(rows):
    return ServerState(
        Bundle({"base/w": torch.zeros(1)}, {"alp/0": Prototypes.by_position(torch.tensor(rows))})
    )


def upload_of(rows, n):
    vectors = Prototypes.by_position(torch.as_tensor(rows))
    return Bundle({"base/w": torch.ones(1)}, {"alp/0": vectors}, scalars={"num_examples": float(n)})


def clustered(method, *uploads):
    """Return the rows (G, d) that the server makes of one block's uploads."""
    ctx = ServerContext(RunFacts(aligned(), HAR), START, tuple(range(len(uploads))))
    by_client = dict(enumerate(uploads))
    start = server_state(uploads[0].prototypes["alp/0"].vectors.tolist())
    uploads = as_uploads(method, by_client)
    reduced = method.aggregate(ctx, start, uploads)
    return method.finish(ctx, reduced, uploads)[0].common.prototypes["alp/0"].vectors


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=1e-6)


def test_clients_tell_how_much_prototypes_change_their_tokens(digits):
    """By block, where asked; in round 0 nothing, as alignment is off; weights stay as trained."""
    told, silent = (
        aligned(alignment={"beta": 0.5}, evaluate={"influence": influence})
        for influence in (True, False)
    )
    method, first, later = method_of(told), context_of(told, digits), context_of(told, digits)
    unasked = context_of(silent, digits)
    later.at = unasked.at = Position(1, 1, 0)
    uploads = [
        train_locally(method, ctx, *payload_of(ctx.run.experiment, ctx)).upload
        for ctx in (first, later, unasked)
    ]
    assert first.metrics.keys() == later.metrics.keys() == reported(method, first.run)
    assert not unasked.metrics
    assert not reported(method, unasked.run)
    for name, one, other in zip(uploads[1].weights, *map(values, uploads[1:]), strict=True):
        assert torch.equal(one, other), name
    for block, rows in uploads[1].prototypes.items():
        assert torch.equal(rows.vectors, uploads[2].prototypes[block].vectors)
    assert [first.metrics[f"prototype_share_{block}"] for block in (0, 1)] == [0, 0]
    for block in (0, 1):
        assert 0.05 < later.metrics[f"prototype_share_{block}"] < 0.95
        assert 1 < later.metrics[f"prototype_angle_{block}"] < 180


def values(upload):
    return upload.weights.values()


# --- what travels ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("wire", "num_bytes"), [("one", 10_658_936), ("both", 13_755_512)])
def test_bytes_of_the_paper(wire, num_bytes):
    """HART, 6 classes: weights and gates 1,890,590 floats, a set of prototypes 774,144.

    4 (1,890,590 + 774,144) = 10,658,936, and 3,096,576 more for the second set: 1.843 and 2.378
    times FedAvg's 5,783,672. An upload holds n_c too, of 8 bytes.
    """
    experiment = tiny_experiment(
        net={"name": "hart", "alp": True}, method={"name": "fedali", "wire_prototypes": wire}
    )
    run, method = RunFacts(experiment, HAR), method_of(experiment)
    common, personal = method.broadcast(ServerContext(run, START, (0,)), method.init_server(run))
    assert common.num_bytes() == num_bytes
    assert personal == {}
    assert method.payload_spec(run)[0].max_bytes == num_bytes
    assert method.upload_spec(run).max_bytes == num_bytes + 8
    plain = tiny_experiment(net="hart")
    fedavg = method_of(plain).init_server(RunFacts(plain, HAR)).common.num_bytes()
    assert fedavg == 5_783_672
    assert round(num_bytes / fedavg, 3) == {"one": 1.843, "both": 2.378}[wire]


def test_the_upload_holds_local_prototypes_and_no_buffer_twice(digits):
    experiment = aligned(alignment={"gamma": 0.5})
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    result = train_locally(method_of(experiment), ctx, payload, state)
    assert not [name for name in result.upload.weights if "prototypes" in name]
    assert [p.vectors.shape[0] for p in result.upload.prototypes.values()] == [16, 8]
    for block, layer in enumerate(alp_layers(ctx.net)):
        sent = result.upload.prototypes[f"alp/{block}"].vectors
        assert torch.equal(sent, layer.local_prototypes)
        received = payload.prototypes[f"alp/{block}"].vectors
        assert torch.equal(layer.global_prototypes, received)
        assert not torch.equal(sent, received)
    assert result.state == Bundle()


def test_one_set_and_both_sets_end_alike(digits, tmp_path):
    one = run_in_process(aligned(**ONE_ROUND), digits, tmp_path / "one")
    both = run_in_process(
        aligned({"wire_prototypes": "both"}, **ONE_ROUND), digits, tmp_path / "both"
    )
    assert one["state_sha256"] == both["state_sha256"]
    assert one["metrics"] == both["metrics"]
    more = 2 * 3 * 4 * 192 * (16 + 8)  # interactions, clients, bytes, floats
    assert both["bytes"]["up"] - one["bytes"]["up"] == more
    assert both["bytes"]["down"] - one["bytes"]["down"] == more


@pytest.mark.parametrize("net", ["mlp", {"name": "vit-tiny", "blocks": 1}])
def test_a_net_without_alignment_is_refused(net):
    experiment = tiny_experiment(net=net, method="fedali")
    with pytest.raises(ConfigError, match="alp = true"):
        method_of(experiment).init_server(RunFacts(experiment, Problem((1, 8, 8), 10)))


# --- the server's clusters ------------------------------------------------------------------------

ANCHOR = (
    upload_of([[0.0, 0], [4, 0]], 30),
    upload_of([[0.0, 2], [6, 0]], 10),
)


@SOLVERS
def test_clusters_of_the_card(solver):
    """fedali.md, anchor 4: the weighted mean (0, .5), (4.5, 0) only begins; points are equal."""
    close(clustered(make("fedali", kmeans_solver=solver), *ANCHOR), [[0.0, 1.0], [5.0, 0.0]])


def test_without_clusters_the_weighted_mean_stays():
    close(clustered(make("fedali", aggregate_prototypes="fedavg"), *ANCHOR), [[0, 0.5], [4.5, 0]])


@SOLVERS
def test_an_empty_cluster_is_filled_again(solver):
    """fedali.md, anchor 5: both rows begin at (2.1, 0)."""
    uploads = upload_of([[0.0, 0], [4, 0]], 5), upload_of([[4.2, 0], [0.2, 0]], 5)
    rows = clustered(make("fedali", kmeans_solver=solver), *uploads)
    close(rows[rows[:, 0].argsort()], [[0.1, 0.0], [4.1, 0.0]])


@SOLVERS
def test_equal_prototypes_come_out_as_themselves(solver):
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    found = clustered(make("fedali", kmeans_solver=solver), *(upload_of(rows, n) for n in (3, 9)))
    assert torch.equal(found, rows)


@SOLVERS
def test_one_client_gives_its_prototypes(solver):
    rows = torch.tensor([[1.0, 2], [1, 2], [3, 4]])  # two of them equal
    assert torch.equal(clustered(make("fedali", kmeans_solver=solver), upload_of(rows, 4)), rows)


def test_a_client_without_examples_has_no_part():
    method = make("fedali")
    nobody = upload_of([[100.0, 100], [-100, -100]], 0)
    assert torch.equal(clustered(method, *ANCHOR, nobody), clustered(method, *ANCHOR))
    ctx, start = ServerContext(RunFacts(aligned(), HAR), START, (0,)), server_state([[1.0, 1]])
    nobody = {0: upload_of([[5.0, 5]], 0)}
    assert method.aggregate(ctx, start, as_uploads(method, nobody)) is start
    assert method.finish(ctx, start, as_uploads(method, nobody))[0] is start


@SOLVERS
def test_the_order_of_clients_does_not_matter(solver):
    noise = torch.Generator().manual_seed(1)
    uploads = [upload_of(torch.randn(8, 3, generator=noise), n) for n in (5, 7, 9)]
    method = make("fedali", kmeans_solver=solver)
    torch.testing.assert_close(clustered(method, *uploads), clustered(method, *uploads[::-1]))


@settings(max_examples=25)
@given(data=st.data(), solver=st.sampled_from(["lloyd", "neighbours", "torch"]))
def test_no_row_is_lost(data, solver):
    """Whatever comes, equal rows included, G finite rows come out, within what came in."""
    count, clients = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    cells = st.integers(-2, 2).map(float)
    rows = st.lists(st.tuples(cells, cells), min_size=count, max_size=count)
    uploads = [upload_of(data.draw(rows), data.draw(st.integers(1, 9))) for _ in range(clients)]
    found = clustered(make("fedali", kmeans_solver=solver, kmeans_neighbours=2), *uploads)
    assert found.shape == (count, 2)
    assert torch.isfinite(found).all()
    assert found.abs().max() <= 2


def test_moved_prototypes_are_counted(digits, tmp_path):
    run_in_process(aligned(alignment={"gamma": 0.1}), digits, tmp_path / "out")
    rows = records_of(tmp_path / "out")
    assert all(0 <= row["metrics"]["prototypes_moved"] <= 1 for row in rows)
    assert rows[-1]["metrics"]["prototypes_moved"] > 0


# --- near clusters --------------------------------------------------------------------------------


def scattered(count=40, clients=5, spread=0.2):
    noise = torch.Generator().manual_seed(2)
    common = torch.randn(count, 8, generator=noise)
    moved = [common + spread * torch.randn(count, 8, generator=noise) for _ in range(clients)]
    return moved, torch.stack(moved).mean(0)


def fit_of(points, centres, labels):
    return float(
        sum((p - centres[own]).square().sum() for p, own in zip(points, labels, strict=True))
    )


@pytest.mark.parametrize("neighbours", [40, None])
@pytest.mark.parametrize("spread", [0.2, 1.0])
def test_with_all_neighbours_it_is_lloyds(spread, neighbours):
    points, start = scattered(spread=spread)
    near, _ = cluster_near(points, start, neighbours=neighbours)
    exact, _ = cluster_sets(points, start, "lloyd", neighbours=16, max_iter=300)
    torch.testing.assert_close(near, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({"kmeans_solver": "neighbours", "kmeans_neighbours": 1}, [[4.5], [10.5]]),
        ({"kmeans_solver": "neighbours", "kmeans_neighbours": 2}, [[0.0], [10.0]]),
        ({"kmeans_solver": "torch", "kmeans_neighbours": 1}, [[0.0], [10.0]]),
    ],
    ids=str,
)
def test_only_neighbours_are_compared(switches, expected):
    """Rows of mean 4.5 and 10.5; the point 9 of the first is nearer to the second."""
    uploads = upload_of([[0.0], [10.0]], 5), upload_of([[9.0], [11.0]], 5)
    close(clustered(make("fedali", **switches), *uploads), expected)


def test_a_row_is_its_own_neighbour_even_among_equal_ones():
    centres = torch.tensor([[0.0], [0.0], [0.0], [9.0], [10.0], [12.0]])
    assert _neighbours(centres, 1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert _neighbours(centres, 2)[3:].tolist() == [[3, 4], [3, 4], [4, 5]]


def test_distances_to_the_nearest_are_those_of_all_pairs():
    """They say which point fills an empty cluster."""
    points, centres = scattered(spread=1.0)
    x, labels = torch.cat(points), torch.arange(40).repeat(5)
    squared = torch.cdist(x, centres).square()
    for found in (_nearest(x, centres), _assign(x, labels, centres, _neighbours(centres, 40))):
        assert torch.equal(found[0], squared.argmin(1))
        torch.testing.assert_close(found[1], squared.min(1).values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("neighbours", [1, 4, 16])
def test_no_iteration_fits_worse(neighbours):
    points, start = scattered(spread=1.0)
    found = [cluster_near(points, start, neighbours=neighbours, max_iter=n) for n in range(1, 6)]
    fits = [fit_of(points, *one) for one in found]
    assert all(later <= earlier + 1e-3 for earlier, later in pairwise(fits))


# --- the client -----------------------------------------------------------------------------------


def betas(net):
    return [layer.beta for layer in alp_layers(net)]


@pytest.mark.parametrize(("given", "expected"), [(0.0, 0.0), ("same", 0.3), (0.1, 0.1)])
def test_beta_of_the_first_round(digits, given, expected):
    experiment = aligned({"round0_beta": given}, {"beta": 0.3})
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    train_locally(method, ctx, payload, state)
    assert betas(ctx.net) == [expected] * 2  # and so the client's own model is scored
    method.load(replace(ctx, view="global"), payload, Bundle())
    assert betas(ctx.net) == [0.3] * 2
    ctx.at = Position(0, 1, 0)
    train_locally(method, ctx, payload, state)
    assert betas(ctx.net) == [0.3] * 2


def test_a_round_without_influence_is_fedavg(digits):
    """beta = 0 and frozen prototypes: the weights move as those of FedAvg on the same net."""
    fedali = aligned(alignment={"gamma": 1.0})
    fedavg = tiny_experiment(net={**NET, "alignment": {"beta": 0.0, "gamma": 1.0}})
    uploads = []
    for experiment in (fedali, fedavg):
        ctx = context_of(experiment, digits)
        result = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
        uploads.append(result.upload)
    for name, tensor in uploads[0].weights.items():
        assert torch.equal(tensor, uploads[1].weights[name]), name
    start = payload_of(fedali, context_of(fedali, digits))[0].prototypes["alp/0"].vectors
    assert torch.equal(uploads[0].prototypes["alp/0"].vectors, start)


def test_one_moving_average_a_step(digits, monkeypatch):
    steps = []
    update = ALP._update_local
    monkeypatch.setattr(
        ALP, "_update_local", lambda self, *a: (steps.append(self), update(self, *a))
    )
    experiment = aligned(training={"local_epochs": 2, "batch_size": 16})
    ctx = context_of(experiment, digits)
    result = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
    assert len(steps) == 2 * 2 * -(-result.num_examples // 16)  # layers, epochs, batches


def test_prototypes_start_again_from_the_global_ones(digits):
    experiment = aligned(alignment={"gamma": 0.5})
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    result = train_locally(method, ctx, payload, state)
    method.load(ctx, payload, result.state)
    for block, layer in enumerate(alp_layers(ctx.net)):
        assert torch.equal(layer.local_prototypes, payload.prototypes[f"alp/{block}"].vectors)


def test_prototypes_that_are_kept(digits):
    experiment = aligned({"keep_personal_prototypes": True}, {"gamma": 0.5})
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    assert state == Bundle()
    result = train_locally(method, ctx, payload, state)
    kept = [layer.local_prototypes.clone() for layer in alp_layers(ctx.net)]
    assert len(result.state.weights) == 2
    assert all(name.endswith("local_prototypes") for name in result.state.weights)
    method.load(ctx, payload, result.state)
    for block, layer in enumerate(alp_layers(ctx.net)):
        assert torch.equal(layer.local_prototypes, kept[block])
        assert torch.equal(layer.global_prototypes, payload.prototypes[f"alp/{block}"].vectors)
    method.load(replace(ctx, view="global"), payload, Bundle())
    assert torch.equal(alp_layers(ctx.net)[0].local_prototypes, payload.prototypes["alp/0"].vectors)
    assert "after_downlink" in method.views


def test_scoring_changes_no_prototype(digits):
    experiment = aligned()
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method.load(replace(ctx, view="global"), payload, Bundle())
    ctx.net.eval()
    before = weights_of(ctx.net)
    with torch.no_grad():
        method.predict(ctx, payload, state, ctx.stream.test(0)[0])
    after = weights_of(ctx.net)
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- the evaluation -------------------------------------------------------------------------------


def test_views_of_the_paper(digits, tmp_path):
    """Clients' models on their own and on everyone's test data, the server's on everyone's."""
    experiment = aligned(evaluate={"generalization": True, "batch_size": 32}, **ONE_ROUND)
    summary = run_in_process(experiment, digits, tmp_path / "out", evaluator=True)
    for name in ("personalization", "generalization"):
        assert {name, f"{name}_std", f"best_{name}"} <= summary["metrics"].keys()
    assert {"global_f1", "best_global_f1", "best_a_glo_balanced"} <= summary["metrics"].keys()


ROUNDS = [
    {"personalization": 0.5, "a_loc_trained": 0.9, "generalization": 0.3, "global_f1": 0.4},
    {"personalization": 0.7, "a_loc_trained": 0.8, "generalization": 0.2, "global_f1": 0.6},
    {"personalization": 0.7, "a_loc_trained": 0.9, "generalization": 0.1, "global_f1": 0.5},
]


@pytest.mark.parametrize(
    ("select_by", "expected"),
    [
        ("f1", (0.7, 0.2, 0.6)),
        ("accuracy", (0.5, 0.3, 0.4)),
    ],
)
def test_the_best_round(select_by, expected):
    """By F1 round 1, by accuracy round 0, the earlier of two equals; the last round beside it."""
    accuracies = [0.9, 0.8, 0.7]
    records = [
        {"round": i, "task": 0, "metrics": {**m, "a_loc": 0.0, "a_glo_balanced": acc}}
        for i, (m, acc) in enumerate(zip(ROUNDS, accuracies, strict=True))
    ]
    experiment = aligned(evaluate={"select_by": select_by})
    found = run_metrics(records, experiment, "after_local")
    names = ("personalization", "generalization", "global_f1")
    assert tuple(found[f"best_{name}"] for name in names) == expected
    assert [found[name] for name in names] == [0.7, 0.1, 0.5]
