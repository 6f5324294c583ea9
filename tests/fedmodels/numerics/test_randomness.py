import threading

import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.numerics.randomness import PURPOSES, derive_seed, generator, seeded, started


def test_seeds_differ_in_every_argument_and_fit_63_bits():
    seeds = {
        derive_seed(run, client, interaction, purpose)
        for run in (0, 1, 10)
        for client in (0, 1, 10, "server", "evaluator")
        for interaction in (0, 1, 10)
        for purpose in PURPOSES
    }
    assert len(seeds) == 3 * 5 * 3 * len(PURPOSES)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_never_changes():
    # A run that is resumed by a later version must draw the same numbers.
    assert derive_seed(0, 3, 7, "order") == 6119420178661444142


def test_unknown_purpose():
    with pytest.raises(ConfigError, match=r"known: init, order, .*Did you mean 'order'"):
        derive_seed(0, 0, 0, "ordre")


def test_generator_is_fresh():
    first, second = (torch.rand(4, generator=generator(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.rand(4, generator=generator(6)))


def test_seeded_repeats_inside_and_restores_outside():
    before = torch.random.get_rng_state()
    with seeded(1):
        first = nn.Linear(3, 3).weight.detach()
    with seeded(1), seeded(2):
        pass
    with seeded(1):
        with seeded(2):
            torch.rand(5)
        second = nn.Linear(3, 3).weight.detach()
    assert torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_seeded_restores_after_an_error():
    before = torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match="negative"), seeded(1):
        torch.rand(-1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_work_that_is_started_may_have_threads_that_seed():
    before = torch.random.get_rng_state()
    drawn = []

    def build():
        with seeded(2):
            drawn.append(torch.rand(3))

    with started(1):
        first = torch.rand(3)
        thread = threading.Thread(target=build, daemon=True)
        thread.start()
        thread.join(10)
        second = torch.rand(3)
    assert not thread.is_alive()
    assert torch.equal(torch.random.get_rng_state(), before)
    with seeded(1):
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3), second)
    with seeded(2):
        assert torch.equal(torch.rand(3), drawn[0])


def test_seeded_blocks_of_two_threads_draw_as_each_alone():
    alone = {}
    for seed in (1, 2):
        with seeded(seed):
            alone[seed] = torch.rand(3)
    drawn, began, ended = {}, {1: threading.Event(), 2: threading.Event()}, threading.Event()

    def first():
        with seeded(1):
            began[1].set()
            began[2].wait(0.3)  # the other would begin in this time if it could
            drawn[1] = torch.rand(3)
        ended.set()

    def second():
        began[1].wait()
        with seeded(2):
            began[2].set()
            ended.wait(30)  # the first is over before this one draws
            drawn[2] = torch.rand(3)

    threads = [threading.Thread(target=each) for each in (first, second)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(torch.equal(drawn[seed], alone[seed]) for seed in (1, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_seeded_covers_cuda():
    torch.zeros(1, device="cuda")
    before = torch.cuda.get_rng_state()
    with seeded(1):
        first = torch.rand(3, device="cuda")
    with seeded(1):
        second = torch.rand(3, device="cuda")
    assert torch.equal(first, second)
    assert torch.equal(torch.cuda.get_rng_state(), before)
