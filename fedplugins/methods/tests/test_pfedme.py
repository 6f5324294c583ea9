import pytest
import torch

from fedmodels.nets.split import weights_of
from fedmodels.tensors.archive import load_named
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import START, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment

HEAD = "head/weight"


def pfedme(training=None, **fields):
    return tiny_experiment(method={"name": "pfedme", **fields}, training=training or {})


def test_two_clients_by_hand():
    """One batch of K = 2 steps of lr 1 from w = 0; lambda = 1/2, eta = 1, beta = 1/2.

    All matrices are a multiple of (1, -1). Client 0 has x = 1, y = 0: theta is 1/2, then with
    q = 1 - sigmoid(1) it is 1/2 + q - lambda / 2 = 1/4 + q. w_0 = eta lambda theta = 1/8 + q / 2.
    Client 1 has x = 2, y = 1: theta is -1, then with r = 1 - sigmoid(4) it is -1 - 2 r + lambda =
    -(1/2 + 2 r). w_1 = -(1/4 + r). Server: w = 1/2 (w_0 + w_1) / 2.
    """
    experiment = pfedme(
        {"lr": 1.0, "batch_size": 100, "local_epochs": 1}, lam=0.5, eta=1.0, inner_steps=2, beta=0.5
    )
    method, uploads, thetas = method_of(experiment), {}, {}
    for client, (x, y) in enumerate([([[1.0]], [0]), ([[2.0]] * 3, [1] * 3)]):
        ctx = linear_context(experiment, x, y, client)
        first = Bundle(weights_of(ctx.net))
        result = train_locally(method, ctx, first, Bundle())
        uploads[client] = result.upload
        thetas[client] = result.state.weights[f"twin/{HEAD}"][0].item()
        assert ctx.net.head.weight[0].item() == thetas[client]  # what the client is scored with
    q, r = (1 - torch.sigmoid(torch.tensor([1.0, 4.0], dtype=torch.float64))).tolist()
    assert thetas[0] == pytest.approx(0.25 + q, abs=1e-6)
    assert thetas[1] == pytest.approx(-(0.5 + 2 * r), abs=1e-6)
    assert uploads[0].weights[HEAD][0].item() == pytest.approx(0.125 + q / 2, abs=1e-6)
    assert uploads[1].weights[HEAD][0].item() == pytest.approx(-(0.25 + r), abs=1e-6)
    run = RunFacts(experiment, Problem((1,), 2))
    run.__dict__["parameters"] = (HEAD,)
    at = ServerContext(run, START, (0, 1))
    after, _ = reduce(method, at, ServerState(first), as_uploads(method, uploads))
    expected = ((0.125 + q / 2) - (0.25 + r)) / 4
    assert after.common.weights[HEAD].flatten().tolist() == pytest.approx(
        [expected, -expected], abs=1e-6
    )


def test_without_pull_the_shared_model_stays(digits, tmp_path):
    experiment = pfedme(lam=0.0)
    run_in_process(experiment, digits, tmp_path)
    common = load_named(max((tmp_path / "server").glob("*.safetensors")))[0]["common"].weights
    first = RunFacts(experiment, Problem((1, 8, 8), 10)).initial_weights
    assert all(torch.equal(common[key], tensor) for key, tensor in first.items())


def test_one_step_that_goes_all_the_way_is_that_of_fedavg(digits):
    """K = 1 and eta lambda = 1 on one batch: theta is a step of SGD, and w is theta."""
    training, found = {"batch_size": 1000, "local_epochs": 1}, []
    plain = {"name": "fedavg", "weighting": "uniform"}
    for experiment in (
        pfedme(training, lam=2.0, eta=0.5, inner_steps=1),
        tiny_experiment(method=plain, training=training),
    ):
        ctx = context_of(experiment, digits)
        payload, state = payload_of(experiment, ctx)
        found.append(train_locally(method_of(experiment), ctx, payload, state).upload.weights)
    for key, tensor in found[1].items():
        torch.testing.assert_close(found[0][key], tensor, atol=1e-7, rtol=1e-6)


def test_a_client_is_scored_with_its_own_model_and_trains_from_everybodys(digits):
    experiment = pfedme()
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method = method_of(experiment)
    result = train_locally(method, ctx, payload, state)
    theta = weights_of(ctx.net)
    ctx.view = "after_downlink"
    method.load(ctx, payload, result.state)
    assert all(torch.equal(t, theta[k]) for k, t in weights_of(ctx.net).items())
    assert not torch.equal(theta[HEAD], result.upload.weights[HEAD])
    ctx.view = ""
    method.load(ctx, payload, result.state)
    assert all(torch.equal(t, payload.weights[k]) for k, t in weights_of(ctx.net).items())
