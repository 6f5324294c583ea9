"""The closed forms of GANs' gradients, beside what autograd finds for each net alone."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from fedmodels.nets.generative import gan
from fedmodels.nets.generative.gan_groups import (
    BatchNorm,
    Layer,
    grouped,
    image_slopes,
    improve,
    learn,
    rows_of,
    run,
    score,
)
from fedmodels.numerics.randomness import seeded

SIZES = 3, 5, 5
"""Images of each critic."""


def critics_of(side: int, arch: str, channels: int = 2) -> list[gan.Critic]:
    with seeded(3):
        return [gan.Critic((channels, side, side), 4, arch) for _ in SIZES]


def together(critics: list[gan.Critic], side: int, arch: str, channels: int = 2) -> list[Layer]:
    net = gan.Critic((channels, side, side), 4, arch)
    grouped(net, len(critics), rows_of([critic.state_dict() for critic in critics]))
    return cast(list[Layer], list(net.layers))


def loss_by_autograd(
    critic: gan.Critic, real: Tensor, fake: Tensor, mix: Tensor, penalty: float
) -> Tensor:
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    apart = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    loss: Tensor = critic(fake).mean() - critic(real).mean() + penalty * apart
    return loss


@pytest.mark.parametrize("arch", ["wgan", "dcgan"])
@pytest.mark.parametrize("side", [8, 16, 32])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_gradient_is_that_of_autograd(side: int, arch: str, channels: int) -> None:
    """Products with a matrix at 8x8, torch's convolutions beyond; batches with a rest."""
    critics, most = critics_of(side, arch, channels), max(SIZES)
    shape, draw = (2, 3, most, channels, side, side), torch.Generator().manual_seed(1)
    real, fake = torch.randn(shape, generator=draw)
    mix, share = (
        torch.rand(3, most, generator=torch.Generator().manual_seed(2)),
        torch.zeros(3, most),
    )
    for row, size in enumerate(SIZES):
        share[row, :size] = 1 / size
    layers = together(critics, side, arch, channels)
    cells = (layers[0].seen(images.permute(0, 1, 3, 4, 2)) for images in (real, fake))
    losses = learn(layers, *cells, mix, share, 10.0)
    for row, (critic, size) in enumerate(zip(critics, SIZES, strict=True)):
        u = mix[row, :size].view(-1, 1, 1, 1)
        expected = loss_by_autograd(critic, real[row, :size], fake[row, :size], u, 10.0)
        expected.backward()
        torch.testing.assert_close(losses[row], expected.detach(), rtol=1e-4, atol=1e-5)
    found = [p.grad for layer in layers for p in layer.parameters()]
    for number, grad in enumerate(found):
        alone = [list(critic.parameters())[number].grad for critic in critics]
        torch.testing.assert_close(grad, torch.cat(alone), rtol=1e-3, atol=1e-5)


def test_a_bias_of_all_scores_stays_where_it_is() -> None:
    """It has no gradient, and Adam makes whole steps of the rounding of one."""
    layers = together(critics_of(8, "wgan"), 8, "wgan")
    images, share = torch.randn(2, 3, 7, 8, 8, 2), torch.full((3, 7), 1 / 7)
    learn(layers, *map(layers[0].seen, images), torch.rand(3, 7), share, 10.0)
    assert layers[-1].bias.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("norm", "penalty"), [(3.0, 40.0), (1.0, 0.0)])
def test_gradient_penalty_of_a_linear_critic(norm: float, penalty: float) -> None:
    """pfedgrp.md, anchor 4: biases that keep the leaky ReLUs open make a critic linear."""
    critics = critics_of(8, "wgan")
    for critic in critics:
        for layer in (0, 2):
            critic.layers[layer].bias.data.fill_(100)
        x = torch.randn(1, 2, 8, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(critic(x).sum(), x)
        critic.layers[-1].weight.data *= norm / slope.norm()
    layers = together(critics, 8, "wgan")
    images = layers[0].seen(torch.randn(3, 6, 8, 8, 2))
    share = torch.full((3, 6), 1 / 6)
    found = learn(layers, images, images, torch.rand(3, 6), share, 10.0)
    torch.testing.assert_close(found, torch.full((3,), penalty), rtol=1e-3, atol=1e-3)


def test_a_critic_without_slope_has_a_penalty_and_no_step() -> None:
    """The norm of zeros has no direction; autograd takes 0 for it."""
    critics = critics_of(8, "wgan")
    for critic in critics:
        critic.layers[-1].weight.data.zero_()
    layers = together(critics, 8, "wgan")
    images, share = layers[0].seen(torch.randn(3, 6, 8, 8, 2)), torch.full((3, 6), 1 / 6)
    losses = learn(layers, images, images, torch.rand(3, 6), share, 10.0)
    assert losses.tolist() == pytest.approx([10, 10, 10])
    for layer in layers:
        assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())
        assert not any(bool(p.grad.any()) for p in layer.parameters() if layer is not layers[-1])


def test_slopes_of_images() -> None:
    critics = critics_of(8, "wgan")
    layers = together(critics, 8, "wgan")
    images, share = torch.randn(3, 4, 2, 8, 8), torch.full((3, 4), 0.25)
    inputs, scores = score(layers, layers[0].seen(images.permute(0, 1, 3, 4, 2)))
    found = image_slopes(layers, inputs, -share)
    for row, critic in enumerate(critics):
        x = images[row].clone().requires_grad_()
        alone = critic(x)
        torch.testing.assert_close(scores[row], alone)
        (expected,) = torch.autograd.grad(-alone.mean(), x)
        torch.testing.assert_close(found[row].permute(0, 3, 1, 2), expected)


@pytest.mark.parametrize("arch", ["wgan", "dcgan"])
@pytest.mark.parametrize("side", [8, 16, 32])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_generators_gradient_is_that_of_autograd(side: int, arch: str, channels: int) -> None:
    """Through its batch normalisation: the mean and the variance move with the images."""
    with seeded(3):
        makers = [gan.Generator((channels, side, side), 4, arch) for _ in SIZES]
    net = gan.Generator((channels, side, side), 4, arch)
    grouped(net, len(makers), rows_of([maker.state_dict() for maker in makers]))
    layers = cast(list[Layer], net.steps)
    draw = torch.Generator().manual_seed(1)
    z = torch.randn(3, 6, gan.LATENT, generator=draw)
    slope = torch.randn(3, 6, side, side, channels, generator=draw)
    for layer in layers:
        if isinstance(layer, BatchNorm):
            layer.share = torch.full((3, 1, 6), 1 / 6)
    with torch.no_grad():
        inputs, painted = run(layers, z)
        improve(layers, inputs, slope.clone())
    for row, maker in enumerate(makers):
        alone = maker.paint(z[row])
        torch.testing.assert_close(painted[row].permute(0, 3, 1, 2), alone, rtol=1e-4, atol=1e-5)
        (alone * slope[row].permute(0, 3, 1, 2)).sum().backward()
    for number, parameter in enumerate(net.parameters()):
        expected = torch.cat([list(maker.parameters())[number].grad for maker in makers])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-4)
