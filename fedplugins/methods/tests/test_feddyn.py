import pytest
import torch

from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import START, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment

RAY = torch.tensor([[1.0], [-1.0]])
HEAD, GRADIENT = "head/weight", "gradient/head/weight"


def test_two_clients_by_hand():
    """One full-batch step of lr 1 from theta = 0, alpha = 1/2, of two of m = 3 clients.

    All matrices are a multiple of (1, -1). Client 0 has x = 1, y = 0: theta_0 = 1/2, and
    grad L_0 = -alpha / 2 = -1/4. Client 1 has x = 2, y = 1: theta_1 = -1, grad L_1 = 1/2. The mean
    is -1/4; h = -alpha 2/3 (-1/4) = 1/12; theta = -1/4 - 2 / 12 = -5/12.
    Then client 0 steps from theta: its gradient is -(1 - sigmoid(2 theta)) + 1/4 = -.447059, so
    theta_0 = .030393 and grad L_0 = -1/4 - (.030393 + 5/12) / 2 = -.473530.
    """
    training = {"local_epochs": 1, "batch_size": 100, "lr": 1.0}
    experiment = tiny_experiment(method={"name": "feddyn", "alpha": 0.5}, training=training)
    method, uploads, states = method_of(experiment), {}, {}
    for client, (x, y) in enumerate([([[1.0]], [0]), ([[2.0]] * 3, [1] * 3)]):
        ctx = linear_context(experiment, x, y, client)
        payload = Bundle(weights_of(ctx.net))
        result = train_locally(method, ctx, payload, Bundle({GRADIENT: torch.zeros(2, 1)}))
        uploads[client], states[client] = result.upload, result.state
    assert [s.weights[GRADIENT].flatten().tolist() for s in states.values()] == [
        [-0.25, 0.25],
        [0.5, -0.5],
    ]
    run = RunFacts(experiment, Problem((1,), 2))
    before = ServerState(payload, own=Bundle({HEAD: torch.zeros(2, 1)}))
    after, _ = reduce(
        method, ServerContext(run, START, (0, 1)), before, as_uploads(method, uploads)
    )
    assert after.own.weights[HEAD][0].item() == pytest.approx(1 / 12)
    assert after.common.weights[HEAD].flatten().tolist() == pytest.approx([-5 / 12, 5 / 12])
    again = linear_context(experiment, [[1.0]], [0])
    result = train_locally(method, again, after.common, states[0])
    assert result.upload.weights[HEAD][0].item() == pytest.approx(0.030393, abs=1e-5)
    assert result.state.weights[GRADIENT][0].item() == pytest.approx(-0.473530, abs=1e-5)


@pytest.mark.parametrize("came", [{"stands_for": (0, 1)}, {"stands_for": (0,), "expected": 2}])
@pytest.mark.parametrize("name", ["feddyn", "scaffold"])
def test_an_upload_that_stands_for_clients_counts_all_of_them(name, came):
    """Two of m = 3. By ones, h moves by -alpha 2/3, and SCAFFOLD's c by 2/3."""
    experiment = tiny_experiment(method=name)
    run, method, ones = RunFacts(experiment, Problem((1,), 2)), method_of(experiment), RAY * 0 + 1
    run.__dict__.update(forms={HEAD: RAY}, parameters=(HEAD,), initial_weights={HEAD: RAY * 0})
    state, control = method.init_server(run), f"control/{HEAD}"
    sent = {HEAD: ones, **({control: ones} if name == "scaffold" else {})}
    upload = Bundle(sent, scalars={"num_examples": 1.0})
    uploads = Uploads({0: upload}, lambda _: 1.0, "mean", **came)
    after = reduce(method, ServerContext(run, START, (0, 1)), state, uploads)[0]
    moved = after.common.weights[control] if name == "scaffold" else -100 * after.own.weights[HEAD]
    assert moved.flatten().tolist() == pytest.approx([2 / 3, 2 / 3])


def test_the_kept_gradient_is_the_sum_of_all_moves(digits):
    """grad L_k = -alpha sum (theta_k - theta): after two trainings from one payload, both count."""
    experiment = tiny_experiment(method={"name": "feddyn", "alpha": 0.1})
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    moves = {key: torch.zeros_like(payload.weights[key]) for key in ctx.run.parameters}
    for _ in range(2):
        result = train_locally(method_of(experiment), ctx, payload, state)
        state = result.state
        moves = {k: m + result.upload.weights[k] - payload.weights[k] for k, m in moves.items()}
    for key, moved in moves.items():
        kept = state.weights[f"gradient/{key}"]
        torch.testing.assert_close(kept, -0.1 * moved, rtol=1e-4, atol=1e-7)


def reduced(before, uploads, **tables):
    """Return the state after a round of a net that is one matrix; alpha is 1/2, and m is 3."""
    experiment = tiny_experiment(method={"name": "feddyn", "alpha": 0.5}, **tables)
    run, method = RunFacts(experiment, Problem((1,), 2)), method_of(experiment)
    run.__dict__.update(forms=before.common.weights, parameters=(HEAD,))
    ctx = ServerContext(run, START, tuple(uploads))
    return reduce(method, ctx, before, as_uploads(method, uploads))[0]


def test_a_round_in_which_nobody_trained_moves_nothing():
    """P_t is empty: theta has no mean to move from, and -h / alpha is not counted once more."""
    ray = torch.tensor([[1.0], [-1.0]])
    before = ServerState(Bundle({HEAD: ray}), own=Bundle({HEAD: ray}))
    idle = Bundle({HEAD: 3 * ray}, scalars={"num_examples": 0.0})
    for uploads in ({}, {0: idle}):
        after = reduced(before, uploads)
        assert torch.equal(after.common.weights[HEAD], ray)
        assert torch.equal(after.own.weights[HEAD], ray)


def test_a_server_optimizer_leaves_h_alone():
    """From theta = 0 two clients come to 1/2 and -1: h = 1/12, as without it. FedAvgM's step of
    lr 1/10 goes to -1/40, and -2 / 12 is taken off."""
    ray, nothing = torch.tensor([[1.0], [-1.0]]), torch.zeros(2, 1)
    before = ServerState(Bundle({HEAD: nothing}), own=Bundle({HEAD: nothing}))
    one = {"num_examples": 1.0}
    sent = {0: Bundle({HEAD: ray / 2}, scalars=one), 1: Bundle({HEAD: -ray}, scalars=one)}
    after = reduced(before, sent, server_optimizer={"name": "fedavgm", "lr": 0.1})
    assert after.own.weights[HEAD][0].item() == pytest.approx(1 / 12)
    assert after.common.weights[HEAD][0].item() == pytest.approx(-1 / 40 - 1 / 6)
