"""One client of three sends poison: the run ends, and what is far out of its cohort is left out."""

from __future__ import annotations

import math
import os

import pytest

from fedmodels.methods import names
from tests.conftest import records_of
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.fuzz.live import complaints_with_traceback
from tests.fuzz.poisons import (
    flipped,
    huge_generators,
    huge_prototypes,
    poisoned,
    scaled,
    wild_statistics,
)
from tests.liars import Stage

POISONS = {
    "scaled": scaled(1e6),
    "ten-times": scaled(10.0),
    "flipped": flipped,
    "prototypes": huge_prototypes,
    "statistics": wild_statistics,
    "generators": huge_generators,
}
SAMPLE = [("fedali", "scaled"), ("fedmlp", "flipped"), ("fedcil", "statistics")]
"""Of all; FEDTIDE_LIES=all takes every method with every poison."""
EVERY = os.environ.get("FEDTIDE_LIES") == "all"
CASES = [(m, p) for m in names() for p in POISONS] if EVERY else SAMPLE
TAME = {"flipped"}
"""Poisons that keep within the bounds: as large as what is honest."""


@pytest.mark.parametrize(("method", "poison"), CASES)
def test_a_poisoned_client_ends_no_run(method, poison, digits, tmp_path, caplog):
    experiment = experiment_for((method, {}), schedule={"rounds": 1}, server={"min_clients": 2})
    changed: list[bool] = []

    def lie(client, order, answer):  # type: ignore[no-untyped-def]
        found = poisoned(POISONS[poison])(client, order, answer)
        changed.append(differs(found[0], answer[0]))
        return found

    summary = Stage(experiment, digits, tmp_path / "run", lie).run()
    assert summary["state_sha256"]
    assert all(map(math.isfinite, summary["metrics"].values()))
    records = records_of(tmp_path / "run")
    assert len(records) == 2
    assert complaints_with_traceback(caplog.records) == []
    if any(changed) and poison not in TAME:
        for record in records:
            assert "far out of its cohort" in record["failed"]["2"]
    for record in records:
        measured = [row for row in record["clients"].values() if "difference_norm" in row]
        assert all(-1 <= row.get("difference_cosine", 0) <= 1 for row in measured)


def differs(one, other):  # type: ignore[no-untyped-def]
    """Tell whether two uploads hold other values."""
    first, second = one.by_key(), other.by_key()
    return any(not first[key].equal(second[key]) for key in first)
