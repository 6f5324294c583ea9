"""Which differences between two runs count where a crash may change rounding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.verdict import _far_apart

RECORD: dict[str, Any] = {"loss": 0.5, "cohort": [0, 2], "clients": {"0": {"a_loc": 0.9}}}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, False),
        ({"loss": 0.5001}, False),
        ({"clients": {"0": {"a_loc": 0.88}}}, False),
        ({"loss": 0.7}, True),
        ({"loss": float("nan")}, True),
        ({"cohort": [0, 1]}, True),
        ({"cohort": [0]}, True),
        ({"clients": {"0": {"a_loc": 0.5}}}, True),
        ({"clients": {"1": {"a_loc": 0.9}}}, True),
        ({"failed": {}}, True),
    ],
)
def test_rounding_is_forgiven_and_nothing_else(changed, expected):
    assert _far_apart([RECORD | changed], [RECORD]) is expected
