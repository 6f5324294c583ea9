import pytest
import torch

from fedmodels.tensors.bundle import Bundle
from fedmodels.training.loop import train_locally
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment

KEY = "head/weight"
START = Bundle({KEY: torch.zeros(2, 1)})


def context(method, **training):
    """Return the context of one example x = 1 of class 0; its method has alpha = 1/2."""
    table = {"name": "per-fedavg", "alpha": 0.5, **method}
    experiment = tiny_experiment(method=table, training={"lr": 1.0, "local_epochs": 1, **training})
    return method_of(experiment), linear_context(experiment, [[1.0]], [0])


@pytest.mark.parametrize(("approximation", "theta"), [("fo", 0.377541), ("hf", 0.283156)])
def test_a_step_by_hand(approximation, theta):
    """All matrices are a multiple theta of (1, -1); the gradient is -(1 - sigmoid(2 theta)).

    At theta = 0 it is -1/2, so w~ is 1/4, and there it is -(1 - sigmoid(1/2)) = -.377541: FO steps
    by that. The Hessian at 0 is 2 sigmoid(0) (1 - sigmoid(0)) = 1/2 along the ray, so HF steps by
    (1 - alpha / 2) .377541 = .283156.
    """
    method, ctx = context({"approximation": approximation})
    result = train_locally(method, ctx, START, Bundle())
    assert result.upload.weights[KEY].flatten().tolist() == pytest.approx([theta, -theta], abs=1e-5)


@pytest.mark.parametrize(("steps", "theta"), [(0, 0.0), (1, 0.25), (2, 0.4387703)])
def test_a_client_is_scored_after_steps_of_its_own(steps, theta):
    """From 0 by alpha / 2 = 1/4, then by alpha (1 - sigmoid(1/2)) = .1887703; everybody's stays."""
    method, ctx = context({"personal_steps": steps})
    for view, wanted in (("after_downlink", theta), ("global", 0.0)):
        ctx.view = view
        method.load(ctx, START, Bundle())
        assert ctx.net.head.weight.flatten().tolist() == pytest.approx([wanted, -wanted])


def test_no_step_of_ones_own_is_fedavg(digits):
    found = []
    for table in ({"name": "per-fedavg", "alpha": 0.0}, {"name": "fedavg"}):
        experiment = tiny_experiment(method=table, training={"local_epochs": 2, "momentum": 0.5})
        ctx = context_of(experiment, digits)
        found.append(train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx)))
    mine, theirs = (result.upload.weights for result in found)
    assert all(torch.equal(mine[key], tensor) for key, tensor in theirs.items())
    assert found[0].loss == found[1].loss


@pytest.mark.parametrize("approximation", ["fo", "hf"])
def test_statistics_move_once_a_step(approximation, digits):
    """Of the passes of a step, the one over D' counts."""
    table = {"name": "per-fedavg", "approximation": approximation}
    net = {"name": "digits-cnn", "norm": "batch"}
    experiment = tiny_experiment(method=table, net=net, training={"batch_size": 1000})
    ctx = context_of(experiment, digits)
    sent = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx)).upload.weights
    assert {int(t) for k, t in sent.items() if k.endswith("num_batches_tracked")} == {
        experiment.training.local_epochs
    }


STILL = """
from torch import nn

class Still(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        first = nn.Linear(64, 4).requires_grad_(False)
        self.features = nn.Sequential(nn.Flatten(), first, nn.Linear(4, 4))
        self.head = nn.Linear(4, num_classes)
"""


def test_a_frozen_part_stays(digits, tmp_path):
    (tmp_path / "still.py").write_text(STILL, "utf-8")
    net = {"name": f"{tmp_path}/still.py:Still"}
    experiment = tiny_experiment(method="per-fedavg", net=net)
    ctx = context_of(experiment, digits)
    before = {k: t.clone() for k, t in ctx.net.frozen_tensors().items()}
    train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
    assert before
    assert all(torch.equal(ctx.net.frozen_tensors()[k], t) for k, t in before.items())


def test_a_step_of_ones_own_has_the_loss_of_the_run():
    """Of the smoothed label (3/4, 1/4) the gradient at 0 is -(3/4 - 1/2), so theta is 1/8."""
    experiment = tiny_experiment(
        method={"name": "per-fedavg", "alpha": 0.5}, training={"label_smoothing": 0.5}
    )
    ctx = linear_context(experiment, [[1.0]], [0])
    ctx.view = "after_downlink"
    method_of(experiment).load(ctx, START, Bundle())
    assert ctx.net.head.weight.flatten().tolist() == pytest.approx([0.125, -0.125])


DROPS = """
import torch
from torch import nn

class Drops(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5))
        self.features.unused = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(8, num_classes)
"""


@pytest.mark.parametrize("approximation", ["fo", "hf"])
def test_dropout_is_drawn_of_the_client_and_what_nothing_uses_stays(
    digits, tmp_path, approximation
):
    """Of a score, whatever the process did before: a client that was killed has its bits."""
    (tmp_path / "drops.py").write_text(DROPS, "utf-8")
    experiment = tiny_experiment(
        method={"name": "per-fedavg", "alpha": 0.5, "approximation": approximation},
        net={"name": f"{tmp_path}/drops.py:Drops"},
    )
    method, found = method_of(experiment), []
    for seed in (0, 1):
        ctx = context_of(experiment, digits)
        payload, state = payload_of(experiment, ctx)
        ctx.view = "after_downlink"
        torch.manual_seed(seed)
        method.load(ctx, payload, state)
        found.append({k: t.clone() for k, t in ctx.net.tensors().items()})
    assert all(torch.equal(t, found[1][k]) for k, t in found[0].items())
    assert not torch.equal(found[0]["head/weight"], payload.weights["head/weight"])
    sent = train_locally(method, context_of(experiment, digits), payload, state).upload.weights
    assert sent["base/unused"].tolist() == [1.0, 1.0]
