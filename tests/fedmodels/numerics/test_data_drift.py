"""The tests behind drift: by hand, right by chance, and with power where something moved."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import f_oneway, ttest_ind

from fedmodels.numerics import data_drift
from fedmodels.numerics.data_drift import MAX_CELLS, Summary, Watched, moved
from fedmodels.numerics.data_drift_numbers import MAX_VALUES, Numbers, Words


def watched(x: torch.Tensor, y: torch.Tensor, classes: int = 6, sessions=None) -> Watched:
    numbers = Numbers(tuple(x.shape[1:]))
    return Watched(numbers.of(x), numbers.spreads, y, y, classes, sessions)


def drawn(rng: np.random.Generator, n: int, *shape: int, classes: int = 6) -> tuple:
    x = torch.from_numpy(rng.standard_normal((n, *shape)).astype(np.float32))
    return x, torch.from_numpy(rng.integers(0, classes, n))


HALVES = slice(200), slice(200, 400)


def test_cells_are_classes_in_sessions():
    """Two classes in three sessions; class 1 has three examples in the last, which are too few."""
    y = torch.tensor([0] * 12 + [1] * 11)
    sessions = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    x = torch.arange(23.0)[:, None]
    found = Summary.of(4, watched(x, y, 2, sessions))
    assert int(found.task) == 4
    assert found.classes.tolist() == [0, 0, 0, 1, 1]
    assert found.sizes.tolist() == [4] * 5
    assert found.cells[:, 0].tolist() == [1.5, 5.5, 9.5, 13.5, 17.5]
    spread = math.log(math.sqrt(5 / 3))  # of 0, 1, 2, 3
    assert found.cells[:, 1].tolist() == pytest.approx([spread] * 5)
    assert found.mix.tolist() == [[4, 4], [4, 4], [4, 3]]


def test_what_is_kept_of_two_classes_is_kept_of_the_one_that_they_became():
    y = torch.tensor([0, 1, 2] * 10)
    found = Summary.of(0, watched(torch.arange(30.0)[:, None], y, 3)).merged([(0, 2), (4, 2)])
    assert {*found.classes.tolist()} == {1, 2}
    assert found.mix.sum(0).tolist() == [0, 10, 20]


def test_without_sessions_a_class_is_cut_where_there_are_few():
    y = torch.tensor([0, 1] * 15)
    found = Summary.of(0, watched(torch.zeros(30, 1), y, 2))
    assert found.classes.tolist() == [0] * 3 + [1] * 3
    assert found.sizes.tolist() == [5] * 6
    assert found.mix.sum(1).tolist() == [5, 5, 4, 4, 4, 4, 4], (
        "seven blocks, as eight are too small"
    )
    one = Summary.of(0, watched(torch.zeros(60, 1), torch.arange(60) % 10, 10))
    assert one.sizes.tolist() == [6] * 10, "ten classes are cells enough"


def test_the_shift_within_one_class_is_students_test(monkeypatch):
    """With one class, cells of equal size and plain variances it is the test of two samples."""
    rng = np.random.default_rng(1)
    x, y = drawn(rng, 120, 1, classes=1)
    x += torch.from_numpy(rng.standard_normal(12).astype(np.float32)).repeat_interleave(10)[:, None]
    monkeypatch.setattr(data_drift, "MANY", 99)
    earlier, now = (
        Summary.of(t, watched(x[s], y[s], 1)) for t, s in enumerate((slice(60), slice(60, 120)))
    )
    found, amounts = data_drift._within_classes([earlier], now, 0.0)
    wanted = ttest_ind(earlier.cells[:, 0].numpy(), now.cells[:, 0].numpy()).pvalue
    least = (earlier.noise + now.noise).item() / 2 / 10
    pooled = (earlier.cells[:, 0].var() + now.cells[:, 0].var()).item() / 2
    assert pooled > least, "else the floor decides"
    assert found[0] == pytest.approx(wanted, rel=1e-4)
    shift = (now.cells[:, 0].mean() - earlier.cells[:, 0].mean()).item()
    sigma = math.sqrt((earlier.noise + now.noise).item() / 2)
    assert amounts[0] == pytest.approx(math.erf(abs(shift) / sigma / 2 / math.sqrt(2)), rel=1e-4)


def test_with_two_classes_it_is_an_analysis_of_variance(monkeypatch):
    """Cells modelled by class and task: the square of t is F of the task beside the class."""
    monkeypatch.setattr(data_drift, "MANY", 99)
    y = torch.tensor([0] * 12 + [1] * 12)
    values = torch.tensor([1.0, 2.0, 4.0, 11.0, 12.0, 13.0])  # by cell
    later = values + torch.tensor([2.0, 1.0, 3.0, 2.0, 4.0, 0.0])
    tiny = torch.tensor([-1e-3, 1e-3, -1e-3, 1e-3]).repeat(6)
    before, now = (
        Summary.of(t, watched((v.repeat_interleave(4) + tiny)[:, None], y, 2))
        for t, v in enumerate((values, later))
    )
    found, _ = data_drift._within_classes([before], now, 0.0)
    residuals = [v - v.reshape(2, 3).mean(1).repeat_interleave(3) for v in (values, later)]
    left = sum(float((r**2).sum()) for r in residuals)  # within class and task
    shifts = (later - values).reshape(2, 3).mean(1)
    left += 1.5 * float(((shifts - shifts.mean()) ** 2).sum())
    t = float(shifts.mean()) / math.sqrt(left / 9 / 3)
    from scipy.stats import t as student

    assert found[0] == pytest.approx(2 * student.sf(abs(t), 9), rel=1e-4)


def test_variances_are_moderated_as_in_the_paper():
    """Of numbers whose variances are alike but for chance, all get the common one."""
    rng = np.random.default_rng(0)
    alike = rng.chisquare(4, 500) / 4
    found, freedom = data_drift.moderated(3 * alike, np.ones(500), 4)
    assert freedom > 50
    assert found.std() < 0.15 * (3 * alike).std()
    assert found.mean() == pytest.approx(3, rel=0.1)
    unlike = alike * 1 / (rng.chisquare(4, 500) / 4)
    assert 2 < data_drift.moderated(unlike, np.ones(500), 4)[1] - 4 < 8, "a prior of 4 was drawn"
    assert data_drift._inverse_trigamma(math.pi**2 / 6) == pytest.approx(1.0)
    few = np.array([1.0, 2.0])
    assert data_drift.moderated(few, np.ones(2), 4) == (pytest.approx(few), 4.0)


def test_chance_is_told_rarely():
    """Of 40 comparisons of equal distributions, at 0.1 about four at most."""
    rng, p = np.random.default_rng(5), list[float]()
    for _ in range(40):
        (x, y), (u, v) = drawn(rng, 120, 8), drawn(rng, 120, 8)
        found = moved([Summary.of(0, watched(x, y))], None, Summary.of(1, watched(u, v)))
        assert found is not None
        p.append(found.p)
    assert sum(one < 0.1 for one in p) <= 7


def test_one_number_of_768_by_four_deviations_is_found_and_named():
    rng = np.random.default_rng(2)
    x, y = drawn(rng, 300, 768)
    x[150:, 123] += 4
    earlier, now = (
        Summary.of(t, watched(x[s], y[s])) for t, s in enumerate((slice(150), slice(150, 300)))
    )
    found = moved([earlier], None, now)
    assert found is not None
    assert found.p < 1e-6
    assert found.others == (123,)
    words = Words("input", (768,), 6)
    assert words.name(found.number) == "the mean of number 123"
    assert "the mean of number 123, by 4" in words.line(found.number, 0.9545, found.p)


def test_dependent_halves_are_no_drift():
    """Each class has a level of its own in each half, as a person sits down anew.

    Examples taken for independent are sure of a move (F test), the cells are not.
    """
    rng, told, sure = np.random.default_rng(3), 0, 0
    for _ in range(20):
        x, y = drawn(rng, 240, 9)
        half = torch.arange(240) // 120
        x += torch.from_numpy(rng.standard_normal((2, 6, 9)).astype(np.float32))[half, y]
        a, b = (Summary.of(t, watched(x[half == t], y[half == t])) for t in (0, 1))
        found = moved([a], None, b)
        assert found is not None
        told += found.p < 0.01
        sure += min(f_oneway(x[half == 0].numpy(), x[half == 1].numpy()).pvalue) * 9 < 0.01
    assert sure > 10
    assert told <= 1


def test_a_class_that_comes_more_often_is_told():
    rng = np.random.default_rng(4)
    x, y = drawn(rng, 400, 4)
    more = torch.from_numpy(rng.choice(6, 200, p=[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]))
    now = Summary.of(1, watched(x[200:], more))
    found = moved([Summary.of(0, watched(x[:200], y[:200]))], None, now)
    assert found is not None
    assert found.p < 1e-3
    names = ["walk", "sit", "run", "lie", "climb", "fall"]
    assert Words("input", (4,), 6, (), names).name(found.number) == "the share of class 'walk'"
    assert "points (p = " in Words("input", (4,), 6, (), names).line(found.number, 0.33, found.p)
    only = Summary.of(1, watched(x[200:], torch.full((200,), 3)))
    none_left = moved([Summary.of(0, watched(x[:200], torch.zeros(200).long()))], None, only)
    assert none_left is not None, "no class is common: shares alone"
    assert none_left.amount == 1


def test_a_reference_sees_what_the_task_before_does_not():
    """0.15 deviations a month: no month differs from the one before."""
    rng, kept = np.random.default_rng(6), list[Summary]()
    for month in range(12):
        x, y = drawn(rng, 200, 6)
        x[:, 2] += 0.15 * month
        kept.append(Summary.of(month, watched(x, y)))
    steps = [moved([a], None, b) for a, b in itertools.pairwise(kept)]
    assert all(one is not None and one.p > 1e-3 for one in steps)
    far = [moved(kept[:3], kept[t - 1], kept[t]) for t in range(7, 12)]
    assert all(one is not None and one.p < 1e-4 and one.number == 2 for one in far)


def waves(rng: np.random.Generator, cycles: float) -> Summary:
    """Return 120 windows of a wave in noise, each with a phase of its own."""
    at = cycles * np.arange(64) / 64 + rng.random((120, 1))
    x = np.sin(2 * np.pi * at) + 0.3 * rng.standard_normal((120, 64))
    windows = torch.from_numpy(x.astype(np.float32))[:, :, None]
    return Summary.of(0, watched(windows, torch.arange(120) % 6))


def test_another_sampling_rate_shows_in_the_spectrum():
    """No mean or spread says so."""
    rng = np.random.default_rng(8)
    found = moved([waves(rng, 5)], None, waves(rng, 10))
    assert found is not None
    assert found.p < 1e-9
    octaves = [Words("input", (64, 1), 6).name(place) for place in found.others[:2]]
    assert sorted(octaves) == [f"the power of channel 0 in octave {n} of 5" for n in (3, 4)]
    same = moved([waves(rng, 5)], None, waves(rng, 5))
    assert same is not None
    assert same.p > 0.05
    assert Numbers((3, 32, 32)).octaves == Numbers((9,)).octaves == Numbers((2, 4)).octaves == ()
    assert Numbers((4096, 2)).octaves == (1, *(2**n for n in range(4, 11)))
    silent = Numbers((64, 2)).of(torch.zeros(3, 64, 2))
    assert bool(torch.isfinite(silent).all())


def test_columns_that_moved_are_found_by_all_of_their_numbers():
    """Of 20 columns of ten numbers, two move; in 40 pairs without a move, hardly one is named."""
    rng, columns = np.random.default_rng(9), [n // 10 for n in range(200)] + [*range(20, 26)]
    x, y = drawn(rng, 400, 200)
    x[200:, 30:40] += 0.8
    x[200:, 170] += 2
    of = [Summary.of(t, Watched(x[s], 0, y[s], y[s], 6)) for t, s in enumerate(HALVES)]
    found = moved(of[:1], None, of[1], columns=columns)
    assert found is not None
    assert [columns[place] for place in found.others] == [17, 3]
    assert found.number == 170
    named = 0
    for _ in range(40):
        x, y = drawn(rng, 400, 200)
        of = [Summary.of(t, Watched(x[s], 0, y[s], y[s], 6)) for t, s in enumerate(HALVES)]
        none = moved(of[:1], None, of[1], columns=columns)
        assert none is not None
        named += bool(none.others)
    assert named <= 1


def test_what_stands_still_is_no_drift_and_what_begins_to_move_is():
    y = torch.arange(60) % 6
    still = Summary.of(0, watched(torch.ones(60, 3), y))
    found = moved([still], None, Summary.of(1, watched(torch.ones(60, 3), y)))
    assert found is not None
    assert (found.p, found.amount) == (1, 0)
    now = torch.ones(60, 3)
    now[:, 1] = 2
    found = moved([still], None, Summary.of(1, watched(now, y)))
    assert found is not None
    assert (found.number, found.amount) == (1, 1)
    assert found.p < 1e-6


def test_a_summary_survives_as_tensors_and_is_bounded():
    rng = np.random.default_rng(7)
    x, y = drawn(rng, 1000, 900, classes=100)
    found = Summary.of(3, watched(x, y, 100))
    assert found.cells.shape == (MAX_CELLS, MAX_VALUES)
    again = Summary.under(found.tensors("drift/0"), "drift/0")
    assert again is not None
    assert all(torch.equal(getattr(again, k), v) for k, v in vars(found).items())
    assert Summary.under({}, "drift/0") is None
    assert sum(t.nbytes for t in found.tensors("").values()) < 200_000
    grown = Summary.of(4, watched(x[:, :900], y, 101))
    assert moved([found], None, grown) is not None, "a class has come since"


@pytest.mark.parametrize(
    ("shape", "count", "named"),
    [
        ((3,), 6, {0: "the mean of 'b'", 4: "how much 'c' varies from example to example"}),
        (
            (128, 3),
            411,
            {
                1: "the mean of 'c' within an example",
                9: "'b' at step 3 of 128",
                390: "the power of 'b' in octave 1 of 6",
                406: "the power of 'c' in octave 6 of 6",
                410: "how much the mean of 'd' varies",
            },
        ),
        (
            (3, 32, 32),
            777,
            {3: "the spread of 'b' within an example", 6: "'b' at row 0 of 16, column 0 of 16"},
        ),
        ((1000,), 784, {5: "the mean of neighbourhood 5 of 784"}),
        ((300, 300, 2), 784, {}),
    ],
)
def test_numbers_have_names(shape, count, named):
    numbers = Numbers(shape)
    x = torch.randn(2, *shape)
    assert numbers.of(x).shape[1] + numbers.spreads == numbers.count
    assert numbers.count <= count + 64
    for place, name in named.items():
        assert numbers.name(place, ("b", "c", "d")).startswith(name)
    names = {numbers.name(place) for place in range(numbers.count)}
    assert len(names) == numbers.count
