"""FedNTD by hand, and what its paper promises."""

import copy
import math

import pytest
import torch

from fedmodels.training.loop import train_locally
from fedplugins.baselines.fedntd import not_true, not_true_distance
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, method_of, payload_of, tiny_experiment


def random_logits(seed, rows=6, classes=5):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 1, 2, 3, 4, 2])


def test_the_true_class_is_left_out():
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = not_true(logits, torch.tensor([0, 2]))
    assert found.tolist() == [[2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(("tau", "expected"), [(1.0, 0.0566330), (2.0, 0.0591666)])
def test_two_classes_beside_the_true_one(tau, expected):
    """Teacher (ln 2, 0), student (0, 0), the label's own logit 9 and 7 left out.

    At tau 1: p = (2/3, 1/3), q = (1/2, 1/2): 2/3 ln 4/3 + 1/3 ln 2/3 = .056633. At tau 2: p =
    (.585786, .414214): .585786 ln 1.171573 + .414214 ln .828427 = .0147917, times 4.
    """
    teacher = torch.tensor([[9.0, math.log(2), 0.0]])
    student = torch.tensor([[7.0, 0.0, 0.0]])
    found = not_true_distance(teacher, student, torch.tensor([0]), tau)
    assert float(found) == pytest.approx(expected, abs=1e-6)


def test_the_true_logit_has_no_gradient():
    student = random_logits(1).requires_grad_(True)
    not_true_distance(random_logits(0), student, LABELS, 2.0).backward()
    own = student.grad[torch.arange(6), LABELS]
    assert torch.equal(own, torch.zeros(6))
    assert student.grad.abs().sum() > 0.01


def test_equal_models_are_at_no_distance():
    student = random_logits(0).requires_grad_(True)
    distance = not_true_distance(random_logits(0), student, LABELS, 1.0)
    distance.backward()
    assert float(distance.detach()) == pytest.approx(0, abs=1e-7)
    assert student.grad.abs().max() < 1e-7


def test_the_true_logit_does_not_matter():
    shifted = random_logits(1)
    shifted[torch.arange(6), LABELS] += 100.0
    found = not_true_distance(random_logits(0), shifted, LABELS, 3.0)
    assert torch.equal(found, not_true_distance(random_logits(0), random_logits(1), LABELS, 3.0))


def test_without_distillation_it_is_fedavg(digits, tmp_path):
    found = {}
    for name, more in (("fedavg", {}), ("fedntd", {"beta": 0.0}), ("fedntd ", {"beta": 1.0})):
        experiment = tiny_experiment(method={"name": name.strip(), **more})
        found[name] = run_in_process(experiment, digits, tmp_path / name)["state_sha256"]
    assert found["fedntd"] == found["fedavg"] != found["fedntd "]


def test_the_teacher_is_what_was_received(digits):
    """It predicts in evaluation mode, and neither its weights nor its statistics move."""
    experiment = tiny_experiment(method="fedntd", net="resnet20")
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method.load(ctx, payload, state)
    teacher = method.prepare(ctx, payload, state)
    assert not teacher.training
    before = copy.deepcopy(teacher.state_dict())
    x, y = method.training_data(ctx, teacher)
    method.fit(ctx, x, y, teacher)
    assert all(torch.equal(t, before[k]) for k, t in teacher.state_dict().items())
    assert any(not torch.equal(t, before[k]) for k, t in ctx.net.state_dict().items())


def test_what_travels_is_fedavgs(digits):
    uploads = []
    for name in ("fedavg", "fedntd"):
        experiment = tiny_experiment(method=name)
        ctx = context_of(experiment, digits)
        done = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
        uploads.append(done.upload)
    assert uploads[0].num_bytes() == uploads[1].num_bytes()
    assert uploads[0].by_key().keys() == uploads[1].by_key().keys()
