import pytest
import torch

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import Position, ServerContext
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.server_optimizer import check_server_optimizer
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment

KEY = "head/weight"


def rounds_of(changes, **method):
    """Return the weights after rounds whose clients' mean is the model plus each change."""
    experiment = tiny_experiment(method={"name": "flash", **method})
    run, flash = RunFacts(experiment, Problem((2,), 2)), method_of(experiment)
    zeros = torch.zeros(2)
    run.__dict__.update(forms={KEY: zeros}, parameters=(KEY,), initial_weights={KEY: zeros})
    states = [flash.init_server(run)]
    for t, change in enumerate(changes):
        ctx = ServerContext(run, Position(t, t, 0), (0,))
        count = {"num_examples": float(change is not None)}
        sent = states[-1].common.weights[KEY] + torch.tensor(change or (1.0, 1.0))
        uploads = as_uploads(flash, {0: Bundle({KEY: sent}, scalars=count)})
        states.append(reduce(flash, ctx, states[-1], uploads)[0])
    return states[1:]


def test_two_steps_of_the_server_by_hand():
    """eta = .1, beta_1 = .5, beta_2 = .75, tau = .5, so v begins at .25; Delta = (1, -2), (1, .5).

    First m = (.5, -1); v = .75 .25 + .25 (1, 4) = (.4375, 1.1875), Delta² - v = (.5625, 2.8125),
    beta_3 = .25 / (.5625 + .25, 2.8125 + .25) = (.307692, .081633), d = (.389423, 2.582908).
    sqrt(v) - d = (.272015, -1.49…), of which 0 stands for the second: the step is
    .1 (.5 / .772015, -1 / .5) = (.064766, -.2). Then m = (.75, -.25), v = (.578125, .953125),
    Delta² - v = (.421875, -.703125), beta_3 = (.4375 / .859375, 1.1875 / 1.890625),
    d = (.405354, 1.360830), and the step .1 (.75 / .854991, -.25 / .5) = (.087720, -.05).
    """
    settings = {"eta": 0.1, "beta_1": 0.5, "beta_2": 0.75, "tau": 0.5}
    first, second = rounds_of([(1.0, -2.0), (1.0, 0.5)], **settings)
    assert first.common.weights[KEY].tolist() == pytest.approx([0.064766, -0.2], abs=1e-6)
    own = second.own.weights
    assert own[f"d/{KEY}"].tolist() == pytest.approx([0.405354, 1.360830], abs=1e-6)
    moved = second.common.weights[KEY] - first.common.weights[KEY]
    assert moved.tolist() == pytest.approx([0.087720, -0.05], abs=1e-6)


def test_a_round_in_which_nobody_trained_moves_nothing():
    before, after = rounds_of([(1.0, 1.0), None])
    assert after is before


@pytest.mark.parametrize(("gamma", "theta"), [(0.25, 0.768941), (0.2, 0.945784), (0.1, 1.076850)])
def test_a_client_stops_by_hand(gamma, theta):
    """One example x = 1 of class 0, full steps of lr 1: theta is 1/2, .768941, .945784, 1.076850.

    Its loss is log(1 + exp(-2 theta)): .313262, .194609, .140488. It falls by .118653 in the second
    epoch, which is less than gamma / 2 of .25, and by .054121 in the third, less than .2 / 3.
    """
    training = {"local_epochs": 4, "lr": 1.0}
    experiment = tiny_experiment(method={"name": "flash", "gamma": gamma}, training=training)
    ctx = linear_context(experiment, [[1.0]], [0])
    result = train_locally(method_of(experiment), ctx, Bundle({KEY: torch.zeros(2, 1)}), Bundle())
    assert result.upload.weights[KEY].flatten().tolist() == pytest.approx([theta, -theta], abs=1e-5)


def test_each_tenth_example_tells_and_is_not_trained_on():
    """Of 23 examples, numbers 9 and 19."""
    experiment = tiny_experiment(method="flash", training={"local_epochs": 2})
    ctx = linear_context(experiment, [[float(n)] for n in range(23)], [0, 1] * 11 + [0])
    flash = method_of(experiment)
    refs = flash.prepare(ctx, Bundle(), Bundle())
    assert refs.x.flatten().tolist() == [9.0, 19.0]
    assert refs.y.tolist() == [1, 1]
    x, _ = flash.training_data(ctx, refs)
    assert x.flatten().tolist() == [float(n) for n in range(23) if n not in (9, 19)]
    result = train_locally(flash, ctx, Bundle({KEY: torch.zeros(2, 1)}), Bundle())
    assert result.upload.scalars["num_examples"] == 21


def test_one_epoch_on_all_examples_is_fedavg_at_clients(digits):
    found = []
    for table in ({"name": "flash", "watched": 0, "gamma": 1e9}, {"name": "fedavg"}):
        experiment = tiny_experiment(method=table, training={"local_epochs": 1})
        ctx = context_of(experiment, digits)
        found.append(train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx)).upload)
    mine, theirs = (upload.weights for upload in found)
    assert all(torch.equal(mine[key], tensor) for key, tensor in theirs.items())


def test_what_does_not_go_with_it_is_told_in_a_line():
    experiment = tiny_experiment(method="flash", server_optimizer={"name": "fedadam", "lr": 0.1})
    method, run = method_of(experiment), RunFacts(experiment, Problem((1, 8, 8), 10))
    with pytest.raises(ConfigError, match="is an optimiser itself: leave it out"):
        check_server_optimizer(method, run)
    with pytest.raises(ConfigError, match=r"method\.watched: .* 0 or greater than or equal to 2"):
        make("flash", watched=1)
