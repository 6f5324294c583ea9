import math

import pytest
import torch

from fedmodels.errors import ConfigError
from fedmodels.nets.generative import dpm_solver
from fedmodels.nets.generative.ddpm import (
    STEPS,
    UNet,
    alpha_bars,
    ddpm_loss,
    follow,
    time_embedding,
)
from fedmodels.nets.generative.dpm_solver import dpm_solve, index_of, lam_of, solver_orders
from fedmodels.numerics.randomness import generator, seeded


@pytest.mark.parametrize(
    ("width", "mult", "blocks", "want"),
    [
        (32, (1, 2, 2), 1, 1_113_955),
        (32, (1, 2, 2, 2), 1, 1_525_411),
        (48, (1, 2, 2), 1, 2_499_603),
        (64, (1, 2, 2), 1, 4_437_699),
        (128, (1, 2, 2, 2), 2, 35_746_307),
    ],
)
def test_counts(width, mult, blocks, want):
    # models.md, section 7
    net = UNet(3, width, mult, blocks)
    assert sum(p.numel() for p in net.parameters()) == want
    assert not list(net.buffers())


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8)])
def test_the_net_keeps_the_shape(shape):
    net = UNet(shape[0], 16)
    x = torch.randn(2, *shape)
    y = net(x, torch.tensor([0, 999]))
    assert y.shape == x.shape
    y.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


def test_the_time_matters_and_samples_do_not_mix():
    net = UNet(1, 16).eval()
    x = torch.randn(1, 1, 8, 8).expand(3, -1, -1, -1)
    with torch.no_grad():
        y = net(x, torch.tensor([5, 5, 600]))
        torch.testing.assert_close(y[:1], net(x[:1], torch.tensor([5])), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y[0], y[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(y[0], y[2], atol=1e-3)


def test_width_of_the_net():
    with pytest.raises(ConfigError, match="multiple of 16"):
        UNet(3, 20)


def test_noise_in_bfloat16():
    with seeded(0):
        net, half = UNet(1, 32), UNet(1, 32, mixed_precision=True)
    half.load_state_dict(net.state_dict())
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 700])
    plain, rounded = net.eval()(x, t), half.eval()(x, t)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, plain)
    assert (rounded - plain).norm() < 0.02 * plain.norm()


def test_time_embedding():
    e = time_embedding(torch.tensor([0.0, 3.0]), 4)
    assert e[0].tolist() == [0, 1, 0, 1]
    want = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    assert e[1].tolist() == pytest.approx(want)


@pytest.mark.parametrize(
    ("t", "want", "tolerance"),
    [
        (1, 0.9999, 1e-12),
        (10, 0.998105, 1e-6),
        (100, 0.897018, 1e-6),
        (250, 0.524085, 1e-6),
        (500, 0.078587, 1e-6),
        (750, 0.0033506, 1e-7),
        (1000, 4.03583e-5, 1e-10),
    ],
)
def test_schedule_anchors(t, want, tolerance):
    assert float(alpha_bars()[t - 1]) == pytest.approx(want, abs=tolerance)


def test_lambda_anchor_and_inverse():
    assert lam_of(1.0) == pytest.approx(-5.058837, abs=1e-6)
    for time in (1e-3, 0.0123, 0.5, 0.99951, 1.0):
        assert index_of(lam_of(time)) == pytest.approx(STEPS * time - 1, abs=1e-6)


def gaussian_noise(x: torch.Tensor, index: float) -> torch.Tensor:
    """Noise of data N(0, .5²): sigma x / (alpha² .25 + sigma²)."""
    lam = lam_of((index + 1) / STEPS)
    alpha2 = 1 / (1 + math.exp(-2 * lam))
    return math.sqrt(1 - alpha2) * x / (alpha2 * 0.25 + 1 - alpha2)


@pytest.mark.parametrize(
    ("order", "results"),
    [
        (1, {12: 0.408925, 24: 0.452210, 60: 0.480354}),
        (2, {12: 0.606563, 24: 0.523122, 60: 0.503502}),
        (3, {12: 0.526266, 24: 0.502312, 60: 0.500178}),
    ],
)
def test_solver_anchors(order, results):
    start = torch.ones(1, dtype=torch.float64)
    for evaluations, want in results.items():
        x = dpm_solve(gaussian_noise, start, [order] * (evaluations // order))
        assert float(x) == pytest.approx(want, abs=1e-6)


def test_the_default_of_twenty():
    x = dpm_solve(gaussian_noise, torch.ones(1, dtype=torch.float64), solver_orders(20))
    assert float(x) == pytest.approx(0.503474, abs=1e-6)
    many = dpm_solve(gaussian_noise, torch.ones(1, dtype=torch.float64), [3] * 400)
    assert float(many) == pytest.approx(0.500083, abs=1e-5)


def test_solver_orders():
    assert solver_orders(20) == [3] * 6 + [2]
    assert solver_orders(12) == [3] * 3 + [2, 1]
    assert solver_orders(13) == [3] * 4 + [1]
    assert solver_orders(5, 2) == [2, 2, 1]
    assert solver_orders(3) == [2, 1]
    assert all(sum(solver_orders(n, k)) == n for n in range(1, 40) for k in (1, 2, 3))
    with pytest.raises(ConfigError, match="order 4"):
        solver_orders(20, 4)


def test_the_result_is_clamped():
    far = torch.full((1,), 500.0)
    assert float(dpm_solve(gaussian_noise, far, [1])) == 1
    assert float(dpm_solve(gaussian_noise, far, [1], clamp=False)) > 1


def test_sample_repeats_and_keeps_the_mode():
    with seeded(0):
        net = UNet(1, 16)
    first, second = (dpm_solver.sample(net, (2, 1, 8, 8), generator(3), 5) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (2, 1, 8, 8)
    assert net.training
    assert bool((first.abs() <= 1).all())


def test_loss_by_hand():
    images, noise = torch.full((2, 1, 2, 2), 0.5), torch.full((2, 1, 2, 2), 2.0)
    t = torch.tensor([0, 999])
    bars = alpha_bars()[t]
    noisy = bars.sqrt() * 0.5 + (1 - bars).sqrt() * 2
    loss = ddpm_loss(lambda x, _: x, images, t, noise)
    assert float(loss) == pytest.approx(float((noisy - 2).square().mean()), rel=1e-5)


def test_moving_average():
    with seeded(0):
        net, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    want = 0.9 * average.weight.detach() + 0.1 * net.weight.detach()
    follow(average, net, 0.9)
    torch.testing.assert_close(average.weight.detach(), want)
