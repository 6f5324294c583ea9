"""How differences between two runs are told."""

from __future__ import annotations

from typing import Any

from tests.faults.verdict import _differences

RECORD: dict[str, Any] = {"loss": 0.5, "cohort": [0, 2], "clients": {"0": {"a_loc": 0.9}}}


def test_what_differs_is_named_however_deep_it_lies():
    """A long record used to be cut before the place that told."""
    long = {"counts": [*range(500)], "clients": {"0": {"a_loc": 0.9, "loss": 1.5}}}
    other = {"counts": [*range(499), 7], "clients": {"0": {"a_loc": 0.5, "seen": [0]}}}
    assert [*_differences([RECORD, long], [RECORD, other], "records")] == [
        "records[1].clients.0.a_loc: 0.9 instead of 0.5",
        'records[1].clients.0.loss: 1.5 instead of "nothing"',
        'records[1].clients.0.seen: "nothing" instead of [0]',
        "records[1].counts[499]: 499 instead of 7",
    ]
    (line,) = _differences([long], [], "records")
    assert len(line) < 250
    assert line.endswith("letters) instead of []")
