"""What methods say of their steps and epochs, against a count of the optimisers' own steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedmodels.training.loop import train_locally
from fedmodels.training.stepped import in_steps
from tests.conftest import context_of, method_of, payload_of
from tests.fedmodels.methods.test_conformance import NAMES, experiment_for

BATCH = 10
EPOCHS = 2
CRITIC = {"fedcil": "Adam"}
"""Methods whose classifier steps by an optimiser of their own; generators have Adam as well."""


ASIDE = {"fedccfa": "_balance"}
"""What trains a net of a method's own that no score sees."""


@pytest.fixture
def steps(monkeypatch):
    """The steps that optimisers take: the kind of each, and how many tensors it moves."""
    taken: list[tuple[str, int]] = []
    init = torch.optim.Optimizer.__init__

    def counted(self, *arguments, **options):
        init(self, *arguments, **options)
        moves = sum(len(group["params"]) for group in self.param_groups)
        self.register_step_pre_hook(lambda *_: taken.append((type(self).__name__, moves)))

    monkeypatch.setattr(torch.optim.Optimizer, "__init__", counted)
    return taken


@pytest.mark.parametrize("name", NAMES)
def test_a_method_takes_the_steps_that_it_says(name, digits, steps, monkeypatch):
    """The line of fairness is as true as these numbers; GLFC's SGD of one tensor makes images."""
    experiment = experiment_for(
        (name, {}), training={"batch_size": BATCH, "local_epochs": EPOCHS, "optimizer": "sgd"}
    )
    method, ctx = in_steps(method_of(experiment)), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    if name in ASIDE:
        monkeypatch.setattr(type(method), ASIDE[name], lambda *_: None)
    train_locally(method, ctx, payload, state)
    kind = CRITIC.get(name, "SGD")
    taken = [moves for optimiser, moves in steps if optimiser == kind and moves > 1]
    run = SimpleNamespace(run=ctx.run, view="")
    length = method.training_length(run).split()
    if name == "fedcil":  # a step of the critic and one of the generator for each
        assert [len(taken), *length[1:]] == [2 * int(length[0]), "batches"]
        return
    batches = -(-ctx.num_examples // BATCH)
    assert len(taken) == method.steps_per_batch * int(length[0]) * batches
