"""MFCL: each loss by hand, its limits, and what the server keeps and sends."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import SplitNet, load_weights, weights_of
from fedmodels.numerics.randomness import seeded
from fedmodels.parts.pictures import pictures_of
from fedmodels.techniques.continual import columns_of, cross_entropy_among, mask_of
from fedmodels.techniques.datafree import LayerMoments, freeze, shuffle, watch_moments
from fedmodels.techniques.server_memory import KNOWN, OLD, MemoryReferences
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.roles import part_of
from fedmodels.training.hooks import evaluation
from fedmodels.training.loop import EpochLoop
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedplugins.baselines.mfcl import (
    balance,
    confidence,
    smoothness,
    statistics_distance,
)
from fedplugins.baselines.upsampling import Upsampling
from tests.conftest import context_of, linear_context, method_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import NORMED
from tests.interactions import Course, same

SMALL = {
    "latent": 8,
    "generator_width": 4,
    "generator_steps": 4,
    "generator_batch": 8,
    "synthetic_batch": 6,
}
BOTH = torch.tensor([0, 1])


def mfcl(**switches):
    return tiny_experiment(method={"name": "mfcl", **SMALL, **switches})


# --- the server's losses --------------------------------------------------------------------------


def test_confidence_by_hand():
    """Logits (2, 0) over T = 2 are (1, 0); the likeliest is the first: log(1 + e^-1)."""
    assert float(confidence(torch.tensor([[2.0, 0.0]]), 2.0)) == pytest.approx(0.313262, abs=1e-6)


def test_balance_by_hand():
    """Mean prediction (3/4, 1/4): 1 + (.75 log .75 + .25 log .25) / log 2 = .188722."""
    rows = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log().clamp_min(-100)
    assert float(balance(rows)) == pytest.approx(0.188722, abs=1e-6)
    assert float(balance(torch.tensor([[9.0, -9.0], [-9.0, 9.0]]))) == pytest.approx(0, abs=1e-6)
    sure = balance(torch.tensor([[200.0, -200.0]], requires_grad=True))
    assert float(sure.detach()) == pytest.approx(1.0, abs=1e-6)
    sure.backward()  # log p is clamped: no NaN
    assert float(balance(torch.tensor([[3.0]]))) == 0.0  # one class is all there is


def test_statistics_distance_by_hand():
    """KL(N(0, 1) || N(1, 4)) = log 2 - (1 - 2/4)/2 = .443147; equal ones are 0: mean .221574."""
    layer = LayerMoments(*(torch.tensor([v, 0.0]) for v in (1.0, 4.0, 0.0, 1.0)))
    layer.var[1] = layer.running_var[1] = 1.0
    assert float(statistics_distance([layer])) == pytest.approx(0.443147 / 2, abs=1e-4)
    same = LayerMoments(*(torch.ones(2) for _ in range(4)))
    assert float(statistics_distance([layer, same])) == pytest.approx(0.443147 / 4, abs=1e-4)
    assert float(statistics_distance([])) == 0.0  # a net without batch normalisation


def test_smoothness_by_hand():
    """A constant image is its own blur; one bright pixel is not."""
    assert float(smoothness(torch.full((2, 3, 8, 8), 0.7))) == pytest.approx(0.0, abs=1e-12)
    image = torch.zeros(1, 1, 9, 9)
    image[0, 0, 4, 4] = 1.0
    bell = np.exp(-0.5 * np.arange(-2, 3) ** 2)
    kernel = np.outer(bell, bell) / bell.sum() ** 2
    expected = (np.square(kernel).sum() - kernel[2, 2] ** 2 + (1 - kernel[2, 2]) ** 2) / 81
    assert float(smoothness(image)) == pytest.approx(expected, rel=1e-5)


def test_generator_loss_is_what_numpy_says():
    draw = torch.Generator().manual_seed(0)
    x, logits = torch.randn(4, 1, 6, 6, generator=draw), torch.randn(4, 3, generator=draw)
    layer = LayerMoments(*(torch.rand(5, generator=draw) + 0.5 for _ in range(4)))
    method = make("mfcl", t_c=3.0, w_ie=0.5, w_bn=2.0, w_noise=0.25)
    found = float(method._generator_loss(x, logits, [layer]))
    z = logits.double().numpy()
    scaled = z / 3.0
    log_p = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
    confident = -log_p[np.arange(4), z.argmax(1)].mean()
    mean = (np.exp(z) / np.exp(z).sum(1, keepdims=True)).mean(0)
    even = 1 + (mean * np.log(mean)).sum() / math.log(3)
    m, v, rm, rv = (t.double().numpy() for t in vars(layer).values())
    v, rv = v + 1e-5, rv + 1e-5
    match = (np.log(np.sqrt(v / rv)) - 0.5 * (1 - (rv + (rm - m) ** 2) / v)).mean()
    bell = np.exp(-0.5 * np.arange(-2, 3) ** 2)
    kernel = np.outer(bell, bell) / bell.sum() ** 2
    images = x.double().numpy()[:, 0]
    wide = np.pad(images, ((0, 0), (2, 2), (2, 2)), mode="edge")
    blurred = sum(kernel[i, j] * wide[:, i : i + 6, j : j + 6] for i in range(5) for j in range(5))
    expected = confident + 0.5 * even + 2.0 * match + 0.25 * ((images - blurred) ** 2).mean()
    assert found == pytest.approx(expected, rel=1e-5)


def test_statistics_are_taken_before_normalisation():
    """What enters the layer is (1, 3) in one channel: mean 2, variance 1; its weights see nothing
    of it, and a layer in evaluation mode neither."""
    layer = nn.BatchNorm1d(1)
    layer.weight.data.fill_(7.0)
    layer.running_mean.fill_(2.0)
    net = nn.Sequential(nn.Identity(), layer).eval()
    with watch_moments(net) as watch:
        net(torch.tensor([[1.0], [3.0]]))
    (seen,) = watch.layers()
    assert (seen.mean.item(), seen.var.item()) == (2.0, 1.0)
    assert (seen.running_mean.item(), seen.running_var.item()) == (2.0, 1.0)
    assert float(statistics_distance([seen])) == pytest.approx(0.0, abs=1e-6)
    net(torch.tensor([[9.0], [9.0]]))  # nobody watches any more
    assert watch.layers()[0].mean.item() == 2.0


# --- the client's loss ----------------------------------------------------------------------------


def hand_made(w_ft, w_kd):
    """Two classes, of which the second is old: what the three terms are by hand.

    The new head maps z to (z0, z1), the old one to (z1, z0). Real: features (1, 0), label 0.
    Generated: features (0, 2), label 1.
    """
    ctx = linear_context(mfcl(w_ft=w_ft, w_kd=w_kd), [[1.0, 0.0]], [0])
    old = ctx.net.copy().requires_grad_(False).eval()
    with torch.no_grad():
        ctx.net.head.weight.copy_(torch.eye(2))
        old.head.weight.copy_(torch.eye(2).flip(0))
    old_base = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    nn.init.constant_(old_base[1].weight, 0.0)  # the old features are 0 everywhere
    old = SplitNet(old_base, old.head, 2).requires_grad_(False).eval()
    refs = MemoryReferences(torch.tensor([0]), BOTH, torch.tensor([1]), old, lambda: torch.empty(0))
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    batch = Batch(x, torch.tensor([0, 1]), torch.tensor([0, -1]))
    features = x.clone().requires_grad_(True)
    out = Output(features, ctx.net.head(features))
    return method_of(mfcl(w_ft=w_ft, w_kd=w_kd)).loss(ctx, batch, out, refs), features, ctx


def test_loss_by_hand():
    """L_CE: one column, so 0. L_FT: (log(1 + e^-1) + log(1 + e^-2)) / 2 = .220095. L_KD: the old
    head's row of class 1 sees (1, 0) as 1 and (0, 2) as 0, the old features as 0: (1 + 0) / 2."""
    assert hand_made(0.0, 0.0)[0].item() == pytest.approx(0.0, abs=1e-6)
    assert hand_made(1.0, 0.0)[0].item() == pytest.approx(0.220095, abs=1e-6)
    assert hand_made(0.0, 1.0)[0].item() == pytest.approx(0.5, abs=1e-6)
    assert hand_made(2.0, 0.1)[0].item() == pytest.approx(0.490190, abs=1e-6)


def test_fine_tuning_moves_the_head_alone():
    loss, features, ctx = hand_made(1.0, 0.0)
    loss.backward()
    assert not features.grad.any()
    assert ctx.net.head.weight.grad.any()


def test_distillation_leaves_the_heads_alone():
    loss, features, ctx = hand_made(0.0, 1.0)
    loss.backward()
    assert features.grad[0].tolist() == [1.0, 0.0]  # 2 (1 - 0) / 2, through the old row (1, 0)
    assert not ctx.net.head.weight.grad.any()


def test_no_distance_from_equal_features():
    ctx = linear_context(mfcl(), [[1.0, 0.0]], [0])
    old = frozen_copy(ctx.net)
    refs = MemoryReferences(BOTH, BOTH, BOTH, old, lambda: torch.empty(0))
    features = torch.tensor([[1.0, 0.0]])
    batch = Batch(features, torch.tensor([0]), torch.tensor([0]))
    losses = [
        method_of(mfcl(w_kd=w)).loss(ctx, batch, Output(features, ctx.net.head(features)), refs)
        for w in (0.0, 1e6)
    ]
    assert torch.equal(*losses)


def frozen_copy(net):
    return net.copy().requires_grad_(False).eval()


# --- a run ----------------------------------------------------------------------------------------


def test_the_first_task_is_fedavg(digits):
    """Two rounds of one task: there is no memory yet."""
    plain = Course(tiny_experiment(method={"name": "fedavg", "weighting": "uniform"}), digits)
    own = Course(mfcl(), digits)
    for course in (plain, own):
        course.interact(0)
        course.interact(1)
    assert same(dict(plain.state.common.weights), dict(own.state.common.weights))
    assert not own.state.own.generators


@dataclass(frozen=True, kw_only=True)
class Sliced(FedAvg):
    """FedAvg whose loss runs over some columns alone."""

    classes: torch.Tensor

    def loss(self, ctx, batch, out, refs):
        return cross_entropy_among(out.logits, batch.y, self.classes)


def test_without_terms_and_images_it_is_fedavg_over_own_classes(digits):
    """w_ft = w_kd = 0 and nothing generated: what is left is the cross-entropy over the slice."""
    course = Course(mfcl(w_ft=0.0, w_kd=0.0, synthetic_batch=0), digits)
    course.interact(0, ends_task=True)
    before = course.state.common.weights
    course.interact(1, task=1)
    for client, result in course.results.items():
        ctx = context_of(course.experiment, digits, client, 1, 1)
        load_weights(ctx.net, before)
        x, y = ctx.stream.train(1)
        plain = Sliced(classes=columns_of(mask_of(y, 10)))
        EpochLoop(plain, ctx, x, y, None).run()
        assert same(dict(weights_of(ctx.net)), dict(result.upload.weights))


@pytest.mark.parametrize("net", ["mlp", NORMED], ids=["mlp", "normed"])
def test_the_old_model_stays_and_the_generator_goes_on(digits, net):
    """The memory is made from the mean of the task's last round, bit for bit, and is sent until
    the next task ends; the generator of the next task begins where this one's ended."""
    course = Course(tiny_experiment(method={"name": "mfcl", **SMALL}, net=net), digits)
    course.interact(0)
    assert KNOWN not in course.payload(course.server(1), 0).weights
    course.interact(1, ends_task=True)
    state = course.state
    old = part_of(state.own.weights, OLD)
    assert same(dict(state.common.weights), old)
    held = {c for c, n in enumerate(state.own.histogram.total.tolist()) if n}
    assert {c for c, n in enumerate(state.own.weights[KNOWN].tolist()) if n} == held
    assert state.own.generators["any"].version == 1
    assert course.told[-1][:3] == ("generator", 4, 4)
    assert 0 <= course.metrics["generator_spread"] <= 1
    first = course.payload(course.server(2, 1), 0)
    assert not part_of(first.weights, OLD)  # the model that comes is the old one
    course.interact(2, task=1)
    again = course.payload(course.server(3, 1), 0)
    assert same(part_of(again.weights, OLD), old)
    assert same(dict(again.generators["any"].tensors), dict(first.generators["any"].tensors))
    refs = course.refs(3, task=1)
    assert same(dict(weights_of(refs.old)), old)
    assert not refs.old.training
    course.interact(3, task=1, ends_task=True)
    assert course.state.own.generators["any"].version == 2
    assert same(part_of(course.state.own.weights, OLD), dict(course.state.common.weights))


def test_the_generator_goes_on_from_where_it_was(digits):
    """No step: its weights are the ones it had, and running statistics as well."""
    course = Course(mfcl(), digits)
    course.interact(0, ends_task=True)
    before = course.state.own.generators["any"].tensors
    still = replace(course.method, generator_steps=0)
    server, old = course.server(1), freeze(course.run, course.state.common.weights, "cpu")
    memory, _ = still.remember(server, course.state.own, old, torch.ones(10, dtype=torch.bool))
    assert same(dict(before), dict(memory.generators["any"].tensors))


def test_training_the_generator_leaves_the_old_model_alone(digits):
    course = Course(tiny_experiment(method={"name": "mfcl", **SMALL}, net=NORMED), digits)
    old = freeze(course.run, course.run.initial_weights, "cpu")
    before = dict(weights_of(old))
    known = torch.ones(10, dtype=torch.bool)
    memory, _ = course.method.remember(course.server(0), Bundle(), old, known)
    assert same(before, dict(weights_of(old)))
    fresh = Upsampling((1, 8, 8), 8, 4)
    assert memory.generators["any"].tensors.keys() == fresh.state_dict().keys()


def test_generated_labels_are_what_the_old_model_says_of_known_classes(digits):
    course = Course(mfcl(), digits)
    course.interact(0, ends_task=True)
    refs = course.refs(1, task=1)
    known = set(refs.known.tolist())
    x = torch.zeros(2, 1, 8, 8)
    batch = course.method._joined(Batch(x, torch.tensor([9, 9]), torch.tensor([0, 1])), refs)
    assert batch.x.shape == (8, 1, 8, 8)
    assert batch.index.tolist() == [0, 1, *[-1] * 6]
    assert set(batch.y[2:].tolist()) <= known
    logits = refs.old(batch.x[2:])
    logits[:, [k for k in range(10) if k not in known]] = -math.inf
    assert batch.y[2:].tolist() == logits.argmax(1).tolist()


def test_masks_of_clients(digits):
    """The slice is the client's own classes; a grown head would have everybody's."""
    course = Course(mfcl(), digits)
    course.interact(0, ends_task=True)
    labels = course.server(1, 1).labels
    own = course.refs(1, task=1)
    known = set(own.known.tolist())
    assert set(own.current.tolist()) == set(labels[0])
    assert set(own.seen.tolist()) == known | set(labels[0]) | set(labels[1])
    assert known == {c for each in course.server(0).labels.values() for c in each}


def test_nothing_of_the_memory_goes_to_those_who_score(digits):
    course = Course(mfcl(), digits)
    course.interact(0, ends_task=True)
    server = course.server(1, 1)
    common, personal = evaluation(course.method, server, course.state)
    assert not personal
    assert common is course.method.broadcast(server, course.state)[0]
    parts = list(course.method.broadcast(server, course.state)[1].values())
    assert all(part is parts[0] for part in parts)  # encoded once


def test_noise_depends_on_the_client_and_the_interaction(digits):
    course = Course(mfcl(), digits)
    course.interact(0, ends_task=True)
    first, again, other, later = (
        course.refs(number, task=1, client=client).draw()
        for number, client in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, later)


def test_what_is_remembered_can_be_seen(digits):
    course = Course(mfcl(), digits)
    ctx = context_of(course.experiment, digits, 0, 1, 1)
    payloads = [course.payload(course.server(0), 0)]
    course.interact(0, ends_task=True)
    payloads.append(course.payload(course.server(1, 1), 0))
    nothing = torch.zeros(0)
    found = [pictures_of(course.method, ctx, p, Bundle(), nothing, nothing) for p in payloads]
    assert found[0] == {}
    images = found[1]["remembered"].images["any"]
    assert images.shape == (6, 1, 8, 8)
    assert images.min() >= 0
    assert images.max() <= 1


def test_inputs_must_be_images():
    run = RunFacts(mfcl(), Problem((128, 6), 3))
    with pytest.raises(ConfigError, match=r"makes images .* not inputs of shape \[128, 6\]"):
        make("mfcl").init_server(run)


def test_shuffled_batches():
    """Every epoch holds each position at most once; the last, smaller batch is left out."""
    order = shuffle(5, 2, torch.Generator().manual_seed(0))
    found = [next(order).tolist() for _ in range(4)]
    assert all(len(index) == 2 for index in found)
    assert len({*found[0], *found[1]}) == len({*found[2], *found[3]}) == 4
    assert len(next(shuffle(3, 8, torch.Generator()))) == 3


@pytest.mark.parametrize(("shape", "ending"), [((1, 28, 28), "inputs"), ((3, 9, 11), "images")])
def test_images_have_the_size_of_inputs(shape, ending):
    with seeded(0):
        net = Upsampling(shape, 16, 4, ending)
        images = net(torch.randn(6, 16))
    assert images.shape == (6, *shape)
    if ending == "inputs" and shape[1] % 4 == 0:
        assert images.mean().abs() < 1e-4  # the last layer normalises the batch
        assert images.var(correction=0).item() == pytest.approx(1.0, abs=0.02)
    if ending == "images":
        assert images.min() >= 0
        assert images.max() <= 1
