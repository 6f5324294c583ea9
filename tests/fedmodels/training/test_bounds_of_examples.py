"""What bounds one example, and what hides it: the cap of the factor, the deviation of the noise."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedmodels.numerics.secrecy import Secret
from fedmodels.training.private_steps import private_class_sums
from fedmodels.training.stepped import Batch
from tests.fedmodels.training.test_private_steps import RUN, hidden_of, loss, steps_of

pytest.importorskip("dp_accounting", reason="needs the extra privacy")


def test_a_gradient_within_the_bound_stays_as_it_is():
    """With a bound far beyond every gradient, what the net gets is the plain mean."""
    net, draw = RUN.make_net(), torch.Generator().manual_seed(0)
    x, y = torch.randn(4, *RUN.problem.input_shape, generator=draw), torch.arange(4) % 3
    cross_entropy(net(x), y).backward()
    wanted = torch.cat([p.grad.flatten() for p in net.parameters_by_key().values()])
    assert float(wanted.norm()) < 10
    batch = Batch(x, y, torch.arange(4))
    steps_of(net, 4, 4, clip=1e3).put_gradients(batch, loss, "fedavg")
    found = torch.cat([p.grad.flatten() for p in net.parameters_by_key().values()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_noise_of_class_sums_covers_embedding_and_mark():
    """Both together have a norm of sqrt(2) bounds: at z = 3 and a bound of 0.5 the deviation is
    3 * 0.5 * sqrt(2) = 2.1213, of the counts that over 0.5. Of 40,200 draws it errs by 0.35 %."""
    hidden = hidden_of([], 2, prototypes=True, noise_multiplier=3.0, prototype_clip=0.5)
    nothing = torch.zeros(0, 200), torch.zeros(0).long()
    sums, counts = private_class_sums(*nothing, 201, hidden, Secret(b"s" * 32), 0)
    assert float(sums.std()) == pytest.approx(3 * 0.5 * math.sqrt(2), rel=0.02)
    assert float(counts.std()) == pytest.approx(3 * math.sqrt(2), rel=0.2)
