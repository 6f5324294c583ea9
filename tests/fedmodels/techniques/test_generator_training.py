"""GANs that train as one: each comes to what a plain loop over its own images comes to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fedmodels.nets.generative import gan
from fedmodels.numerics.randomness import generator, seeded
from fedmodels.techniques import generator_training
from fedmodels.techniques.generator_training import Course, Lesson, load, tensors_of
from fedmodels.techniques.generators import Family, Painter
from fedmodels.tensors.bundle import Weights

SHAPE = (1, 8, 8)
LIMITS = torch.zeros(1), torch.ones(1)


def family_of(arch: str = "wgan", batch_size: int = 6, **settings: object) -> Family:
    given = {"width": 4, "epochs": 3, "lr": 1e-3, **settings}
    return Family(input_shape=SHAPE, arch=arch, batch_size=batch_size, **given)  # type: ignore[arg-type]


def lessons_of(family: Family, sizes: tuple[int, ...]) -> list[Lesson]:
    draw = generator(7)
    return [
        Lesson(family.fresh(n, LIMITS), torch.rand(size, *SHAPE, generator=draw) * 2 - 1, 100 + n)
        for n, size in enumerate(sizes)
    ]


def by_hand(family: Family, lesson: Lesson) -> Weights:
    """Train one GAN by the loop of the paper, with torch's own layers and optimiser."""
    width, epochs, lr = family.usual()
    with seeded(0):
        maker = gan.Generator(SHAPE, width, family.arch)
        critic = gan.Critic(SHAPE, width, family.arch)
    load(maker, lesson.tensors, "net/")
    load(critic, lesson.tensors, "critic/")
    adams = [torch.optim.Adam(net.parameters(), lr, (0.5, 0.9)) for net in (maker, critic)]
    noise, step = generator(lesson.seed), 0

    def paint(count: int) -> Tensor:
        return maker.paint(torch.randn(count, gan.LATENT, generator=noise))

    for _ in range(epochs):
        order = torch.randperm(len(lesson.images), generator=noise)
        for index in order.split(family.batch_size):
            real, fake = lesson.images[index], paint(len(index)).detach()
            u = torch.rand(len(index), generator=noise).view(-1, 1, 1, 1)
            between = (u * real + (1 - u) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
            adams[1].zero_grad()
            (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
            adams[1].step()
            step += 1
            if step % 5 == 0:
                adams[0].zero_grad()
                (-critic(paint(family.batch_size)).mean()).backward()
                adams[0].step()
    return {**tensors_of("net/", maker), **tensors_of("critic/", critic)}


def assert_close(family: Family, one: Weights, other: Weights) -> None:
    """Compare weights of critics and images drawn.

    A bias before batch normalisation has no gradient but rounding, of which Adam makes whole steps;
    nor has the bias of all scores.
    """
    assert one.keys() == other.keys()
    of_scores = [key for key in one if key.startswith("critic/") and one[key].shape == (1,)]
    for key, tensor in one.items():
        if key.startswith(("critic/", "net/fc")) and key not in of_scores:
            torch.testing.assert_close(tensor, other[key], rtol=2e-3, atol=2e-4)
    drawn = [Painter(family, tensors).images(8, 1) for tensors in (one, other)]
    torch.testing.assert_close(*drawn, rtol=0, atol=2e-3)


@pytest.mark.parametrize("arch", ["wgan", "dcgan"])
@pytest.mark.parametrize("sizes", [(14,), (6, 6, 6), (14, 9, 4, 12, 3)], ids=str)
def test_each_comes_to_what_a_loop_of_its_own_comes_to(arch, sizes):
    """Equal classes, and classes with other numbers of batches, and other rests."""
    family = family_of(arch)
    lessons = lessons_of(family, sizes)
    for lesson, found in zip(lessons, family.trained(lessons), strict=True):
        expected = by_hand(family, lesson)
        assert_close(
            family, {k: t for k, t in found.items() if not k.startswith("affine/")}, expected
        )


def test_training_moves_the_fakes_towards_the_data():
    family = family_of(batch_size=16, epochs=240, lr=3e-3)
    start, images = family.fresh(0, LIMITS), torch.full((16, *SHAPE), 0.5)
    (found,) = family.trained([Lesson(start, images, 0)])
    before, after = (
        float((Painter(family, tensors).images(32, 1) - 0.5).abs().mean())
        for tensors in (start, found)
    )
    assert after < before / 2


def test_a_class_moves_no_other():
    """Weights that are not finite stay where they are."""
    family = family_of()
    lessons = lessons_of(family, (6, 6, 6))
    lessons[1].images.fill_(torch.nan)
    first, broken, last = family.trained(lessons)
    assert bool(broken["critic/layers.0.weight"].isnan().any())
    for lesson, found in ((lessons[0], first), (lessons[2], last)):
        assert_close(family, found, family.trained([lesson])[0])


def test_moments_go_on_by_class():
    """One that has trained before counts its optimiser's steps by itself."""
    family = family_of(moments=True)
    lessons = lessons_of(family, (9, 9, 14))
    begun = family.trained(lessons[:1])
    stored = {key: tensor.contiguous() for key, tensor in begun[0].items()}  # as a file keeps them
    lessons[0] = Lesson(stored, lessons[0].images, 5)
    for lesson, found in zip(lessons, family.trained(lessons), strict=True):
        assert_close(family, found, family.trained([lesson])[0])
        steps = 3 * -(-len(lesson.images) // 6)
        before = lesson.tensors.get("moments/critic/0/step", torch.tensor(0))
        assert int(found["moments/critic/0/step"]) == steps + int(before)


@pytest.mark.parametrize("arch", ["wgan", "dcgan"])
@pytest.mark.parametrize("side", [8, 16])
def test_what_a_fused_step_takes_has_one_order_in_memory(arch, side):
    """It takes parameters, gradients and moments number by number."""
    shape = (2, side, side)
    family = Family(input_shape=shape, arch=arch, width=4, epochs=5, lr=1e-3, moments=True)
    images = torch.rand(6, *shape) * 2 - 1
    (begun,) = family.trained([Lesson(family.fresh(0, (torch.zeros(2), torch.ones(2))), images, 1)])
    stored = {key: tensor.contiguous() for key, tensor in begun.items()}
    course = Course(
        input_shape=shape, arch=arch, width=4, epochs=5, batch_size=6, lr=1e-3, moments=True
    )
    stack = generator_training._Stack(
        course, [generator_training._Learner(course, Lesson(stored, images, n)) for n in range(2)]
    )
    assert len(list(stack.steps(1, 5))) == 5
    for role, net in stack.nets.items():
        for parameter in net.parameters():
            state = stack.adams[role].state[parameter]
            beside = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
            places = torch.arange(parameter.numel())  # as the storage has them
            order = places.as_strided(parameter.shape, parameter.stride())
            assert all(torch.equal(places.as_strided(t.shape, t.stride()), order) for t in beside)


def test_a_stack_is_bounded_and_its_batches_alike(monkeypatch):
    """A CPU stacks small canvases alone, and nobody fills its batch beyond four times its size."""
    made: list[list[int]] = []

    class Noted(generator_training._Stack):
        def __init__(self, course: Course, learners: Sequence[generator_training._Learner]) -> None:
            made.append([len(each.images) for each in learners])
            super().__init__(course, learners)

    monkeypatch.setattr(generator_training, "_Stack", Noted)
    family = family_of(batch_size=64, epochs=1)
    family.trained(lessons_of(family, (64,) * 12))
    assert made == [[64] * 10, [64] * 2]
    made.clear()
    family.trained(lessons_of(family, (40, 4, 16, 15, 64)))
    assert made == [[64, 40, 16], [15, 4]]
    made.clear()
    large = Family(input_shape=(1, 28, 28), width=2, epochs=1)
    images = torch.zeros(64, 1, 28, 28)
    large.trained([Lesson(large.fresh(n, LIMITS), images, n) for n in range(2)])
    assert made == [[64], [64]]
