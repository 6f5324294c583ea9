"""The test behind drift: scipy's where all is kept, near it from quantiles, and right by chance."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import ks_2samp

from fedmodels.numerics.data_drift import (
    ALPHA,
    MAX_NUMBERS,
    QUANTILES,
    Summary,
    drift,
    reduced,
)


def drawn(n: int, d: int = 1, shift: float = 0.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + shift


def test_by_hand():
    """One number, 4 earlier and 2 present examples.

    At 2, three quarters of the earlier ones lie at or below, and none of the present ones.
    """
    furthest, _ = drift(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([[2.5], [9.0]]))
    assert furthest == 0.75


@pytest.mark.parametrize(("m", "n", "shift"), [(7, 5, 0.0), (200, 90, 0.1), (300, 400, 0.5)])
def test_it_is_scipys_test_where_all_is_kept(m, n, shift):
    earlier, present = drawn(m), drawn(n, shift=shift, seed=1)
    wanted = ks_2samp(earlier[:, 0].numpy(), present[:, 0].numpy(), method="asymp")
    furthest, p = drift(earlier, present)
    assert furthest == pytest.approx(wanted.statistic, abs=1e-7)
    assert p == pytest.approx(wanted.pvalue, rel=1e-3)


@pytest.mark.parametrize("m", [1, 3, 64, 333])
@pytest.mark.parametrize("whole", [False, True])
def test_quantiles_move_the_statistic_by_little(m, whole):
    """Also of values that many examples share."""
    earlier, present = drawn(m, 3), drawn(50, 3, 0.3, seed=1)
    if whole:
        earlier, present = earlier.round(), present.round()
    exact, _ = drift(earlier, present)
    summary = Summary.of(2, earlier)
    found, p = summary.drift(present)
    assert found == pytest.approx(exact, abs=1 / (2 * QUANTILES) + 1e-6)
    assert p >= drift(earlier, present)[1] - 1e-9, "never surer than with all examples"
    again = Summary.under(summary.tensors("x/now"), "x/now")
    assert again is not None
    assert (again.task, again.count) == (2, m)
    assert again.drift(present) == (found, p)
    assert Summary.under({}, "x/now") is None


def test_chance_alone_is_told_rarely_and_a_shift_always():
    """Of 100 pairs of equal distributions with ten numbers each, about one at most."""
    told = sum(
        Summary.of(0, drawn(150, 10, seed=seed)).drift(drawn(150, 10, seed=seed + 1000))[1] < ALPHA
        for seed in range(100)
    )
    assert told <= 3
    assert Summary.of(0, drawn(150, 10)).drift(drawn(150, 10, 1.0, seed=1))[1] < ALPHA
    assert drift(drawn(9), drawn(9))[0] == 0


def test_long_examples_become_few_numbers_alike():
    x = drawn(6, 100).reshape(6, 4, 25)
    one, other = (reduced(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.shape == (6, MAX_NUMBERS)
    assert torch.equal(one, other)
    assert torch.equal(reduced(x[:, 0], torch.Generator()), x[:, 0])
