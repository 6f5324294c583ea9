"""What a stale upload counts, computed by hand."""

import math

import pytest
import torch

from fedmodels.tensors.staleness import discount, rebase
from fedmodels.tensors.weighted_mean import weighted_mean


def test_a_stale_upload_counts_less():
    """(1 + tau)^-a: with the paper's a = 1/2, an upload 3 commits behind counts half of itself."""
    assert [discount(tau, 0.5) for tau in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert discount(1, 0.5) == pytest.approx(1 / math.sqrt(2))
    assert discount(1, 1.0) == 0.5
    assert discount(7, 0.0) == 1.0


def test_a_buffer_of_a_fresh_and_a_stale_upload():
    """The step of Algorithm 1 with K = 2: w + (1 * (3 - 2) + 1/2 * (5 - 1)) / 2 = 2 + 1.5.

    The present weight is 2. The fresh client moved it from 2 to 3. The stale one began with 1,
    three commits ago, and moved it to 5.
    """
    present, begun = {"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])}
    stale = rebase({"w": torch.tensor([5.0])}, begun, present, discount(3, 0.5), {"w"})
    assert stale["w"].tolist() == [4.0]
    mean = weighted_mean([{"w": torch.tensor([3.0])}, stale], [1.0, 1.0], 2.0)
    assert mean["w"].tolist() == [3.5]


def test_what_is_no_parameter_is_mixed():
    """A variance stays between the two it comes from: 1/4 * 0.1 + 3/4 * 0.2 = 0.175.

    As a difference it would be 0.2 + 1/4 * (0.1 - 2) < 0.
    """
    present = {"var": torch.tensor([0.2]), "count": torch.tensor(9)}
    begun = {"var": torch.tensor([2.0]), "count": torch.tensor(3)}
    sent = {"var": torch.tensor([0.1]), "count": torch.tensor(7)}
    found = rebase(sent, begun, present, 0.25, ())
    assert found["var"].tolist() == pytest.approx([0.175])
    assert found["count"].item() == 7


def test_the_inputs_stay_and_the_dtype_too():
    sent, begun, present = (
        {"w": torch.full((3,), v, dtype=torch.float16)} for v in (3.0, 1.0, 5.0)
    )
    found = rebase(sent, begun, present, 1.0, {"w"})
    assert found["w"].dtype == torch.float16
    assert found["w"].tolist() == [7.0] * 3
    assert (sent["w"][0], begun["w"][0], present["w"][0]) == (3.0, 1.0, 5.0)
