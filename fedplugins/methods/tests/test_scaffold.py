from dataclasses import replace

import pytest
import torch

from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import START, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment

HEAD, CONTROL = "head/weight", "control/head/weight"


def scaffold(training=None, **fields):
    return tiny_experiment(method={"name": "scaffold", **fields}, training=training or {})


def linear(experiment, x, y, client=0):
    """A linear net, of a run whose parameters are its own."""
    ctx = linear_context(experiment, x, y, client)
    ctx.run.__dict__["parameters"] = (HEAD,)
    return ctx


def test_two_clients_by_hand():
    """Two full-batch steps of lr 1 from x = 0 with c = c_i = 0, eta_g = 1/2, N = 3 clients.

    All matrices are a multiple of (1, -1). Client 0 has x = 1, y = 0: gradients -1/2, then -q with
    q = 1 - sigmoid(1); y_0 = 1/2 + q, c_0+ = -(1/2 + q) / 2. Client 1 has x = 2, y = 1: gradients
    1, then 2 r with r = 1 - sigmoid(4); y_1 = -(1 + 2 r), c_1+ = (1 + 2 r) / 2.
    Server: x = 1/2 (y_0 + y_1) / 2, c = 2/3 (c_0+ + c_1+) / 2.
    Then client 0 makes one step: its gradient is g = -(1 - sigmoid(2 x)), y_0 = x - (g - c_0 + c),
    and its new control variate is g.
    """
    experiment = scaffold({"local_epochs": 2, "batch_size": 100, "lr": 1.0}, server_lr=0.5)
    method, uploads, states = method_of(experiment), {}, {}
    for client, (x, y) in enumerate([([[1.0]], [0]), ([[2.0]] * 3, [1] * 3)]):
        ctx = linear(experiment, x, y, client)
        nothing = {CONTROL: torch.zeros(2, 1)}
        payload = Bundle({**weights_of(ctx.net), **nothing})
        result = train_locally(method, ctx, payload, Bundle(nothing))
        uploads[client], states[client] = result.upload, result.state
    q, r = (1 - torch.sigmoid(torch.tensor([1.0, 4.0], dtype=torch.float64))).tolist()
    own = [-(0.5 + q) / 2, (1 + 2 * r) / 2]
    for client in (0, 1):
        assert states[client].weights[CONTROL].flatten().tolist() == pytest.approx(
            [own[client], -own[client]], abs=1e-6
        )
    run = RunFacts(experiment, Problem((1,), 2))
    run.__dict__["parameters"] = (HEAD,)
    server, _ = reduce(
        method, ServerContext(run, START, (0, 1)), ServerState(payload), as_uploads(method, uploads)
    )
    x, c = ((0.5 + q) - (1 + 2 * r)) / 4, 2 / 3 * sum(own) / 2
    assert server.common.weights[HEAD][0].item() == pytest.approx(x, abs=1e-6)
    assert server.common.weights[CONTROL][0].item() == pytest.approx(c, abs=1e-6)
    once = linear(scaffold({"local_epochs": 1, "lr": 1.0}), [[1.0]], [0])
    result = train_locally(method, once, server.common, states[0])
    g = -(1 - torch.sigmoid(torch.tensor(2 * x)).item())
    assert result.upload.weights[HEAD][0].item() == pytest.approx(x - (g - own[0] + c), abs=1e-6)
    assert result.state.weights[CONTROL][0].item() == pytest.approx(g, abs=1e-6)


def test_the_control_variate_is_option_two_of_the_paper(digits):
    """With plain SGD c_i+ is c_i - c + (x - y_i) / (K eta_l)."""
    experiment = scaffold({"lr": 0.05, "local_epochs": 2, "batch_size": 8})
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    controls = [k for k in payload.weights if k.startswith("control/")]
    assert controls
    draw = torch.Generator().manual_seed(0)
    given = {k: 0.1 * torch.randn(payload.weights[k].shape, generator=draw) for k in controls}
    payload = replace(payload, weights={**payload.weights, **given})
    own = {k: 0.1 * torch.randn(t.shape, generator=draw) for k, t in state.weights.items()}
    result = train_locally(method_of(experiment), ctx, payload, Bundle(own))
    steps = 2 * -(-result.num_examples // 8)
    for key in controls:
        name = key.removeprefix("control/")
        moved = payload.weights[name] - result.upload.weights[name]
        expected = own[key] - given[key] + moved / (steps * 0.05)
        torch.testing.assert_close(result.state.weights[key], expected, atol=1e-5, rtol=1e-4)
        change = result.state.weights[key] - own[key]
        sent = result.upload.weights[key] - given[key]
        torch.testing.assert_close(sent, change, atol=1e-6, rtol=1e-5)


def test_the_first_interaction_is_fedavg(digits):
    """Control variates are nothing then, and the correction is computed all the same."""
    training, found = {"momentum": 0.5, "weight_decay": 1e-3, "batch_size": 8}, []
    for experiment in (scaffold(training), tiny_experiment(training=training)):
        ctx = context_of(experiment, digits)
        result = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
        found.append((result.upload.weights, result.loss))
    assert all(torch.equal(found[0][0][key], tensor) for key, tensor in found[1][0].items())
    assert found[0][1] == found[1][1]


def test_a_client_without_a_step_keeps_its_control_variate(digits):
    experiment = scaffold()
    ctx = linear(experiment, [[1.0]], [0])
    ctx.stream.x, ctx.stream.y = ctx.stream.x[:0], ctx.stream.y[:0]
    payload = Bundle({**weights_of(ctx.net), CONTROL: torch.ones(2, 1)})
    result = train_locally(make("scaffold"), ctx, payload, Bundle({CONTROL: torch.zeros(2, 1)}))
    assert torch.equal(result.state.weights[CONTROL], torch.zeros(2, 1))
    assert torch.equal(result.upload.weights[CONTROL], payload.weights[CONTROL])
    assert make("scaffold").count(result.upload) == 0
