"""FedALA: what is mixed, how the mixing weights learn, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.loop import train_locally
from fedplugins.methods.fedala import LEARNT, NEVER, TRAINED
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment

HEAD = "head/weight"
RAY = torch.tensor([[1.0], [-1.0]])
ONE_STEP = {"local_epochs": 1, "batch_size": 100, "lr": 1.0}


def mixing(**fields):
    return tiny_experiment(method={"name": "fedala", **fields}, training=ONE_STEP)


def kept(stage, w=1.0):
    """Return the private state of a client whose own head is zero."""
    weights = {f"own/{HEAD}": 0.0 * RAY, f"ala/{HEAD}": torch.full((2, 1), w)}
    return Bundle(weights, scalars={"stage": stage})


@pytest.mark.parametrize(
    ("stage", "w", "mixed"),
    [(NEVER, 1.0, 1.0), (TRAINED, 0.0, 0.0), (LEARNT, 0.1192029, 0.1192029)],
)
def test_a_step_of_the_mixing_weights_by_hand(stage, w, mixed):
    """Matrices are a multiple a of (1, -1): the received one has a = 1, the own one a = 0.

    The example is x = 1 of class 1, and W is 1: the mixture has a = 1, its gradient is s(2) (1, -1)
    and the update (1, -1), so W falls by s(2) to .1192029 (eq. 1), the mixture's a too (eq. 2). A
    further epoch would take s(2 * .1192029) = .5593207 more, and W is cut to 0, where it stays: the
    losses of the first learning are 2.13, .82 and ln 2 from then on. A client that never trained
    begins with a = 1. The step from the mixture is a - s(2 a).
    """
    experiment = mixing()
    ctx = linear_context(experiment, [[1.0]], [1])
    method, payload = method_of(experiment), Bundle({HEAD: RAY})
    method.load(ctx, payload, kept(stage))
    assert weights_of(ctx.net)[HEAD][0].item() == pytest.approx(mixed, abs=1e-6)
    result = train_locally(method, ctx, payload, kept(stage))
    end = mixed - torch.sigmoid(torch.tensor(2 * mixed)).item()
    assert result.upload.weights[HEAD][0].item() == pytest.approx(end, abs=1e-6)
    assert result.state.weights[f"own/{HEAD}"][0].item() == pytest.approx(end, abs=1e-6)
    assert result.state.weights[f"ala/{HEAD}"].tolist() == [[pytest.approx(w, abs=1e-6)]] * 2
    assert result.state.scalars["stage"] == (TRAINED if stage == NEVER else LEARNT)


def test_what_is_received_is_scored_by_what_was_learnt():
    ctx = replace(linear_context(mixing(), [[1.0]], [1]), view="after_downlink")
    for stage, state, a in ((NEVER, kept(NEVER), 1.0), (LEARNT, kept(LEARNT, 0.25), 0.25)):
        make("fedala").load(ctx, Bundle({HEAD: RAY}), state)
        assert weights_of(ctx.net)[HEAD][0].item() == a, stage
    ctx.view = "global"
    make("fedala").load(ctx, Bundle({HEAD: RAY}), Bundle())
    assert weights_of(ctx.net)[HEAD][0].item() == 1.0


def test_a_client_without_examples_keeps_what_it_has():
    ctx = linear_context(mixing(), [[1.0]], [0])
    ctx.stream.x, ctx.stream.y = ctx.stream.x[:0], ctx.stream.y[:0]
    for stage in (NEVER, TRAINED):
        result = train_locally(make("fedala"), ctx, Bundle({HEAD: RAY}), kept(stage))
        assert result.state.scalars["stage"] == stage


def test_without_a_learning_rate_it_is_fedavg(digits):
    found = []
    for experiment in (mixing(eta=0.0, p=0), tiny_experiment(training=ONE_STEP)):
        ctx = context_of(experiment, digits)
        method, (payload, state) = method_of(experiment), payload_of(experiment, ctx)
        for _ in range(2):
            result = train_locally(method, ctx, payload, state)
            state = result.state
        found.append((result.upload.weights, result.loss))
    (mine, loss), (theirs, expected) = found
    assert loss == expected
    assert all(torch.equal(mine[key], tensor) for key, tensor in theirs.items())


@pytest.mark.parametrize(("p", "first"), [(0, "base/1.weight"), (1, "head/weight")])
def test_layers_count_from_the_highest(digits, p, first):
    ctx = context_of(mixing(p=p), digits)
    state = make("fedala", p=p).init_client(ctx.run, 0)
    assert next(iter(state.weights)) == f"own/{first}"
    assert len(state.weights) == 2 * (2 if p else len(ctx.run.parameters))
