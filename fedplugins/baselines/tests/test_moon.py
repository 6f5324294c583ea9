"""MOON: its contrastive term by hand, and what its teachers must not do."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.training.loop import train_locally
from fedmodels.training.stepped import Batch, Output
from fedplugins.baselines.moon import Moon
from tests.conftest import context_of, method_of, payload_of, tiny_experiment

LABELS = torch.zeros(1, dtype=torch.int64)

PLAIN = SimpleNamespace(criterion=torch.nn.functional.cross_entropy)
"""What a loss reads of its context."""


def contrastive(z, z_glob, z_prev, **switches):
    """Return the contrastive term of one example."""
    rows = [torch.tensor([row]) for row in (z, z_glob, z_prev)]
    batch = Batch(rows[0], LABELS, LABELS, taught=(rows[1], rows[2]))
    out = Output(rows[0], torch.zeros(1, 2))
    total = make("moon", **switches).loss(PLAIN, batch, out, None)
    return float(total) - math.log(2)  # the cross-entropy of two equal logits


def test_the_term_by_hand():
    """z is the received model's direction and orthogonal to the last one's: cosines 1 and 0.

    -log(e^(1/.5) / (e^(1/.5) + e^0)) = log(1 + e^-2); with mu = 3, three times that.
    """
    one = contrastive([2.0, 0], [5.0, 0], [0, 1.0])
    assert one == pytest.approx(math.log(1 + math.exp(-2)), abs=1e-6)
    three = contrastive([2.0, 0], [5.0, 0], [0, 1.0], mu=3.0)
    assert three == pytest.approx(3 * math.log(1 + math.exp(-2)), abs=1e-6)
    hot = contrastive([2.0, 0], [5.0, 0], [0, 1.0], temperature=1.0)
    assert hot == pytest.approx(math.log(1 + math.exp(-1)), abs=1e-6)


VECTORS = st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=3).filter(
    lambda v: sum(x * x for x in v) > 0.01
)


@given(z=VECTORS, received=VECTORS, previous=VECTORS, temperature=st.sampled_from([0.25, 0.5, 2.0]))
def test_bounds_of_the_term(z, received, previous, temperature):
    value = contrastive(z, received, previous, temperature=temperature)
    low, high = (math.log1p(math.exp(s * 2 / temperature)) for s in (-1, 1))
    assert low - 1e-5 <= value <= high + 1e-5


def test_equal_teachers_pull_nowhere():
    z = torch.tensor([[0.3, -1.2]], requires_grad=True)
    same = torch.tensor([[1.0, 0.5]])
    batch, out = Batch(z, LABELS, LABELS, taught=(same, same)), Output(z, torch.zeros(1, 2))
    Moon().loss(PLAIN, batch, out, None).backward()
    assert z.grad is not None
    assert float(z.grad.abs().max()) < 1e-7


NETS = pytest.mark.parametrize(
    ("net", "augment"),
    [
        ({"name": "mlp", "hidden": [16]}, "none"),
        ({"name": "vit-tiny", "blocks": 1, "dropout": 0.3}, "none"),
        ({"name": "resnet20"}, "crop-flip"),
    ],
)


def trained(digits, method, net, augment="none", interaction=0, last=None):
    training = {"batch_size": 16, "lr": 0.05, "augment": augment}
    experiment = tiny_experiment(method=method, net=net, training=training)
    ctx = context_of(experiment, digits, interaction=interaction)
    payload, state = payload_of(experiment, ctx)
    return train_locally(method_of(experiment), ctx, payload, last or state), ctx


@NETS
def test_without_weight_it_is_fedavg(digits, net, augment):
    """The term is computed all the same: no layer draws differently, no statistic moves."""
    fedavg, _ = trained(digits, {"name": "fedavg"}, net, augment)
    moon, _ = trained(digits, {"name": "moon", "mu": 0.0}, net, augment)
    assert moon.upload.weights.keys() == fedavg.upload.weights.keys()
    for name, tensor in fedavg.upload.weights.items():
        assert torch.equal(tensor, moon.upload.weights[name]), name


@NETS
def test_teachers_do_not_change(digits, net, augment, monkeypatch):
    seen = []

    class Watched(Moon):
        def prepare(self, ctx, payload, state):
            refs = super().prepare(ctx, payload, state)
            seen.append((refs, [weights_of(n) for n in refs]))
            return refs

    experiment = tiny_experiment(
        method="moon", net=net, training={"batch_size": 16, "lr": 0.05, "augment": augment}
    )
    ctx = context_of(experiment, digits)
    train_locally(Watched(), ctx, *payload_of(experiment, ctx))
    refs, before = seen[0]
    for teacher, weights in zip(refs, before, strict=True):
        assert not teacher.training
        for name, tensor in weights_of(teacher).items():
            assert torch.equal(tensor, weights[name]), name


def test_the_last_model_is_kept_and_pushes_away(digits):
    """The state is the base just trained; from another model it changes what is learned."""
    net = {"name": "mlp", "hidden": [16]}
    first, ctx = trained(digits, {"name": "moon"}, net)
    kept = {name: t for name, t in weights_of(ctx.net).items() if name.startswith("base/")}
    assert first.state.weights.keys() == {f"previous/{name}" for name in kept}
    assert all(torch.equal(first.state.weights[f"previous/{k}"], t) for k, t in kept.items())
    plain, _ = trained(digits, {"name": "moon"}, net, interaction=1)
    pushed, _ = trained(digits, {"name": "moon"}, net, interaction=1, last=first.state)
    assert any(
        not torch.equal(plain.upload.weights[k], pushed.upload.weights[k])
        for k in plain.upload.weights
    )


def test_the_first_previous_model(digits):
    """In round 0 the previous and the received model are one: the term is log 2, without pull."""
    net = {"name": "mlp", "hidden": [16]}
    fedavg, _ = trained(digits, {"name": "fedavg"}, net)
    moon, _ = trained(digits, {"name": "moon"}, net)
    assert moon.loss == pytest.approx(fedavg.loss + math.log(2), abs=1e-4)
