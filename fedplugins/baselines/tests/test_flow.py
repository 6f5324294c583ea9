"""The flow: it inverts, its determinant is the Jacobian's, and its density is one."""

import math

import numpy as np
import pytest
import torch

from fedmodels.errors import ConfigError, PayloadError
from fedmodels.numerics.randomness import generator, seeded
from fedplugins.baselines.flow import COUPLINGS, Coupling, Flow, check_orders, is_order


def shaken(width=4, classes=3, hidden=8, seed=0):
    """Return a flow whose conditioners say something, which a fresh one's do not."""
    with seeded(seed):
        flow = Flow(width, classes, hidden)
        for parameter in flow.parameters():
            torch.nn.init.normal_(parameter, std=0.4 if width < 8 else 0.1)
    return flow


@pytest.mark.parametrize("width", [2, 4, 5, 64])
def test_the_inverse_inverts(width):
    flow, noise = shaken(width), generator(1)
    h, y = torch.randn(32, width, generator=noise), torch.arange(32) % 3
    with torch.no_grad():
        z, _ = flow(h, y)
        torch.testing.assert_close(flow.inverse(z, y), h, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(z, h)


def test_the_log_determinant_is_that_of_the_jacobian():
    flow = shaken().double()
    for label in range(3):
        y, h = torch.tensor([label]), torch.randn(1, 4, generator=generator(label)).double()
        jacobian = torch.autograd.functional.jacobian(lambda v, y=y: flow(v, y)[0], h)
        expected = jacobian.reshape(4, 4).det().abs().log()
        torch.testing.assert_close(flow(h, y)[1][0], expected)


def test_a_fresh_flow_by_hand():
    """A fresh conditioner says 0: each coupling scales two of four coordinates by s = sigmoid(2) +
    0.001 = 0.881797, so a log-determinant is 4 * 2 * ln s = -1.006347. At h = 0, z = 0 too, and
    log p = -2 ln(2 pi) - 1.006315 = -4.682101."""
    scale = 1 / (1 + math.exp(-2)) + 1e-3
    assert 8 * math.log(scale) == pytest.approx(-1.006347, abs=1e-5)
    flow = Flow(4, 3, 8)
    density = flow.log_density(torch.zeros(1, 4), torch.tensor([1]))
    assert density.item() == pytest.approx(-4.682101, abs=1e-5)


def test_a_coupling_in_numpy():
    """What one coupling does, computed again without torch."""
    with seeded(0):
        coupling = Coupling(4, 2, 3, 1)
        for parameter in coupling.parameters():
            torch.nn.init.normal_(parameter)
    w = {k: t.detach().double().numpy() for k, t in coupling.named_parameters()}
    h = np.array([0.3, -1.2, 0.7, 2.0])
    first = np.concatenate([h[:2], [0.0, 1.0]])  # y = 1
    x = w["conditioner.0.weight"] @ first + w["conditioner.0.bias"]
    inner = w["conditioner.1.first.weight"] @ np.maximum(x, 0) + w["conditioner.1.first.bias"]
    inner = w["conditioner.1.second.weight"] @ np.maximum(inner, 0)
    x = x + inner + w["conditioner.1.second.bias"]
    raw = w["conditioner.2.weight"] @ x + w["conditioner.2.bias"]
    scale = 1 / (1 + np.exp(-(raw[:2] + 2))) + 1e-3
    expected = np.concatenate([h[:2], h[2:] * scale + raw[2:]])
    with torch.no_grad():
        found, log_det = coupling.double()(torch.from_numpy(h)[None], torch.tensor([1]))
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-6)
    assert log_det.item() == pytest.approx(np.log(scale).sum())


def test_the_class_matters():
    flow, h = shaken(), torch.randn(1, 4, generator=generator(0))
    densities = [flow.log_density(h, torch.tensor([k])).item() for k in range(3)]
    assert len({round(d, 4) for d in densities}) == 3


def test_the_density_integrates_to_one():
    flow, side = shaken(2, 3, 8), torch.linspace(-30, 30, 601)
    grid = torch.cartesian_prod(side, side)
    with torch.no_grad():
        density = flow.log_density(grid, torch.ones(len(grid), dtype=torch.int64)).exp()
    assert float(density.sum()) * (60 / 600) ** 2 == pytest.approx(1, abs=0.01)


def test_samples_come_from_their_noise():
    flow, y = shaken(), torch.tensor([0, 1, 2, 1])
    h, z = flow.sample(y, generator(5))
    again, _ = flow.sample(y, generator(5))
    assert torch.equal(h, again)
    assert torch.equal(z, torch.randn(4, 4, generator=generator(5)))
    torch.testing.assert_close(flow(h, y)[0], z, atol=1e-5, rtol=1e-4)
    assert not h.requires_grad


def test_it_learns_two_classes():
    """After some steps, samples of a class lie where its embeddings do."""
    with seeded(0):
        flow = Flow(4, 2, 16)
    noise, y = generator(0), torch.arange(64) % 2
    adam = torch.optim.Adam(flow.parameters(), lr=1e-2)
    for _ in range(150):
        h = 0.3 * torch.randn(64, 4, generator=noise) + 4 * y[:, None] - 2
        adam.zero_grad()
        loss = -flow.log_density(h, y).mean()
        loss.backward()
        adam.step()
    drawn, _ = flow.sample(y, noise)
    assert drawn[y == 0].mean().item() == pytest.approx(-2, abs=0.3)
    assert drawn[y == 1].mean().item() == pytest.approx(2, abs=0.3)


def test_two_orders_are_turned_and_two_are_shuffled():
    with seeded(0):
        flow, other = Flow(64, 3, 8), Flow(64, 3, 8)
    turned = torch.arange(64).flip(0)
    orders = [dict(flow.named_buffers())[f"order{k}"] for k in range(COUPLINGS)]
    assert [torch.equal(order, turned) for order in orders] == [True, False, True, False]
    assert not torch.equal(other.order1, flow.order1)  # who builds one must take another's orders
    check_orders(flow.state_dict())


def test_what_is_no_permutation_is_refused():
    with pytest.raises(PayloadError, match=r"'flow/order1' is no permutation of 0…3"):
        check_orders({"flow/order1": torch.tensor([0, 1, 1, 3])})
    assert not is_order("flow/couplings.0.conditioner.0.weight")
    assert is_order("flow/order3")


def test_one_coordinate_cannot_be_coupled():
    with pytest.raises(ConfigError, match="two coordinates or more, not 1"):
        Flow(1, 3)
