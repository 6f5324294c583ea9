"""The mean behind sums of groups of uploads, and when its bits are those of the flat mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.errors import PayloadError
from fedmodels.tensors.packed_weights import PackedWeights
from fedmodels.tensors.packed_weights import packed as in_a_block
from fedmodels.tensors.weighted_mean import RunningMean, weighted_mean
from fedplugins.relays.grouped_intake import mean_of_sums

DTYPES = {"base/steps": torch.int64, "base/w": torch.float32}


def packed(values: list[float], steps: int) -> PackedWeights:
    return in_a_block({"base/steps": torch.tensor(steps), "base/w": torch.tensor(values)})


def sums_of(uploads, counts):
    running = RunningMean()
    running.add(uploads, counts)
    return running.sums()


def in_groups(uploads, counts, cut):
    """Return the mean over uploads before and after a cut, each summed alone."""
    groups = [slice(0, cut), slice(cut, None)]
    sums = [sums_of(uploads[g], counts[g]) for g in groups]
    return mean_of_sums([s for s in sums if s is not None], sum(counts), DTYPES)


def test_the_sums_of_a_group_by_hand():
    sums = sums_of([packed([1.0, -2.0], 4), packed([0.5, 8.0], 9)], [2, 6])
    assert sums["base/w"].dtype == torch.float64
    assert sums["base/w"].tolist() == [2 * 1.0 + 6 * 0.5, 2 * -2.0 + 6 * 8.0]
    assert sums["base/steps"].item() == 9


def test_the_mean_of_two_groups_by_hand():
    first = {"base/w": torch.tensor([5.0, 44.0]).double(), "base/steps": torch.tensor(9)}
    second = {"base/w": torch.tensor([3.0, 4.0]).double(), "base/steps": torch.tensor(12)}
    mean = mean_of_sums([first, second], 16, DTYPES)
    assert mean["base/w"].dtype == torch.float32
    assert mean["base/w"].tolist() == [0.5, 3.0]
    assert mean["base/steps"].item() == 12
    assert first["base/w"].tolist() == [5.0, 44.0]  # the sums stay as they are


def test_uploads_that_count_nothing_have_no_sums():
    assert sums_of([packed([1.0], 1)], [0]) is None


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=9), st.integers(0, 2**30))
def test_one_group_has_the_bits_of_the_flat_mean(counts, seed):
    draw = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-9, 5, (40,), generator=draw)
    uploads = [packed((torch.randn(40, generator=draw) * scales).tolist(), i) for i in range(9)]
    uploads = uploads[: len(counts)]
    if sum(counts):
        flat = weighted_mean(uploads, counts, sum(counts))
        alone = mean_of_sums([sums_of(uploads, counts)], sum(counts), DTYPES)
        assert all(torch.equal(alone[key], flat[key]) for key in DTYPES)


@given(st.lists(st.integers(1, 100), min_size=2, max_size=9), st.data())
def test_groups_have_the_bits_of_the_flat_mean_where_no_sum_is_rounded(counts, data):
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**30)))
    size = 2.0 ** (torch.rand(len(counts), 40, generator=draw) * 19.9 - 20)  # in [2**-20, 1)
    signs = torch.randint(2, size.shape, generator=draw) * 2 - 1
    uploads = [packed(row.tolist(), i) for i, row in enumerate(size * signs)]
    cut = data.draw(st.integers(1, len(counts) - 1))  # 2**(20 + 23) * 900 < 2**53
    flat = weighted_mean(uploads, counts, sum(counts))
    grouped = in_groups(uploads, counts, cut)
    assert all(torch.equal(grouped[key], flat[key]) for key in DTYPES)


def test_groups_may_differ_in_the_last_bit_where_a_sum_is_rounded():
    """1 + 2**-24 lies between two float32; twice 2**-53 move it only if they are added first."""
    uploads = [packed([x], 0) for x in (1.0, 2.0**-24, 2.0**-53, 2.0**-53)]
    flat = weighted_mean(uploads, [1, 1, 1, 1], 4)
    assert flat["base/w"].item() == 0.25
    assert in_groups(uploads, [1, 1, 1, 1], 2)["base/w"].item() == (1 + 2.0**-23) / 4


@pytest.mark.parametrize(
    ("sums", "total", "line"),
    [
        ([], 1.0, "nothing to average"),
        ([{"w": torch.ones(1)}], 0.0, "nothing to average"),
        ([{"w": torch.ones(1)}], float("nan"), "nothing to average"),
        ([{"v": torch.ones(1)}], 1.0, "'v' is in some sums only"),
        ([{"w": torch.ones(1)}, {"w": torch.ones(2)}], 1.0, "'w' differs in shape"),
    ],
)
def test_sums_that_do_not_fit_are_refused(sums, total, line):
    with pytest.raises(PayloadError, match=line):
        mean_of_sums(sums, total, {"w": torch.float32})
