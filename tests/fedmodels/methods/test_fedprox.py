import pytest
import torch

from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import START, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment


def prox(mu, **tables):
    return tiny_experiment(method={"name": "fedprox", "mu": mu}, **tables)


def trained(experiment, root, client=0):
    ctx = context_of(experiment, root, client)
    payload, state = payload_of(experiment, ctx)
    upload = train_locally(method_of(experiment), ctx, payload, state).upload
    return payload.weights, upload.weights


def distance(one, other):
    return sum((one[k].double() - other[k].double()).square().sum() for k in one).sqrt().item()


def test_two_clients_by_hand():
    """Two full-batch steps with lr 1 from W = 0, mu = 1/2; logits are W x, two classes.

    Client 0 has x = 1, y = 0 once. Step 1: p = 1/2, the term's gradient is 0, W = (1/2, -1/2).
    Step 2: logits (1/2, -1/2), p_1 = 1 - sigmoid(1) =: q; dCE = (-q, q), term mu W = (1/4, -1/4);
    W_0 = (1/2 + q - 1/4) (1, -1).
    Client 1 has x = 2, y = 1 three times. Step 1: W = (-1, 1). Step 2: logits (-2, 2),
    p_0 = 1 - sigmoid(4) =: r; dCE = 2 (r, -r), term (-1/2, 1/2); W_1 = (1 + 2 r - 1/2) (-1, 1).
    With n = (1, 3): W = 1/4 W_0 + 3/4 W_1.
    """
    training = {"local_epochs": 2, "batch_size": 100, "lr": 1.0}
    experiment, uploads = prox(0.5, training=training), {}
    for client, (x, y) in enumerate([([[1.0]], [0]), ([[2.0]] * 3, [1] * 3)]):
        ctx = linear_context(experiment, x, y, client)
        payload = Bundle(weights=weights_of(ctx.net))
        uploads[client] = train_locally(method_of(experiment), ctx, payload, Bundle()).upload
    q, r = (1 - torch.sigmoid(torch.tensor([1.0, 4.0], dtype=torch.float64))).tolist()
    one, other = 0.25 + q, -(0.5 + 2 * r)
    close = {"abs": 1e-6}
    assert uploads[0].weights["head/weight"].flatten().tolist() == pytest.approx(
        [one, -one], **close
    )
    assert uploads[1].weights["head/weight"][0].item() == pytest.approx(other, **close)
    ctx = ServerContext(RunFacts(experiment, Problem((1,), 2)), START, (0, 1))
    after = method_of(experiment).aggregate(
        ctx, ServerState(Bundle()), as_uploads(method_of(experiment), uploads)
    )
    expected = one / 4 + 3 * other / 4
    found = after.common.weights["head/weight"].flatten().tolist()
    assert found == pytest.approx([expected, -expected], **close)


def test_mu_zero_is_fedavg(digits, tmp_path):
    """Bit for bit over a whole run, though the term is computed."""
    training = {"local_epochs": 2, "batch_size": 8, "momentum": 0.5, "weight_decay": 1e-3}
    one = run_in_process(prox(0.0, training=training), digits, tmp_path / "prox")
    other = run_in_process(tiny_experiment(training=training), digits, tmp_path / "avg")
    assert one["state_sha256"] == other["state_sha256"]
    assert one["metrics"] == other["metrics"]
    assert one["bytes"] == other["bytes"]


def test_mu_matters(digits, tmp_path):
    one = run_in_process(prox(1.0), digits, tmp_path / "1")
    other = run_in_process(prox(0.0), digits, tmp_path / "0")
    assert one["state_sha256"] != other["state_sha256"]


def test_gradient_of_the_term():
    """mu (w - w^t), by central differences of loss(mu) - loss(0) in float64."""
    experiment = prox(0.7)
    ctx = linear_context(experiment, [[1.0, -2.0], [0.5, 3.0]], [0, 1])
    ctx.net.double()
    rng = torch.Generator().manual_seed(0)
    weight = ctx.net.head.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=rng))
    method, x = method_of(experiment), ctx.stream.x.double()
    refs = method.prepare(ctx, Bundle(), Bundle())
    start = weight.detach().clone()
    batch = Batch(x, ctx.stream.y, torch.arange(2))

    def term():
        out = Output(x, ctx.net.head(x))
        plain = make("fedprox", mu=0.0).loss(ctx, batch, out, refs)
        return method.loss(ctx, batch, out, refs) - plain

    with torch.no_grad():
        assert term().item() == 0
        weight.add_(torch.randn(weight.shape, generator=rng))
    (gradient,) = torch.autograd.grad(term(), weight)
    torch.testing.assert_close(gradient, 0.7 * (weight.detach() - start))
    flat, step = weight.detach().view(-1), 1e-5
    for i in range(len(flat)):
        values = []
        for sign in (1, -1):
            kept = flat[i].item()
            flat[i] = kept + sign * step
            values.append(term().item())
            flat[i] = kept
        found = (values[0] - values[1]) / (2 * step)
        assert found == pytest.approx(gradient.view(-1)[i].item(), rel=1e-6)


def test_first_step_does_not_depend_on_mu(digits):
    training = {"batch_size": 1000}
    results = [trained(prox(mu, training=training), digits)[1] for mu in (0.0, 0.1, 10.0)]
    for other in results[1:]:
        assert all(torch.equal(other[k], results[0][k]) for k in other)


def test_distance_to_the_broadcast_decreases_in_mu(digits):
    training = {"local_epochs": 5, "batch_size": 8}
    distances = [
        distance(*trained(prox(mu, training=training), digits)) for mu in (0.0, 0.1, 1.0, 5.0)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.8 * distances[0]


def test_buffers_are_not_held_back(digits):
    """The term is over parameters; running statistics follow the data whatever mu is."""
    tables = {"net": "resnet20", "training": {"batch_size": 1000}}
    results = [trained(prox(mu, **tables), digits)[1] for mu in (0.0, 10.0)]
    keys = [k for k in results[0] if "running" in k]
    assert keys
    assert all(torch.equal(results[0][k], results[1][k]) for k in keys)


def test_reference_is_the_broadcast_of_this_interaction(digits):
    """Not a copy of an earlier one: from another broadcast, the first step is unaffected too."""
    experiment = prox(10.0, training={"batch_size": 1000})
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method = method_of(experiment)
    train_locally(method, ctx, payload, state)
    moved = Bundle(weights={k: t + 0.1 for k, t in payload.weights.items()})
    held = train_locally(method, ctx, moved, state).upload.weights
    free = train_locally(make("fedprox", mu=0.0), ctx, moved, state).upload.weights
    assert all(torch.equal(held[k], free[k]) for k in held)
