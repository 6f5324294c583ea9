"""Images rebuilt from updates of weights and from prototypes, and how well they match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from benchmarks.attacks.uploads import Client
from fedmodels.nets.split import SplitNet
from fedmodels.training.contexts import ClientContext

Examples = tuple[Tensor, Tensor]
STEPS, VARIATION = 300, 1e-2
"""Steps of a search, and the weight of the total variation in its objective."""


def update_of(client: Client) -> dict[str, Tensor]:
    """Return received minus sent weights, which point along the gradient of one step."""
    sent, got = client.done.upload.weights, client.payload.weights
    return {key: got[key] - w for key, w in sent.items()}


def searched(ctx: ClientContext, update: dict[str, Tensor], y: Tensor, seed: int) -> Tensor:
    """Return images (n, C, H, W) whose gradient at the received weights points along an update."""
    net = ctx.run.make_net()  # the weights of the first payload
    net.train()
    named = net.parameters_by_key()
    target = [update[key] for key in named]
    low, high = (float(edge.min()) for edge in ctx.stream.limits())

    def distance(x: Tensor) -> Tensor:
        loss = cross_entropy(net(x), y)
        grads = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        dots = sum((g * t).sum() for g, t in zip(grads, target, strict=True))
        sizes = [sum(each.square().sum() for each in vs) for vs in (grads, target)]
        return 1 - dots / (sizes[0] * sizes[1]).clamp_min(1e-24).sqrt()

    return descended(distance, (len(y), *ctx.run.problem.input_shape), (low, high), seed)


def descended(
    distance: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    limits: tuple[float, float],
    seed: int,
) -> Tensor:
    """Return images within the limits that minimise a distance: Adam on signs of gradients."""
    low, high = limits
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw).mul_((high - low) / 4).add_((low + high) / 2)
    x.clamp_(low, high).requires_grad_(True)
    rate = 0.05 * (high - low)
    optimizer = torch.optim.Adam([x], lr=rate)
    steps = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [STEPS * 3 // 8, STEPS * 5 // 8, STEPS * 7 // 8], gamma=0.1
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = distance(x) + VARIATION * variation(x) / (high - low)
        (x.grad,) = torch.autograd.grad(loss, [x])
        x.grad.sign_()
        optimizer.step()
        steps.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()


def variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, of columns and of rows."""
    return (x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()) / 2


def embedded(net: SplitNet, ctx: ClientContext, target: Tensor, seed: int) -> Tensor:
    """Return an image (1, C, H, W) whose embedding is close to a prototype (D,)."""
    net.eval()
    low, high = (float(edge.min()) for edge in ctx.stream.limits())
    size = target.square().sum().clamp_min(1e-12)

    def distance(x: Tensor) -> Tensor:
        return (net.features(x)[0] - target).square().sum() / size

    return descended(distance, (1, *ctx.run.problem.input_shape), (low, high), seed)


@dataclass(frozen=True)
class Rebuilt:
    """How well a rebuilt image matches the true one."""

    recognised: bool
    """Whether the image most like it is one that the message was made from."""
    likeness: float
    """The correlation with the true image."""
    chance: float
    """How often a random image of the class would be one of the message's."""


def judged(guess: Tensor, labels: Tensor, own: Examples, every: Examples) -> list[Rebuilt]:
    """Match each rebuilt image with a true one of its class; return how well they match.

    Args:
        guess: rebuilt images (n, …).
        labels: their classes (n,).
        own: the images that the message was made from, and their classes.
        every: the images among which the most similar one is looked for, and their classes.
    """
    from scipy.optimize import linear_sum_assignment

    likes = likeness(guess, own[0]).masked_fill(labels[:, None] != own[1], -1.0)
    rows, columns = linear_sum_assignment(-likes.numpy())
    return [
        _worth(guess[row], float(likes[row, column]), labels[row], own, every)
        for row, column in zip(rows, columns, strict=True)
    ]


def _worth(guess: Tensor, like: float, label: Tensor, own: Examples, every: Examples) -> Rebuilt:
    nearest = every[0][likeness(guess[None], every[0])[0].argmax()]
    known = any(torch.equal(nearest, x) for x in own[0])
    chance = int((own[1] == label).sum()) / int((every[1] == label).sum())
    return Rebuilt(known, like, chance)


def read_off(update: Mapping[str, Tensor], own: Examples, every: Examples) -> list[Rebuilt]:
    """Return how well each image can be read off the first layer, which is fully connected.

    A unit's update of weights over its update of the bias is a weighted mean of images. For
    each image, the unit that is most like it counts.
    """
    weight, bias = next(
        (w, update[key.removesuffix("weight") + "bias"])
        for key, w in update.items()
        if key.startswith("base/") and key.endswith("weight")
    )
    rows = weight / torch.where(bias.abs() > 1e-9, bias, torch.inf)[:, None]
    shown = rows[rows.abs().sum(1) > 0].view(-1, *own[0].shape[1:])
    likes = likeness(shown, own[0])
    units = likes.argmax(0)
    return [
        _worth(shown[unit], float(likes[unit, k]), own[1][k], own, every)
        for k, unit in enumerate(units)
    ]


def likeness(one: Tensor, other: Tensor) -> Tensor:
    """Return the correlations (n, m) of images (n, …) with images (m, …)."""
    a, b = (each.flatten(1) - each.flatten(1).mean(1, keepdim=True) for each in (one, other))
    return cosine_similarity(a[:, None], b[None], dim=2)
