"""CReFF by hand, and what its paper promises."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedmodels.errors import ConfigError
from fedmodels.nets.split import SplitNet
from fedmodels.tensors.archive import load_named
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.training.contexts import Position, ServerContext
from fedmodels.training.hooks import as_uploads
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedplugins.baselines.creff import class_gradients, cosines
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, method_of, payload_of, tiny_experiment

QUICK = {"name": "creff", "match_steps": 4, "crt_epochs": 2, "num_features": 5}
RETRAINED = ("retrained/weight", "retrained/bias")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def committed(out):
    return load_named(max((out / "server").glob("state-*.safetensors")))[0]


def server(method, classes=4, **more):
    experiment = tiny_experiment(method={**QUICK, **more})
    run = RunFacts(experiment, Problem((1, 8, 8), classes))
    return method_of(experiment), ServerContext(run, Position(3, 0, 0), (0, 1))


def reporting(rows, width, weights):
    """Return an upload with these class gradients, {k: vector}."""
    gradient = Prototypes.of({k: (v, 7) for k, v in rows.items()}, width)
    return Bundle(weights, {"gradient": gradient}, scalars={"num_examples": 7.0})


# --- gradients ------------------------------------------------------------------------------------


def test_gradient_of_one_example():
    """W = 0, b = (0, ln 3): p = (1/4, 3/4); class 0 at z = (1, 2): (p - e_0) z = (-3/4, 3/4) z."""
    z, bias = torch.tensor([[[1.0, 2.0]]]), torch.tensor([0.0, math.log(3)])
    found = class_gradients(z, torch.tensor([0]), torch.zeros(2, 2), bias)
    expected = torch.tensor([[[-0.75, -1.5, -0.75], [0.75, 1.5, 0.75]]])
    torch.testing.assert_close(found, expected)


def test_gradients_are_those_of_autograd():
    weight, bias = drawn(4, 3).requires_grad_(True), drawn(4, seed=1).requires_grad_(True)
    z = drawn(2, 5, 3, seed=2)
    found = class_gradients(z, torch.tensor([1, 3]), weight.detach(), bias.detach())
    for row, k in enumerate((1, 3)):
        loss = cross_entropy(z[row] @ weight.T + bias, torch.full((5,), k))
        of_weight, of_bias = torch.autograd.grad(loss, (weight, bias))
        torch.testing.assert_close(found[row, :, :-1], of_weight)
        torch.testing.assert_close(found[row, :, -1], of_bias)


def test_distance_is_over_rows_of_the_matrix_and_the_bias():
    """Rows (1,0) and (0,1) against (0,1) and (0,2): 1 + 0; biases (1,1) against (-1,-1): 2."""
    found = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]])
    wanted = torch.tensor([[[0.0, 1.0, -1.0], [0.0, 2.0, -1.0]]])
    assert float((1 - cosines(found, wanted)[0]).sum()) == pytest.approx(3.0, abs=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e-8])
def test_features_move_down_the_distance_as_autograd_says(size):
    """Gradients of 1e-8 are below what a cosine divides by."""
    method, _ = server("creff", match_steps=1, lr_feature=0.5)
    weight, bias = (size * drawn(4, 16)).double(), drawn(4, seed=1).double()
    features, wanted = drawn(4, 5, 16, seed=2).double(), drawn(2, 4, 17, seed=3).double()
    z = (size * features[[0, 3]]).requires_grad_(True)
    found = class_gradients(z, torch.tensor([0, 3]), weight, bias)
    of_rows = 1 - cosine_similarity(found[..., :-1], wanted[..., :-1], -1, eps=1e-6)
    of_bias = 1 - cosine_similarity(found[..., -1], wanted[..., -1], -1, eps=1e-6)
    (slope,) = torch.autograd.grad(of_rows.sum() + of_bias.sum(), z)
    given = dict(zip((0, 3), wanted, strict=True))
    moved, cosine = method._match(size * features, given, weight, bias)
    torch.testing.assert_close(moved[[0, 3]], (z - 0.5 * slope).detach())
    assert cosine == pytest.approx(1 - (of_rows.sum() + of_bias.sum()).detach().item() / 10)
    assert torch.equal(moved[[1, 2]], size * features[[1, 2]])


def test_client_reports_gradients_of_its_classes(digits):
    """At the received extractor in evaluation mode, and at the re-trained head, before training."""
    experiment = tiny_experiment(method={**QUICK, "gradient_batch": 1000}, net="resnet20")
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    other = {RETRAINED[0]: drawn(10, 64), RETRAINED[1]: drawn(10, seed=1)}
    payload = Bundle(weights={**payload.weights, **other})
    upload = train_locally(method, ctx, payload, state).upload
    x, y = ctx.stream.train(0)
    method.load(ctx, payload, state)
    ctx.net.eval()
    rows = upload.prototypes["gradient"].rows()
    assert sorted(rows) == y.unique().tolist()
    for k, (row, count) in rows.items():
        z = ctx.net.features(x[y == k]).detach()
        expected = class_gradients(z[None], torch.tensor([k]), *other.values())
        torch.testing.assert_close(row, expected.flatten(), atol=1e-5, rtol=1e-4)
        assert count == int((y == k).sum())


def test_bytes_of_the_gradients(digits):
    """C (K d + K) floats, and two integers for each of C classes; K = 10, d = 16."""
    experiment = tiny_experiment(method=QUICK)
    ctx = context_of(experiment, digits)
    upload = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx)).upload
    classes = len(upload.prototypes["gradient"].labels)
    sent = Bundle(prototypes=upload.prototypes).num_bytes()
    assert sent == classes * (4 * (10 * 16 + 10) + 8)
    payload = payload_of(experiment, ctx)[0]
    model = Bundle(weights=ctx.run.initial_weights).num_bytes()
    assert payload.num_bytes() == model + 4 * (10 * 16 + 10)


# --- the server -----------------------------------------------------------------------------------


def test_features_that_match_are_at_no_distance():
    method, _ = server("creff", lr_feature=0.0, match_steps=1)
    weight, bias = drawn(4, 16), drawn(4, seed=1)
    features = drawn(4, 5, 16, seed=2)
    wanted = class_gradients(features[[1, 2]], torch.tensor([1, 2]), weight, bias)
    _, cosine = method._match(features, dict(zip((1, 2), wanted, strict=True)), weight, bias)
    assert cosine == pytest.approx(1.0, abs=1e-5)


def test_small_steps_never_increase_the_distance():
    weight, bias, features = drawn(4, 16), drawn(4, seed=1), drawn(4, 5, 16, seed=2)
    wanted = {k: drawn(4, 17, seed=3 + k) for k in (0, 3)}
    after = [
        server("creff", match_steps=n, lr_feature=0.01)[0]._match(features, wanted, weight, bias)[1]
        for n in (1, 5, 20, 60)
    ]
    assert after == sorted(after)
    assert after[-1] > after[0]


def test_features_of_classes_nobody_reports_stay(digits):
    method, ctx = server("creff")
    state = method.init_server(ctx.run)
    uploads = {0: reporting({2: drawn(4 * 17)}, 68, ctx.run.initial_weights)}
    after, metrics = method.finish(
        ctx, method.aggregate(ctx, state, as_uploads(method, uploads)), as_uploads(method, uploads)
    )
    before, now = state.own.weights["features"], after.own.weights["features"]
    assert torch.equal(now[[0, 1, 3]], before[[0, 1, 3]])
    assert not torch.equal(now[2], before[2])
    assert after.own.weights["known"].tolist() == [False, False, True, False]
    assert -1 <= metrics["gradient_cosine"] <= 1


def test_gradients_are_averaged_over_those_who_hold_the_class():
    method, _ = server("creff")
    a, b = torch.ones(68), torch.full((68,), 3.0)
    uploads = {0: reporting({1: a, 2: a}, 68, {}), 1: reporting({1: b}, 68, {})}
    found = method._mean_gradients(as_uploads(method, uploads), torch.zeros(4, 16))
    assert sorted(found) == [1, 2]
    assert torch.equal(found[1], torch.full((4, 17), 2.0))
    assert torch.equal(found[2], torch.ones(4, 17))


def test_unknown_classes_take_no_part_in_re_training():
    known = torch.tensor([True, False, True, False])
    features = drawn(4, 5, 16)
    other = features.clone()
    other[[1, 3]] = 100.0
    for mask in (True, False):
        method, ctx = server("creff", mask_unknown=mask)
        same = torch.equal(
            method._retrained(ctx, features, known)[0], method._retrained(ctx, other, known)[0]
        )
        assert same == mask


@pytest.mark.parametrize(("each", "known"), [(5, [0, 1, 2, 3]), (1, [2])])
def test_re_training_is_sgd(each, known):
    """One batch of everything for three epochs: the steps of autograd from the same fresh head."""
    method, ctx = server("creff", crt_epochs=0, lr_net=0.5, crt_batch_size=100)
    features, labels = drawn(4, each, 16), torch.tensor(known).repeat_interleave(each)
    is_known = torch.zeros(4, dtype=torch.bool).index_fill(0, torch.tensor(known), True)
    fresh = method._retrained(ctx, features, is_known)
    weight, bias = (t.clone().requires_grad_(True) for t in fresh)
    optimizer = torch.optim.SGD([weight, bias], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(features[known].flatten(0, 1) @ weight.T + bias, labels).backward()
        optimizer.step()
    found = replace(method, crt_epochs=3)._retrained(ctx, features, is_known)
    torch.testing.assert_close(found, (weight.detach(), bias.detach()), atol=1e-5, rtol=1e-4)


def test_the_trained_model_is_fedavgs(digits, tmp_path):
    """Bit for bit, whatever the server half does; the head that predicts is another one."""
    run_in_process(tiny_experiment(method="fedavg"), digits, tmp_path / "fedavg")
    run_in_process(tiny_experiment(method=QUICK), digits, tmp_path / "creff")
    expected = committed(tmp_path / "fedavg")["common"].weights
    found = committed(tmp_path / "creff")
    for name, tensor in expected.items():
        assert torch.equal(found["common"].weights[name], tensor), name
    assert not torch.equal(found["common"].weights[RETRAINED[0]], expected["head/weight"])
    assert found["own"].weights["features"].shape == (10, 5, 16)


def test_the_global_model_predicts_with_the_re_trained_head(digits):
    experiment = tiny_experiment(method=QUICK)
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    head = {RETRAINED[0]: drawn(10, 16), RETRAINED[1]: drawn(10, seed=1)}
    payload = Bundle(weights={**payload.weights, **head})
    method.load(ctx, payload, state)
    assert torch.equal(ctx.net.head.weight, payload.weights["head/weight"])
    method.load(replace(ctx, view="global"), payload, Bundle())
    assert torch.equal(ctx.net.head.weight, head[RETRAINED[0]])
    assert torch.equal(ctx.net.head.bias, head[RETRAINED[1]])


def test_head_must_be_linear(monkeypatch):
    deep = SplitNet(nn.Flatten(), nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4)), 64)
    monkeypatch.setattr("fedmodels.training.run.make_net", lambda *_, **__: deep)
    method, ctx = server("creff")
    with pytest.raises(ConfigError, match="whose head is one linear layer, unlike 'mlp'"):
        method.init_server(ctx.run)
