"""What teachers say: asked once where inputs stay, and given to the loss with its batch."""

import pytest
import torch

from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.kept_copies import kept_copy
from fedmodels.training.loop import train_locally
from tests.conftest import context_of, payload_of, tiny_experiment


def trained(digits, **tables):
    """Return how often a teacher was asked, of how many inputs, and what the loss was given."""
    asked, given = [], []

    class Taught(FedAvg):
        name = "taught"

        def prepare(self, ctx, payload, state):
            return kept_copy(ctx.net, "teacher").requires_grad_(False).eval()

        def taught(self, ctx, x, refs):
            assert not torch.is_grad_enabled()
            asked.append(len(x))
            return refs.features(x), refs(x)

        def loss(self, ctx, batch, out, refs):
            given.append((batch.taught, (refs.features(batch.x), refs(batch.x)), len(batch.y)))
            return super().loss(ctx, batch, out, refs)

    experiment = tiny_experiment(**tables)
    ctx = context_of(experiment, digits)
    train_locally(Taught(), ctx, *payload_of(experiment, ctx))
    assert all(len(taught) == 2 for taught, _, _ in given)
    for taught, anew, size in given:
        for one, other in zip(taught, anew, strict=True):
            assert len(one) == size
            torch.testing.assert_close(one, other)
    return asked, sum(size for *_, size in given)


@pytest.mark.parametrize("net", ["mlp", "resnet20"])
def test_teachers_are_asked_once_where_inputs_stay(digits, net):
    asked, steps = trained(digits, net=net, training={"local_epochs": 3, "batch_size": 16})
    assert steps == 3 * sum(asked)
    assert len(asked) == 1


def test_teachers_see_each_batch_that_is_augmented(digits):
    training = {"local_epochs": 2, "batch_size": 16, "augment": "crop-flip"}
    asked, steps = trained(digits, net="mlp", training=training)
    assert sum(asked) == steps
    assert len(asked) > 2


def test_who_has_no_teacher_gets_nothing(digits):
    seen = []

    class Plain(FedAvg):
        def loss(self, ctx, batch, out, refs):
            seen.append(batch.taught)
            return super().loss(ctx, batch, out, refs)

    experiment = tiny_experiment()
    ctx = context_of(experiment, digits)
    train_locally(Plain(), ctx, *payload_of(experiment, ctx))
    assert set(seen) == {()}
