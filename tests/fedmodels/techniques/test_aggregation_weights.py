"""Aggregation weights: the gradient, the search, and what never may get worse."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedmodels.methods import make
from fedmodels.nets import make_net
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.randomness import generator, seeded
from fedmodels.techniques.aggregation_weights import (
    LearnedWeights,
    Mixer,
    WeightSearch,
    entropy,
    find_all,
    find_weights,
    with_entropy,
)

SHAPE, CLASSES = (1, 8, 8), 4


def build(name="mlp", seed=0):
    options = {"hidden": [12]} if name == "mlp" else {}
    with seeded(seed):
        return make_net(name, num_classes=CLASSES, input_shape=SHAPE, **options)


def models_of(n, name="mlp"):
    found = []
    for seed in range(n):
        net = build(name, seed)
        for key, buffer in net.named_buffers():  # clients' statistics differ
            if buffer.is_floating_point():
                noise = torch.rand(buffer.shape, generator=generator(seed + len(key)))
                buffer.add_(noise)
        found.append(weights_of(net))
    return found


def examples(m=40, seed=9):
    g = generator(seed)
    return torch.randn(m, *SHAPE, generator=g), torch.randint(CLASSES, (m,), generator=g)


def plain_gradient(net, models, w, x, y):
    """dL/dw by autograd through the stacked models; buffers take no gradient."""
    w = w.clone().requires_grad_()
    parameters = {k for k, _ in net.named_parameters()}
    tensors = {}
    for key in dict(net.state_dict()):
        stack = torch.stack([m[key.replace(".", "/", 1)] for m in models])
        if key in parameters:
            tensors[key] = torch.tensordot(w, stack, 1)
        elif stack.is_floating_point():
            tensors[key] = torch.tensordot(w.detach(), stack, 1)
        else:
            tensors[key] = stack.amax(0)
    loss = cross_entropy(functional_call(net, tensors, x), y)
    (gradient,) = torch.autograd.grad(loss, w)
    return float(loss.detach()), gradient


@pytest.mark.parametrize("name", ["mlp", "resnet20"])
def test_gradient_is_that_of_autograd_through_all_models(name):
    models, (x, y) = models_of(3, name), examples()
    w = torch.tensor([0.5, 0.2, 0.3])
    loss, gradient = Mixer(build(name), models).gradient(w, x, y)
    plain_loss, plain = plain_gradient(build(name).eval(), models, w, x, y)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=1e-5)


def test_gradients_do_not_pile_up():
    mixer, (x, y) = Mixer(build(), models_of(3)), examples()
    w = torch.full((3,), 1 / 3)
    first = mixer.gradient(w, x, y)[1].clone()
    mixer.gradient(torch.tensor([1.0, 0.0, 0.0]), x, y)
    assert torch.equal(mixer.gradient(w, x, y)[1], first)


def test_a_single_weight_is_that_model():
    models, (x, y) = models_of(3, "resnet20"), examples()
    net = build("resnet20")
    load_weights(net, models[1])
    alone = float(cross_entropy(net.eval()(x), y).detach())
    mixer = Mixer(build("resnet20"), models)
    assert mixer.loss(torch.tensor([0.0, 1.0, 0.0]), (x, y)) == pytest.approx(alone, rel=1e-6)


def test_card_example_of_two_scalar_models():
    """theta = (1, 3), squared loss to 2.5. At a = 0: w = (.5, .5), L = .25, dL/d(mixed) = -1.

    So dL/dw = (-1, -3) and, through the softmax, dL/da = (.5, -.5); a step of size 1 gives
    w = softmax(-.5, .5) = (.268941, .731059) and L = .001435.
    """
    theta = torch.tensor([1.0, 3.0], dtype=torch.float64)
    a = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    w = a.softmax(0)
    slope = 2 * (float(w.detach() @ theta) - 2.5) * theta
    w.backward(slope)
    assert a.grad.tolist() == pytest.approx([0.5, -0.5])
    w = (a - a.grad).detach().softmax(0)
    assert w.tolist() == pytest.approx([0.268941, 0.731059], abs=1e-6)
    assert float((w @ theta - 2.5) ** 2) == pytest.approx(0.001435, abs=1e-6)


@pytest.mark.parametrize("init", ["uniform", "self"])
def test_weights_are_on_the_simplex_and_never_worse_than_uniform(init):
    mixer, data = Mixer(build(), models_of(4)), examples()
    search = LearnedWeights(w_epochs=5, w_lr=0.05, w_init=init, w_batch=16)
    found = find_weights(mixer, data, 2, search, seed=1)
    assert float(found.w.sum()) == pytest.approx(1, abs=1e-9)
    assert float(found.w.min()) >= 0
    assert found.loss <= found.uniform
    uniform = torch.full((4,), 0.25)
    assert found.uniform == pytest.approx(mixer.loss(uniform, data), rel=1e-6)
    assert found.loss == pytest.approx(mixer.loss(found.w.float(), data), rel=1e-6)


def test_problems_solved_side_by_side_are_those_solved_alone():
    """Bit for bit, in their order, whatever the number of threads."""
    models, search = models_of(4, "resnet20"), LearnedWeights(w_epochs=2, w_lr=0.05, w_batch=16)
    data = [examples(), examples(24), examples(8), examples(16), examples(0)]
    problems = [WeightSearch(each, own % 4, own) for own, each in enumerate(data)]
    found = [
        find_all(Mixer(build("resnet20"), models), problems, search, threads) for threads in (1, 3)
    ]
    alone = [
        find_weights(Mixer(build("resnet20"), models), p.examples, p.own, search, p.seed)
        for p in problems
    ]
    for one, other, expected in zip(*found, alone, strict=True):
        assert torch.equal(one.w, other.w)
        assert torch.equal(one.w, expected.w)
        assert one.loss == other.loss or one.loss != one.loss


class Uphill(Mixer):
    def gradient(self, w, x, y):
        loss, slope = super().gradient(w, x, y)
        return loss, -slope


def test_a_search_that_only_gets_worse_keeps_uniform_weights():
    mixer, data = Uphill(build(), models_of(3)), examples()
    found = find_weights(mixer, data, 0, LearnedWeights(w_lr=5.0, w_epochs=3), seed=1)
    assert found.w.tolist() == pytest.approx([1 / 3] * 3)
    assert found.loss == found.uniform


def test_weights_go_to_the_model_that_learned():
    """Property 2: all but one of the models are random."""
    x, y = examples(80)
    y = (x.flatten(1)[:, 0] > 0).long() + 2 * (x.flatten(1)[:, 1] > 0).long()
    net = build()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    models = models_of(3)
    models.insert(1, weights_of(net))
    found = find_weights(
        Mixer(build(), models), (x, y), 0, LearnedWeights(w_lr=0.1, w_epochs=40), seed=0
    )
    assert int(found.w.argmax()) == 1
    assert float(found.w[1]) > 0.8


def test_one_client_has_weight_one():
    found = find_weights(Mixer(build(), models_of(1)), examples(), 0, LearnedWeights(), seed=0)
    assert found.w.tolist() == [1.0]


def test_without_examples_weights_are_uniform():
    found = find_weights(Mixer(build(), models_of(4)), examples(0), 0, LearnedWeights(), seed=0)
    assert found.w.tolist() == [0.25] * 4
    assert math.isnan(found.loss)


def test_identical_models_leave_the_loss_as_it_is():
    models, data = models_of(1, "resnet20") * 4, examples()
    mixer = Mixer(build("resnet20"), models)
    losses = [
        mixer.loss(torch.tensor(w), data)
        for w in ([1.0, 0.0, 0.0, 0.0], [0.25] * 4, [0.1, 0.2, 0.3, 0.4])
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_the_search_repeats():
    found = [
        find_weights(
            Mixer(build(), models_of(3)), examples(), 0, LearnedWeights(w_epochs=3), seed=5
        ).w
        for _ in range(2)
    ]
    assert torch.equal(*found)


def test_probabilities_can_stand_for_labels():
    x, y = examples()
    soft = nn.functional.one_hot(y, CLASSES).float()
    mixer, w = Mixer(build(), models_of(2)), torch.tensor([0.3, 0.7])
    hard, plain = mixer.gradient(w, x, y)
    other, gradient = mixer.gradient(w, x, soft)
    assert float(other) == pytest.approx(float(hard), rel=1e-6)
    torch.testing.assert_close(gradient, plain)


def test_entropy():
    assert entropy(torch.full((5,), 0.2)) == pytest.approx(1)
    assert entropy(torch.tensor([0.0, 1.0, 0.0])) == 0
    assert entropy(torch.tensor([1.0])) == 0


@pytest.mark.parametrize("floor", [0.2, 0.7, 1.0])
def test_entropy_floor(floor):
    sharp = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    raised = with_entropy(sharp, floor)
    assert entropy(raised) == pytest.approx(floor, abs=1e-6)
    assert float(raised.sum()) == pytest.approx(1)
    even = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    assert torch.equal(with_entropy(even, 0.5), even)


def test_the_floor_holds_for_what_is_found():
    mixer, data = Mixer(build(), models_of(3)), examples()
    search = LearnedWeights(w_lr=1.0, w_epochs=5, w_init="self", w_entropy_floor=0.9)
    found = find_weights(mixer, data, 0, search, seed=0)
    assert entropy(found.w) >= 0.9 - 1e-6
    assert found.loss <= found.uniform


def test_what_pfedgrps_paper_leaves_open_reaches_the_search():
    learned = make("pfedgrp", w_epochs=7, w_lr=0.2, w_batch=5, w_init="self", w_entropy_floor=0.3)
    assert learned.learned == LearnedWeights(
        w_epochs=7, w_lr=0.2, w_batch=5, w_init="self", w_entropy_floor=0.3
    )
    assert make("pfedgrp").learned == LearnedWeights()
