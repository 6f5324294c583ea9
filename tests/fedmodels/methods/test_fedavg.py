import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import START, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment

RUN = RunFacts(tiny_experiment(), Problem((1, 8, 8), 10))
ONE_STEP = {"local_epochs": 1, "batch_size": 100, "lr": 1.0}


def upload(num_examples, **weights):
    return Bundle(weights=weights, scalars={"num_examples": float(num_examples)})


def aggregated(uploads, method=None, state=None):
    ctx = ServerContext(RUN, START, tuple(sorted(uploads)))
    state = state or ServerState(Bundle())
    method = method or make("fedavg")
    return method.aggregate(ctx, state, as_uploads(method, uploads)).common.weights


def trained(experiment, x, y, client=0):
    """Return the upload of one interaction that starts from zero weights."""
    ctx = linear_context(experiment, x, y, client)
    return train_locally(method_of(experiment), ctx, Bundle(weights=weights_of(ctx.net)), Bundle())


# --- by hand --------------------------------------------------------------------------------------


def test_two_clients_by_hand():
    """Logits are W x with W (2, 1) zero, so p = (1/2, 1/2) and dCE/dW = (p - onehot(y)) x^T.

    Client 0 has x = 1, y = 0 once:        dW = (-1/2,  1/2),      W_0 = ( 1/2, -1/2)  with lr 1
    Client 1 has x = 2, y = 1 three times: dW = ( 1/2, -1/2) 2,    W_1 = ( -1,    1 )
    n = (1, 3):   W = 1/4 W_0 + 3/4 W_1 = (1/8 - 3/4, …) = (-5/8, 5/8)
    uniform:      W = 1/2 W_0 + 1/2 W_1 = (1/4 - 1/2, …) = (-1/4, 1/4)
    """
    experiment = tiny_experiment(training=ONE_STEP)
    uploads = {
        0: trained(experiment, [[1.0]], [0]).upload,
        1: trained(experiment, [[2.0]] * 3, [1] * 3, client=1).upload,
    }
    key = "head/weight"
    assert uploads[0].weights[key].flatten().tolist() == [0.5, -0.5]
    assert uploads[1].weights[key].flatten().tolist() == [-1.0, 1.0]
    assert [u.scalars for u in uploads.values()] == [{"num_examples": 1.0}, {"num_examples": 3.0}]
    assert aggregated(uploads)[key].flatten().tolist() == [-0.625, 0.625]
    uniform = make("fedavg", weighting="uniform")
    assert aggregated(uploads, uniform)[key].flatten().tolist() == [-0.25, 0.25]
    idle = replace(
        uploads[0], weights={key: uploads[0].weights[key] + 9}, scalars={"num_examples": 0.0}
    )
    for method in (uniform, make("fedavg")):
        without = aggregated(uploads, method)[key]
        assert torch.equal(aggregated({**uploads, 2: idle}, method)[key], without)


def test_aggregate_by_hand():
    """Weights and float buffers: (1 * 1 + 3 * 5) / 4 = 4; counters: the largest."""
    mean = aggregated(
        {
            0: upload(1, w=torch.tensor([1.0, 2.0]), seen=torch.tensor(7)),
            1: upload(3, w=torch.tensor([5.0, 10.0]), seen=torch.tensor(4)),
        }
    )
    assert mean["w"].tolist() == [4.0, 8.0]
    assert mean["seen"].item() == 7
    assert mean["seen"].dtype == torch.int64


# --- properties -----------------------------------------------------------------------------------

FLOATS = st.lists(
    st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=3, max_size=3
).map(torch.tensor)


@given(FLOATS, st.lists(st.integers(1, 1000), min_size=1, max_size=7))
def test_identical_uploads_aggregate_to_themselves(weights, counts):
    mean = aggregated({c: upload(n, w=weights) for c, n in enumerate(counts)})
    assert torch.equal(mean["w"], weights)


@given(
    st.dictionaries(st.integers(0, 50), st.tuples(FLOATS, st.integers(1, 99)), min_size=1),
    st.integers(51, 60),
    FLOATS,
)
def test_client_without_examples_has_no_effect(clients, late, weights):
    uploads = {c: upload(n, w=w) for c, (w, n) in sorted(clients.items())}
    expected = aggregated(uploads)["w"]
    assert torch.equal(aggregated({**uploads, late: upload(0, w=weights)})["w"], expected)


def test_nobody_has_examples():
    state = ServerState(Bundle(weights={"w": torch.ones(2)}))
    found = aggregated(
        {0: upload(0, w=torch.zeros(2)), 1: upload(0, w=torch.zeros(2))}, None, state
    )
    assert torch.equal(found["w"], torch.ones(2))


def test_weights_are_normalised_over_those_that_answered():
    """Of three clients two answered: n is their sum."""
    found = aggregated({0: upload(2, w=torch.zeros(1)), 2: upload(6, w=torch.full((1,), 4.0))})
    assert found["w"].tolist() == [3.0]


# --- against plain torch --------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["mlp", "digits-cnn"])
def test_one_client_is_a_plain_loop(net, digits, tmp_path):
    """One client, one round, plain SGD: the server holds what a loop of five lines gives."""
    experiment = tiny_experiment(
        net=net,
        scenario={"tasks": 1},
        schedule={"rounds": 1, "clients": 1},
        training={"local_epochs": 3, "batch_size": 8},
    )
    ctx = context_of(experiment, digits)
    x, y = ctx.stream.train(0)
    net = ctx.run.make_net()
    sgd = torch.optim.SGD(net.parameters(), lr=experiment.training.lr)
    order = ctx.generator("order")
    for _ in range(3):
        for index in torch.randperm(len(y), generator=order).split(8):
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            sgd.step()
    expected = weights_of(net)
    method, (payload, state) = method_of(experiment), payload_of(experiment, ctx)
    upload = train_locally(method, ctx, payload, state).upload
    server = ServerContext(ctx.run, START, (0,))
    after = method.aggregate(
        server, method.init_server(ctx.run), as_uploads(method, {0: upload})
    ).common.weights
    assert after.keys() == expected.keys()
    for key in expected:
        assert torch.equal(after[key], expected[key]), key


def test_bytes_are_the_weights_both_ways(digits, tmp_path):
    """64 * 16 + 16 + 16 * 10 + 10 floats down; and a float64 more up, for each of 3 * 2 * 2."""
    summary = run_in_process(tiny_experiment(), digits, tmp_path / "out")
    assert summary["bytes"]["down"] == 12 * 1210 * 4
    assert summary["bytes"]["up"] == 12 * (1210 * 4 + 8)


def test_uniform_weighting_differs_where_sizes_do(digits, tmp_path):
    uniform = tiny_experiment(method={"name": "fedavg", "weighting": "uniform"})
    one = run_in_process(tiny_experiment(), digits, tmp_path / "1", arrival=random.Random(1))
    other = run_in_process(uniform, digits, tmp_path / "2")
    assert one["state_sha256"] != other["state_sha256"]
