"""A live coordinator, honest clients, and the relay between them lies in its sums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsrv.transport import overdue_sums
from tests.fuzz.live import Live, complaints_with_traceback
from tests.fuzz.lying_relay import Lie, LyingRelay, brings_nothing, drops
from tests.fuzz.test_liar import Living, living, records_of

__all__ = ["living"]
TOLERANT = {"schedule": {"clients": 3, "rounds": 1}, "server": {"min_clients": 1}}


@pytest.fixture
def behind(living: Living, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a maker of runs whose clients 0 and 1 are behind a relay that lies."""
    monkeypatch.setattr(overdue_sums, "LEFT_OUT_S", 0.5)
    monkeypatch.setattr(overdue_sums, "SUM_S", 0.5)
    relays: list[LyingRelay] = []

    def make(lie: Lie, **overrides: Any) -> Live:
        live = living(**{**TOLERANT, **overrides})
        relays.append(LyingRelay(range(2), live.address, Path(live.root), lie))
        live.join(2)
        live.join(0, 1, address=relays[-1].address)
        return live

    yield make
    for relay in relays:
        relay.close()


LIES = {
    "left-out": (drops(1), {"1": "its relay 0-1 left it out of its sum"}),
    "no-sum": (brings_nothing, dict.fromkeys("01", "its relay 0-1 brought no sum")),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_relay_is_named_and_the_run_ends(
    lie: str, behind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    change, failed = LIES[lie]
    live = behind(change)
    assert live.summary()["state_sha256"]
    records = records_of(live)
    assert len(records) == 2
    assert all(record["failed"] == failed for record in records)
    assert all(record["cohort"] == sorted({0, 1, 2} - {*map(int, failed)}) for record in records)
    assert complaints_with_traceback(caplog.records) == []


def test_a_deadline_ends_the_wait_for_a_relay_as_for_a_client(
    behind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overdue_sums, "LEFT_OUT_S", 1000.0)
    live = behind(drops(1), server={"min_clients": 2, "deadline_s": 0.5})
    assert live.summary()["state_sha256"]
    assert all(record["cohort"] == [0, 2] for record in records_of(live))
