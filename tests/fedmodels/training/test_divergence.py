"""What a client says of a training that diverged: a cause that was measured, and what helps."""

import math

import pytest
import torch

from fedmodels.errors import TrainingFailed
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.divergence import explanation
from fedmodels.training.loop import ClientHalf, train_locally
from fedmodels.training.returned import check_weights
from tests.conftest import linear_context, tiny_experiment

POINTS = [[1.0, 2.0], [3.0, -1.0]]
GIVEN = Bundle(weights={"head/weight": torch.zeros(2, 2)})


def line_of(x=POINTS, privacy=None, **training):
    experiment = tiny_experiment(training={"local_epochs": 3, **training}, privacy=privacy)
    ctx = linear_context(experiment, x, [0, 1], client=4)
    with pytest.raises(TrainingFailed) as failed:
        train_locally(FedAvg(), ctx, GIVEN, Bundle())
    return str(failed.value)


def test_the_gradient_at_the_given_weights_is_told():
    """The softmax is 1/2 everywhere, so the gradient of the mean loss over both points is

        rows of the head: -1/4 x0 + 1/4 x1 = (0.5, -0.75) and its negative,

    whose norm is sqrt(2 (0.25 + 0.5625)) = 1.2748.
    """
    line = line_of(lr=1e30)
    assert line == (
        "training diverged: a weight of 'head/weight' is 7.5e+29, beyond 1e+06; [training] lr is "
        "1e+30, its inputs go from -1 to 3 once normalised, the gradient at the weights it was "
        "given has norm 1.275; what usually helps is a lower rate, or a net that normalises, such "
        'as [net] norm = "layer"'
    )
    assert math.sqrt(2 * (0.25 + 0.5625)) == pytest.approx(1.2748, abs=1e-4)


def test_a_weight_decay_that_multiplies_weights_is_the_cause():
    """A step multiplies the weights by 1 - lr x decay."""
    line = line_of(lr=0.5, weight_decay=1e9)
    assert "lr x weight_decay is 5e+08, so each step multiplies the weights by -5e+08" in line
    assert line.endswith("a lower weight_decay helps")


@pytest.mark.parametrize(("decay", "is_cause"), [(1.0, True), (0.5, False)])
def test_a_weight_decay_is_the_cause_from_where_a_step_leaves_nothing_of_weights(decay, is_cause):
    ctx = linear_context(
        tiny_experiment(training={"lr": 1.0, "weight_decay": decay}), POINTS, [0, 1]
    )
    half = ClientHalf(FedAvg(), ctx, GIVEN, Bundle())
    half.x, half.y = ctx.stream.train(0)
    ctx.asked.add("optimizer")
    assert ("weight_decay is 1, so each step" in explanation(half)) == is_cause


def test_weights_that_no_coordinator_takes_are_found_where_every_loss_was_finite():
    line = line_of(lr=1e7, local_epochs=1)
    assert line.startswith("training diverged: a weight of 'head/weight' is 7.5e+06, beyond 1e+06;")


def test_a_loss_that_is_no_number_is_told():
    line = line_of([[1e38, 1e38], [1e38, -1e38]], lr=1e30)
    assert line.startswith("training diverged: its loss is nan; ")


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_inputs_that_are_no_numbers_are_the_cause(value):
    line = line_of([[1.0, value], [1.0, 1.0]])
    assert line.endswith("; its inputs hold NaN or infinity: remove or replace those examples")


@pytest.mark.parametrize("x", [[[1e38, 1e38], [1e38, -1e38]], [[-1e3, 0.0], [-1e2, 1.0]]])
def test_inputs_far_from_zero_come_first(x):
    line = line_of(x, lr=1e30)
    assert "what usually helps is inputs near 0, by scale, mean and std in client.json" in line


def test_nothing_of_the_data_is_told_where_a_config_hides_them():
    privacy = {"level": "client", "noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-3}
    line = line_of(lr=1e30, privacy=privacy)
    assert "inputs" not in line
    assert "norm 1" not in line


def test_rates_of_the_method_are_named(digits):
    """Where a method has rates of its own, one of them may be the cause."""
    experiment = tiny_experiment(method={"name": "af-fcl"})
    ctx = linear_context(experiment, POINTS, [0, 1])
    from fedmodels.methods import make

    half = ClientHalf(make("af-fcl"), ctx, GIVEN, Bundle())
    half.x, half.y = ctx.stream.train(0)
    assert explanation(half).startswith("[method] flow_lr is 0.005, its inputs go from")


def test_weights_at_the_bound_are_taken():
    ctx = linear_context(tiny_experiment(), POINTS, [0, 1])
    with torch.no_grad():
        ctx.net.head.weight.fill_(-1e6)
    check_weights(ctx)


def test_weights_whose_norm_alone_is_large_are_taken():
    """Each weight is within the bound; the norm of all is beyond it."""
    ctx = linear_context(tiny_experiment(), POINTS, [0, 1])
    with torch.no_grad():
        ctx.net.head.weight.fill_(9e5)
    check_weights(ctx)


def test_small_weights_are_checked_by_one_norm(monkeypatch):
    """Their largest magnitude takes a CPU several times as long as their norm."""
    ctx = linear_context(tiny_experiment(), POINTS, [0, 1])
    taken = list[tuple[float, ...]]()
    norm = torch._foreach_norm

    def counted(tensors, *order):
        taken.append(order)
        return norm(tensors, *order)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    monkeypatch.delattr(torch.linalg, "vector_norm")
    check_weights(ctx)
    assert taken == [()]


def test_one_weight_beyond_the_bound_is_named():
    ctx = linear_context(tiny_experiment(), POINTS, [0, 1])
    with torch.no_grad():
        ctx.net.head.weight.view(-1)[1] = 1.1e6
    with pytest.raises(TrainingFailed, match="a weight of 'head/weight' is"):
        check_weights(ctx)
