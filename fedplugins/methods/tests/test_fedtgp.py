import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.training.contexts import START, ServerContext
from fedmodels.training.hooks import as_uploads, init_server, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedplugins.methods.fedtgp import Steps, TrainablePrototypes
from tests.conftest import context_of, method_of, payload_of, tiny_experiment


def world(classes=2, width=1, **switches):
    """Return method and run of a net whose embeddings have so many coordinates."""
    table = {"name": "fedtgp", "server_epochs": 1, "server_lr": 0.1, **switches}
    experiment = tiny_experiment(method=table)
    run = RunFacts(experiment, Problem((1, 8, 8), classes))
    run.__dict__["width"] = width
    return method_of(experiment), run


def sent(*rows):
    """Return an upload of prototypes by (class, vector)."""
    each = {k: (torch.tensor(vector), 1) for k, vector in rows}
    return Bundle(prototypes={"class": Prototypes.of(each, len(rows[0][1]))})


def after(method, run, state, **uploads):
    given = as_uploads(method, {int(name[1:]): upload for name, upload in uploads.items()})
    return reduce(method, ServerContext(run, START, tuple(given)), state, given)[0]


def identity(method, run, vectors):
    """Return a state whose F changes nothing of positive vectors of one coordinate."""
    state = init_server(method, run)
    for key, tensor in state.own.weights.items():
        tensor.copy_(torch.tensor(vectors) if "vectors" in key else torch.tensor("weight" in key))
    return state


def test_a_step_of_the_server_by_hand():
    """F is the identity, so that the prototypes are 1 and 3; a client says 1.5 of class 0.

    There is one class, so the margin is tau = 1/2. Logits are -(1/2 + 1/2) and -3/2, the chance of
    class 0 is sigmoid(1/2) = .622459, and the gradient of both distances is +-.377541. Class 0's
    prototype lies below 1.5 and class 1's above: both have the gradient g = -.377541. So weights
    of F move by .1 .377541 (1 + 3), to 1.151016, biases by .1 .755082, and vectors by .1 .377541.
    The prototypes become 1.151016 (1.151016 1.037754 + .075508) + .075508 = 1.537276, and 4.186954.
    """
    method, run = world(margin=0.5)
    found = after(method, run, identity(method, run, [[1.0], [3.0]]), c0=sent((0, [1.5])))
    rows = found.common.prototypes["class"]
    assert rows.vectors.flatten().tolist() == pytest.approx([1.537276, 4.186954], abs=1e-5)
    assert rows.labels.tolist() == [0, 1]
    assert found.own.weights["tgp/inner.bias"].item() == pytest.approx(0.0755082, abs=1e-6)


def test_the_margin_by_hand():
    """Means at 0, 1 and 5 are 5 apart at most; from their nearest they are 1, 1 and 4."""
    method, _ = world(classes=3, margin=10.0)
    means = torch.tensor([[0.0], [1.0], [5.0]])
    assert method._margin(means) == 5.0
    assert world(margin=10.0, reading={"margin_over": "nearest"})[0]._margin(means) == 4.0
    assert method._margin(means[:1]) == 10.0
    assert world(margin=2.5)[0]._margin(means) == 2.5
    assert world(margin=0.0)[0]._margin(means) == 0.0


def test_one_client_raises_the_margin_to_twice_that_of_the_others():
    """Nine clients say 1 and 3, so classes are 2 apart; the tenth 1 and 903: they are 92 apart.

    Without it the margin is 2, so it is 4 at most. With 13 they are (9 * 2 + 12) / 10 = 3 apart,
    as the equation says, and with 3 they are 2.
    """
    method, run = world(margin=1000.0)
    honest, state = [sent((0, [1.0]), (1, [3.0]))] * 9, init_server(method, run)
    for lie, margin in ((3.0, 2.0), (13.0, 3.0), (903.0, 4.0)):
        every = [*honest, sent((0, [1.0]), (1, [lie]))]
        uploads = as_uploads(method, dict(enumerate(every)))
        found = method.aggregate(ServerContext(run, START, tuple(range(10))), state, uploads)
        means = found.own.prototypes["class"].vectors
        assert method._delta(run, means, uploads) == pytest.approx(margin)


@pytest.mark.parametrize("delta", [0.0, 3.0])
def test_steps_in_closed_form_are_those_of_autograd(delta):
    """Steps of several sizes, with a class that no client has sent."""
    draw = torch.Generator().manual_seed(0)
    tgp, y = TrainablePrototypes(5, 7).double(), torch.arange(12) % 4
    p = torch.randn(12, 7, generator=draw, dtype=torch.float64)
    steps = Steps(tgp, p, y, delta, lr=0.3)
    for rows in torch.randperm(118, generator=draw).remainder(12).split(5):
        apart = (p[rows][:, None] - tgp()).square().sum(2).sqrt()
        loss = cross_entropy(-apart - delta * one_hot(y[rows], 5), y[rows])
        slopes = torch.autograd.grad(loss, [*tgp.parameters()])
        for weight, slope in zip(tgp.parameters(), slopes, strict=True):
            weight.data -= 0.3 * slope
        share = steps.step(rows.numpy())
        assert -np.log(share).mean() == pytest.approx(loss.detach().item(), rel=1e-6)
    for name, tensor in steps.weights().items():
        torch.testing.assert_close(tensor, tgp.state_dict()[name], rtol=1e-6, atol=1e-9)


def test_where_a_prototype_is_the_clients_the_distance_has_no_slope():
    """Of the step by hand, with 1 in place of 1.5: class 0's distance is 0, and class 1's is 2.

    The chance of class 0 is sigmoid(2 - 1/2) = .817574. Class 1's prototype alone is pushed away:
    its gradient is -.182426, so the weights of F move by .1 .182426 3 = .0547277, and biases by
    .0182426.
    """
    method, run = world(margin=0.5)
    found = after(method, run, identity(method, run, [[1.0], [3.0]]), c0=sent((0, [1.0])))
    own = found.own.weights
    assert own["tgp/vectors.weight"].flatten().tolist() == pytest.approx([1.0, 3.0182426])
    assert own["tgp/outer.weight"].item() == pytest.approx(1.0547277)
    assert own["tgp/outer.bias"].item() == pytest.approx(0.0182426, abs=1e-6)


def test_without_a_margin_it_is_the_plain_contrastive_loss():
    """Of the step by hand, without the 1/2: the chance of class 0 is sigmoid(1) = .731059.

    So g = -.268941, weights become 1.107576, biases .053788, and vectors move by .026894. The
    prototypes are 1.107576 (1.107576 1.026894 + .053788) + .053788 = 1.373085, and 3.826535.
    """
    method, run = world(margin=0.0)
    found = after(method, run, identity(method, run, [[1.0], [3.0]]), c0=sent((0, [1.5])))
    rows = found.common.prototypes["class"].vectors.flatten().tolist()
    assert rows == pytest.approx([1.373085, 3.826535], abs=1e-5)


def test_a_round_without_prototypes_moves_nothing():
    method, run = world()
    state = init_server(method, run)
    assert after(method, run, state) is state
    assert not len(state.common.prototypes["class"].labels)


def test_one_who_sends_giants_moves_the_others_prototypes_by_bounded_steps():
    """The gradient of a distance has length 1, wherever the prototype lies that a client claims."""
    found = []
    for size in (3.0, 1e6):
        method, run = world(classes=3, width=4, server_epochs=20, margin=10.0)
        state = init_server(method, run)
        honest = sent((0, [1.0, 0.0, 0.0, 0.0]), (1, [0.0, 1.0, 0.0, 0.0]))
        lie = sent((0, [0.0, 0.0, size, 0.0]))
        rows = after(method, run, state, c0=honest, c1=lie).common.prototypes["class"].vectors
        assert torch.isfinite(rows).all()
        found.append(float(rows.norm(dim=1).max()))
    assert found[1] < 1e3


def test_no_pull_is_local_at_clients(digits):
    found = []
    for table in ({"name": "fedtgp", "lam": 0.0}, {"name": "local"}):
        experiment = tiny_experiment(method=table)
        ctx = context_of(experiment, digits)
        found.append(train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx)).state)
    mine, theirs = (state.weights for state in found)
    assert all(torch.equal(mine[key], tensor) for key, tensor in theirs.items())
