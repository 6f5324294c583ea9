"""TARGET: each loss by hand, the synthesis, its presets, and what travels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedmodels.errors import PayloadError
from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.techniques import datafree
from fedmodels.techniques.datafree import (
    LayerMoments,
    MomentWatch,
    as_inputs,
    freeze,
    quantise,
    watch_moments,
)
from fedmodels.techniques.server_memory import KNOWN, MemoryReferences
from fedmodels.tensors.bundle import Bundle, tensor_bytes
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training import optimizer as optimizers
from fedmodels.training.stepped import Batch, Output
from fedplugins.baselines import synthesis as synthesis_module
from fedplugins.baselines.synthesis import (
    Synthesis,
    disagreement,
    distillation,
    follow_moments,
    statistics_distance,
)
from fedplugins.baselines.target import IMAGES
from fedtide.inprocess import transported
from tests.conftest import context_of, linear_context, method_of, tiny_experiment
from tests.interactions import Course, same

SMALL = {
    "latent": 8,
    "generator_width": 4,
    "batches": 2,
    "synthesis_batch": 12,
    "g_steps": 3,
    "kd_steps": 2,
    "num_images": 20,
}


def target(net="mlp", **switches):
    table = {"name": "mlp", "hidden": [16]} if net == "mlp" else net
    return tiny_experiment(method={"name": "target", **SMALL, **switches}, net=table)


def moments(mean, var, running_mean, running_var):
    return LayerMoments(*(torch.tensor(v) for v in (mean, var, running_mean, running_var)))


# --- the server's losses --------------------------------------------------------------------------


def test_statistics_distance_by_hand():
    """Means (3, 4) from (0, 0) are 5 apart, variances (1, 1) from (1, 3) are 2; a second layer's
    equal ones nothing. With moving averages of (1, 0) and (1, 1) at momentum 1/2: means (2, 2)."""
    layer = moments([3.0, 4.0], [1.0, 1.0], [0.0, 0.0], [1.0, 3.0])
    same_layer = moments([1.0], [2.0], [1.0], [2.0])
    assert float(statistics_distance([layer, same_layer], [], 0.9)) == pytest.approx(7.0)
    was = moments([1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 3.0])
    found = float(statistics_distance([layer], [was], 0.5))
    assert found == pytest.approx(8**0.5 + 2.0)
    assert float(statistics_distance([], [], 0.9)) == 0.0


def test_moving_averages_begin_as_the_first_batch():
    """1 stays 1 after itself; then 0.9 times 1 and 0.1 times 3 is 1.2, in means and variances."""
    first = follow_moments([moments([1.0], [1.0], [0.0], [1.0])], [], 0.9)
    assert first[0].mean.item() == pytest.approx(1.0)
    second = follow_moments([moments([3.0], [3.0], [0.0], [1.0])], first, 0.9)
    assert second[0].mean.item() == second[0].var.item() == pytest.approx(1.2)


def test_real_data_with_the_remembered_statistics_cost_nothing():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watch_moments(net) as watch:
        net.train()
        for layer in (net[1], net[3]):
            layer.momentum = None  # a plain average
        net(x)
        net.eval()
        net(x)
        for each, layer in zip(watch.layers(), (net[1], net[3]), strict=True):
            count = x.shape[0] * 36  # what the layer remembers is corrected for its size
            layer.running_var.mul_((count - 1) / count)
            assert torch.allclose(each.running_mean, layer.running_mean)
        net(x)
        assert float(statistics_distance(watch.layers(), [], 0.0)) == pytest.approx(0.0, abs=1e-3)
        net(x + 3)
        assert float(statistics_distance(watch.layers(), [], 0.0)) > 1.0


def test_disagreement_by_hand():
    """Teacher (2/3, 1/3), student (3/4, 1/4) say the same: KL = 2/3 log(8/9) + 1/3 log(4/3) =
    .017373. In a second row they differ, which counts 0: the mean is half of it."""
    teacher = torch.tensor([[2 / 3, 1 / 3], [0.9, 0.1]]).log()
    student = torch.tensor([[3 / 4, 1 / 4], [0.1, 0.9]]).log()
    assert float(disagreement(teacher, student)) == pytest.approx(-0.017373 / 2, abs=1e-5)
    assert float(disagreement(teacher, teacher)) == pytest.approx(0.0, abs=1e-7)


def test_distillation_is_what_numpy_says():
    draw = torch.Generator().manual_seed(1)
    teacher, student = (torch.randn(5, 4, generator=draw) for _ in range(2))
    t, s = teacher.double().numpy() / 2, student.double().numpy() / 2
    p = np.exp(t) / np.exp(t).sum(1, keepdims=True)
    log_q = s - np.log(np.exp(s).sum(1, keepdims=True))
    expected = -(p * log_q).sum(1).mean()  # without a factor of 4
    assert float(distillation(teacher, student, 2.0)) == pytest.approx(expected, rel=1e-6)


def test_synthesis_loss_by_hand(digits):
    """bn L_BN + oh L_CE + adv L_KL: with each weight in turn."""
    course = Course(target("resnet20"), digits)
    old = freeze(course.run, course.run.initial_weights, "cpu")
    known = torch.tensor([True, True, True, *[False] * 7])
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0, 1, 2])

    def loss(adversarial=True, **weights):
        given = {"bn": 0.0, "oh": 0.0, "adv": 0.0, **weights}
        settings = replace(course.method.synthesis, **given)
        with watch_moments(old) as watch:
            made = Synthesis(settings, course.server(0), old, known, watch)
            return float(made._loss(images, y, adversarial)), made, watch

    x = as_inputs(images, course.server(0).limits)
    with torch.no_grad():
        teacher = old(x)[:, :3].double().numpy()
        log_p = teacher - np.log(np.exp(teacher).sum(1, keepdims=True))
        found, made, watch = loss(oh=0.5)
        assert found == pytest.approx(-0.5 * log_p[np.arange(6), y.numpy()].mean(), rel=1e-5)
        assert loss(bn=10.0)[0] == pytest.approx(
            10 * float(statistics_distance(watch.layers(), [], 0.9)), rel=1e-5
        )
        student = made.student.eval()(x)[:, :3]
        expected = float(disagreement(old(x)[:, :3], student))
        assert loss(adv=2.0)[0] == pytest.approx(2 * expected, rel=1e-5)
        assert loss(adversarial=False, adv=2.0)[0] == 0.0


# --- the synthesis --------------------------------------------------------------------------------


def synthesis(course, known=(1, 4), **switches):
    """Return a synthesis against the initial model, watched for good."""
    old = freeze(course.run, course.run.initial_weights, "cpu")
    mask = torch.zeros(10, dtype=torch.bool)
    mask[list(known)] = True
    settings = replace(course.method.synthesis, **switches)
    return Synthesis(settings, course.server(0), old, mask, MomentWatch())


def test_the_old_model_is_what_it_was_after_the_synthesis(digits):
    course = Course(target("resnet20"), digits)
    old = freeze(course.run, course.run.initial_weights, "cpu")
    before = dict(weights_of(old))
    mask = torch.ones(10, dtype=torch.bool)
    course.method.remember(course.server(0), old, mask)
    assert same(before, dict(weights_of(old)))
    assert not any(p.requires_grad or p.grad is not None for p in old.parameters())
    assert not old._forward_pre_hooks
    assert not any(m._forward_pre_hooks for m in old.modules())


def test_a_synthesis_lowers_its_loss_and_moves_noise_and_generator(digits):
    made = synthesis(Course(target(), digits), g_steps=30, lr_g=0.01, lr_z=0.1, adv=0.0)
    before = {k: t.clone() for k, t in made.generator.state_dict().items()}
    images, lowest = made._batch(adversarial=False)
    one = synthesis(Course(target(), digits), g_steps=1, lr_g=0.01, lr_z=0.1, adv=0.0)
    assert lowest < one._batch(adversarial=False)[1]
    after = made.generator.state_dict()
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    assert not torch.equal(before["layers.0.running_mean"], after["layers.0.running_mean"])
    assert images.dtype == torch.uint8
    assert set(made.wanted[0].tolist()) <= {1, 4}


def test_the_generator_follows_its_copy(digits, monkeypatch):
    """After a single step the copy was moved by the one gradient there is: both are equal."""
    made, copies = synthesis(Course(target(), digits), g_steps=1), []

    def follow(net, adapted, gradients, optimizer):
        datafree.follow(net, adapted, gradients, optimizer)
        copies.append(adapted)

    monkeypatch.setattr(synthesis_module, "follow", follow)
    made._batch(adversarial=False)
    for own, adapted in zip(made.generator.parameters(), copies[0].parameters(), strict=True):
        assert torch.allclose(own, adapted, atol=1e-6)


def test_the_generators_gradient_is_the_sum_of_its_copys(digits, monkeypatch):
    made, seen, given = synthesis(Course(target(), digits), g_steps=3), [], []

    def descend(loss, optimizer):
        value = optimizers.descend(loss, optimizer)
        first, *_ = optimizer.param_groups
        seen.append([p.grad.clone() for p in first["params"]])
        return value

    monkeypatch.setattr(synthesis_module, "descend", descend)
    monkeypatch.setattr(synthesis_module, "follow", lambda *found: given.extend(found[2]))
    made._batch(adversarial=False)
    assert len(seen) == 3
    for total, *steps in zip(given, *seen, strict=True):
        torch.testing.assert_close(total, sum(steps))
    assert made.adam.param_groups[0]["lr"] == pytest.approx(3 * made.settings.lr_g)


def test_the_student_learns_what_the_old_model_says(digits):
    """Without the temperature squared, its gradients at 20 are 400 times smaller."""
    made = synthesis(Course(target(), digits), kd_steps=150, synthesis_batch=64)
    made.add(0)
    x = as_inputs(made.pool[0], made.ctx.limits)
    with torch.no_grad():
        old, student = (net(x)[:, made.known].softmax(1) for net in (made.old, made.student.eval()))
    assert float((old - student).abs().mean()) < 0.01


def test_the_released_preset_never_asks_its_student(digits):
    """A warm-up of 20 batches, and 10 of them: the student stays as it was drawn."""
    students = {}
    for preset in ("paper", "released"):
        made = synthesis(Course(target(preset=preset), digits))
        before = {k: t.clone() for k, t in made.student.state_dict().items()}
        for number in range(2):
            made.add(number)
        after = made.student.state_dict()
        students[preset] = all(torch.equal(before[k], after[k]) for k in before)
    assert students == {"paper": False, "released": True}
    assert make("target", preset="released").synthesis.warm_up > make("target").synthesis.batches


def test_the_same_synthesis_twice_is_the_same(digits):
    """What a crash interrupts is made again, to the same bits."""
    courses = [Course(target(), digits) for _ in range(2)]
    for course in courses:
        course.interact(0, ends_task=True)
    first, second = (c.state.own.by_key() for c in courses)
    assert first.keys() == second.keys()
    assert all(tensor_bytes(first[k]) == tensor_bytes(second[k]) for k in first)


def test_images_are_what_was_declared(digits):
    """24 are made and 20 are wanted; where fewer are made, those."""
    course = Course(target(), digits)
    course.interact(0, ends_task=True)
    images = course.state.own.weights[IMAGES]
    assert images.shape == (20, 1, 8, 8)
    assert images.dtype == torch.uint8
    assert course.told[-1][:3] == ("synthesis", 2, 2)
    assert 0 <= course.metrics["synthesis_accuracy"] <= 1
    few = Course(target(num_images=8000), digits)
    few.interact(0, ends_task=True)
    assert few.state.own.weights[IMAGES].shape == (24, 1, 8, 8)
    spec: BundleSpec = few.method.payload_spec(few.run)[1]
    part = few.method.broadcast(few.server(1), few.state)[1][0]
    assert torch.equal(transported(part, spec).weights[IMAGES], part.weights[IMAGES])
    too_many = Bundle({**part.weights, IMAGES: torch.zeros(8001, 1, 8, 8, dtype=torch.uint8)})
    with pytest.raises(PayloadError, match="images"):
        transported(replace(too_many, histogram=part.histogram), spec)


def test_bytes_and_inputs():
    """Bytes 0 and 255 are black and white; what lies between is rounded to the nearest."""
    images = torch.tensor([0.0, 0.5, 1.0, 0.1]).view(1, 1, 2, 2)
    limits = torch.tensor([-1.0]), torch.tensor([3.0])
    assert quantise(images).flatten().tolist() == [0, 128, 255, 26]
    found = as_inputs(quantise(images), limits).flatten().tolist()
    assert found == pytest.approx([-1.0, -1 + 4 * 128 / 255, 3.0, -1 + 4 * 26 / 255])
    assert as_inputs(images, limits).flatten().tolist() == pytest.approx([-1.0, 1.0, 3.0, -0.6])
    assert torch.equal(as_inputs(images, None), images)


# --- the client's loss ----------------------------------------------------------------------------


def test_loss_by_hand():
    """Slice: column 0 alone, so 0. Distilled: teacher and student of (2, 0) are (0, 0) and (2, 0);
    over T = 2 the targets are 1/2 each: (log(1 + e^-1) + log(1 + e^1)) / 2 = .813262; times 25."""
    ctx = linear_context(target(), [[1.0, 0.0]], [0])
    old = ctx.net.copy().requires_grad_(False).eval()  # a head of zeros
    with torch.no_grad():
        ctx.net.head.weight.copy_(torch.eye(2))
    both = torch.tensor([0, 1])
    refs = MemoryReferences(torch.tensor([0]), both, both, old, lambda: torch.tensor([[2.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0]])
    batch = Batch(x, torch.tensor([0]), torch.tensor([0]))
    out = Output(x, ctx.net.head(x))
    method = method_of(target())
    assert method.loss(ctx, batch, out, refs).item() == pytest.approx(25 * 0.813262, rel=1e-5)
    wide = replace(refs, current=both)
    added = method.loss(ctx, batch, out, wide).item() - 25 * 0.813262
    assert added == pytest.approx(0.313262, abs=1e-4)  # log(1 + e^-1) over both columns
    one = replace(refs, known=torch.tensor([0]))  # one old class: nothing to distil
    assert method.loss(ctx, batch, out, one).item() == pytest.approx(0.0, abs=1e-6)


def test_the_first_task_is_fedavg(digits):
    """Two rounds of one task, with any weight of the distillation."""
    plain = Course(tiny_experiment(method={"name": "fedavg", "weighting": "uniform"}), digits)
    own = Course(target(kd=0.0), digits)
    for course in (plain, own):
        course.interact(0)
        course.interact(1)
    assert same(dict(plain.state.common.weights), dict(own.state.common.weights))
    assert KNOWN not in own.state.own.weights


def test_clients_distil_on_what_was_sent(digits):
    course = Course(target(), digits)
    course.interact(0, ends_task=True)
    refs = course.refs(1, task=1)
    found = [refs.draw() for _ in range(3)]
    assert all(x.shape == (16, 1, 8, 8) for x in found)
    low, high = course.server(1).limits
    assert min(x.min() for x in found) >= low
    assert max(x.max() for x in found) <= high
    assert not torch.equal(found[0], found[1])
    ctx = context_of(course.experiment, digits, 0, 1, 1)
    payload = course.payload(course.server(1, 1), 0)
    cut = Bundle({k: t for k, t in payload.weights.items() if k != IMAGES})
    with pytest.raises(PayloadError, match="the memory came without 'memory/images'"):
        course.method.recalled(ctx, cut)


def test_distillation_changes_what_is_learnt(digits):
    """The same second task with and without the distillation."""
    courses = [Course(target(kd=kd), digits) for kd in (0.0, 25.0)]
    for course in courses:
        course.interact(0, ends_task=True)
        course.interact(1, task=1)
    first, second = (dict(c.state.common.weights) for c in courses)
    assert not same(first, second)
