"""The server's step, by hand, against torch where it has the same one, and for every method."""

import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.methods import names
from fedmodels.methods.fedavg import FedAvg
from fedmodels.parts.class_growth import StateGrowth
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import Position, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.run import RunFacts
from fedmodels.training.server_optimizer import check_server_optimizer, trained_keys
from tests.conftest import method_of, tiny_experiment

KEY = "head/weight"
STATISTIC = "base/1.running_mean"


def states_of(means, method=None, **settings):
    """Return the states after rounds whose clients' mean is the state plus each of ``means``.

    The net has one weight (2,) that trains from zeros, and one statistic that is averaged.
    """
    experiment = tiny_experiment(server_optimizer=settings or None)
    run = RunFacts(experiment, Problem((2,), 2))
    run.__dict__["parameters"] = (KEY,)
    method, start = method or FedAvg(), {KEY: torch.zeros(2), STATISTIC: torch.zeros(2)}
    states = [ServerState(Bundle(weights=start))]
    for t, change in enumerate(means):
        ctx = ServerContext(run, Position(t, t, 0), (0,))
        sent = {key: w + torch.tensor(change) for key, w in states[-1].common.weights.items()}
        upload = Bundle(weights=sent, scalars={"num_examples": 1.0})
        states.append(reduce(method, ctx, states[-1], as_uploads(method, {0: upload}))[0])
    return states[1:]


def weights(states):
    return torch.stack([state.common.weights[KEY] for state in states])


CHANGES = [[1.0, -2.0], [1.0, 0.5]]
HAND = {
    # m = [1, -2], then .5 m + [1, .5] = [1.5, -.5]; each step .1 m
    "fedavgm": [[0.1, -0.2], [0.25, -0.25]],
    # m = .5 [1, -2]; v = .75 .25 + .25 [1, 4] = [.4375, 1.1875]; then
    # m = .5 m + .5 [1, .5] = [.75, -.25]; v = .75 v + .25 [1, .25] = [.578125, .953125]
    "fedadam": [[0.5 / (0.4375**0.5 + 0.5), -1.0 / (1.1875**0.5 + 0.5)],
                [0.75 / (0.578125**0.5 + 0.5), -0.25 / (0.953125**0.5 + 0.5)]],
    # v = .25 - .25 [1, 4] sign(.25 - [1, 4]) = [.5, 1.25]; then
    # v = [.5 + .25, 1.25 - .25 .25] = [.75, 1.1875]
    "fedyogi": [[0.5 / (0.5**0.5 + 0.5), -1.0 / (1.25**0.5 + 0.5)],
                [0.75 / (0.75**0.5 + 0.5), -0.25 / (1.1875**0.5 + 0.5)]],
    # v = .25 + [1, 4] = [1.25, 4.25], then [2.25, 4.5]
    "fedadagrad": [[0.5 / (1.25**0.5 + 0.5), -1.0 / (4.25**0.5 + 0.5)],
                   [0.75 / (2.25**0.5 + 0.5), -0.25 / (4.5**0.5 + 0.5)]],
}  # fmt: skip
"""Weights after two rounds: eta = .1, beta_1 = .5, beta_2 = .75, tau = .5, changes as above."""


@pytest.mark.parametrize("name", HAND)
def test_two_steps_by_hand(name):
    settings = {"lr": 0.1, "beta_1": 0.5}
    if name != "fedavgm":
        settings |= {"beta_2": 0.75, "tau": 0.5}
    states = states_of(CHANGES, name=name, **settings)
    wanted = torch.tensor(HAND[name])
    if name != "fedavgm":
        wanted = 0.1 * wanted.cumsum(0)
    torch.testing.assert_close(weights(states), wanted)
    assert {*states[-1].optimizer.weights} == {
        f"{part}/{KEY}" for part in "mv"[: 2 - (name == "fedavgm")]
    }
    statistics = torch.stack([state.common.weights[STATISTIC] for state in states])
    torch.testing.assert_close(statistics, torch.tensor(CHANGES).cumsum(0))


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"name": "fedavgm", "lr": 0.5}, lambda w: torch.optim.SGD(w, 0.5, momentum=0.9)),
        ({"name": "fedadagrad", "lr": 0.5, "beta_1": 0.0, "tau": 0.1},
         lambda w: torch.optim.Adagrad(w, 0.5, initial_accumulator_value=0.01, eps=0.1)),
    ],
)  # fmt: skip
def test_ten_steps_are_torchs_where_it_has_the_same(settings, make):
    changes = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    w = nn.Parameter(torch.zeros(2))
    optimizer, wanted = make([w]), []
    for change in changes:
        w.grad = -change
        optimizer.step()
        wanted.append(w.detach().clone())
    found = weights(states_of(changes.tolist(), **settings))
    torch.testing.assert_close(found, torch.stack(wanted))


def test_without_an_optimiser_the_mean_is_the_next_model_and_nothing_is_kept():
    states = states_of(CHANGES)
    torch.testing.assert_close(weights(states), torch.tensor(CHANGES).cumsum(0))
    assert [name for name, _ in states[-1].named()] == ["common", "own"]


def test_a_rate_of_one_without_momentum_is_fedavg():
    states = states_of(CHANGES, name="fedavgm", lr=1.0, beta_1=0.0)
    torch.testing.assert_close(weights(states), weights(states_of(CHANGES)))


def test_the_moments_stay_where_nobody_counts():
    run = RunFacts(
        tiny_experiment(server_optimizer={"name": "fedavgm", "lr": 1.0}), Problem((2,), 2)
    )
    before = states_of(CHANGES, name="fedavgm", lr=1.0)[-1]
    ctx, method = ServerContext(run, Position(2, 2, 0), ()), FedAvg()
    after, _ = reduce(method, ctx, before, as_uploads(method, {}))
    assert after.optimizer is before.optimizer
    assert after.common is before.common


WITHOUT = {
    "fedproto",
    "fedtgp",
    "local",
    "pfedgraph",
    "pfedgraph-replay",
    "feddrift",
    "feddrift-eager",
}
"""Methods whose clients share no weights, get weights of their own, or models that no one keeps."""


@pytest.mark.parametrize("name", names())
def test_it_is_for_every_method_whose_server_keeps_a_mean(name):
    normed = {"name": "digits-cnn", "norm": "batch"}
    nets = {
        "fedbn": normed,
        "fedcil": {"name": "acgan"},
        "fedali": {"name": "vit-tiny", "alp": True, "patch": 4},
        "pilora": {"name": "mlp", "hidden": [4], "adapters": 8},
    }
    net = nets.get(name, {"name": "mlp", "hidden": [4]})
    experiment = tiny_experiment(
        method=name, net=net, server_optimizer={"name": "fedadam", "lr": 0.1}
    )
    method, run = method_of(experiment), RunFacts(experiment, Problem((1, 8, 8), 10))
    if name in {*WITHOUT, "flash"}:
        line = "share none: leave it out" if name in WITHOUT else "is an optimiser itself"
        with pytest.raises(ConfigError, match=line):
            check_server_optimizer(method, run)
    else:
        check_server_optimizer(method, run)


def test_control_variates_are_a_mean_and_no_model():
    experiment = tiny_experiment(method="scaffold", server_optimizer={"name": "fedadam", "lr": 1.0})
    method, run = method_of(experiment), RunFacts(experiment, Problem((1, 8, 8), 10))
    common = method.init_server(run).common
    assert {*trained_keys(method, run, common)} == {*run.parameters} < {*common.weights}


def test_moments_grow_with_classes_that_come():
    experiment = tiny_experiment(server_optimizer={"name": "fedyogi", "lr": 1.0})
    method, run = method_of(experiment), RunFacts(experiment, Problem((1, 8, 8), 10))
    state = method.init_server(run)
    ctx = ServerContext(run, Position(0, 0, 0), (0,))
    moved = {key: w + 1 for key, w in state.common.weights.items()}
    upload = Bundle(weights=moved, scalars={"num_examples": 1.0})
    state, _ = reduce(method, ctx, state, as_uploads(method, {0: upload}))
    grown = StateGrowth(method, run, run.for_classes(11)).server(state)
    held = grown.optimizer.weights
    assert held["m/head/weight"].shape == grown.common.weights["head/weight"].shape
    assert torch.equal(held["v/head/weight"][:10], state.optimizer.weights["v/head/weight"])
    assert not held["m/head/weight"][10].any()
    assert held["v/head/weight"][10].tolist() == pytest.approx([1e-6] * 16)  # tau is 1e-3
