"""A live coordinator, honest clients, and the relay between them lies in its sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedcli.runtime.worker import Result, Worker
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays import grouped_intake
from fedplugins.relays.grouped_intake import GroupedIntake
from fedplugins.relays.tests.lying_relay import (
    Lie,
    LyingRelay,
    brings_nothing,
    drops,
    omits,
    scales,
    tells_the_truth,
)
from fedsrv.transport.waiting import WaitNotice
from tests.conftest import records_of
from tests.fuzz.live import Live, complaints_with_traceback
from tests.fuzz.test_liar import Living, living

__all__ = ["living"]
TOLERANT = {"schedule": {"clients": 3, "rounds": 1}, "server": {"min_clients": 1}}


@pytest.fixture
def behind(living: Living, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a maker of runs whose clients 0 and 1 are behind a relay that lies."""
    monkeypatch.setattr(grouped_intake, "LEFT_OUT_S", 0.5)
    monkeypatch.setattr(grouped_intake, "SUM_S", 0.5)
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
    "left-out": (drops(1), "1", "its relay 0-1 left it out of its sum"),
    "no-sum": (brings_nothing, "01", "its relay 0-1 brought no sum"),
    "scaled": (scales(1e3), "01", "the sum of its relay 0-1 was refused: it moves the weights by"),
    "unmeasured": (omits("distance"), "01", "its relay 0-1 did not say how far its weights moved"),
    "no-cosines": (omits("members", "cosine"), "", ""),  # nothing rests on them
}


@pytest.mark.parametrize("lie", LIES)
def test_the_relay_is_named_and_the_run_ends(lie, behind, caplog):
    change, failed, why = LIES[lie]
    live = behind(change)
    assert live.summary()["state_sha256"]
    records = records_of(live.root / "run")
    assert len(records) == 2
    for record in records:
        lines = record.get("failed", {})
        assert "".join(lines) == failed
        assert all(line.startswith(why) for line in lines.values())
        assert record["cohort"] == [c for c in range(3) if str(c) not in failed]
    assert complaints_with_traceback(caplog.records) == []


def test_a_deadline_ends_the_wait_for_a_relay_as_for_a_client(behind, monkeypatch):
    """It passes as soon as the sum has come: before that nothing hangs on who is fast."""
    keep, begin, passed = GroupedIntake._keep_sum, WaitNotice.__post_init__, list[bool]()

    def keeps(intake: GroupedIntake, *given: Any) -> Any:
        passed.append(True)
        return keep(intake, *given)

    def begins(notice: WaitNotice) -> None:
        begin(notice)
        passed.clear()

    monkeypatch.setattr(GroupedIntake, "_keep_sum", keeps)
    monkeypatch.setattr(WaitNotice, "__post_init__", begins)
    monkeypatch.setattr(WaitNotice, "seconds", property(lambda _: 2000.0 if passed else 0.0))
    for wait in ("LEFT_OUT_S", "SUM_S"):
        monkeypatch.setattr(grouped_intake, wait, 1000.0)
    live = behind(drops(1), server={"min_clients": 2, "deadline_s": 1000.0})
    assert live.summary()["state_sha256"]
    for record in records_of(live.root / "run"):
        assert record["cohort"] == [0, 2]
        assert not record.get("failed")


def test_a_liar_behind_an_honest_relay_is_left_out_of_its_sum(behind, living, monkeypatch):
    """The sum holds its weights already: the others bring their uploads once more."""
    execute = Worker.execute

    def lies(worker: Worker, order: rpc.Order, payload: Bundle) -> Result | None:
        done = execute(worker, order, payload)
        if done is None or worker.client != 1 or order.kind != rpc.ORDER_KIND_TRAIN:
            return done
        weights = {k: (1e6 * t).clamp(-1e6, 1e6) for k, t in done.upload.weights.items()}
        return replace(done, upload=replace(done.upload, weights=weights))

    monkeypatch.setattr(Worker, "execute", lies)
    flat = living(**TOLERANT)
    flat.join(0, 1, 2)
    expected = flat.summary()
    live = behind(tells_the_truth)
    assert live.summary()["metrics"] == expected["metrics"]
    both = records_of(live.root / "run"), records_of(flat.root / "run")
    for record, other in zip(*both, strict=True):
        assert record["cohort"] == other["cohort"] == [0, 2]
        word = " (as its relay 0-1 says)"
        assert record["failed"] == {c: line + word for c, line in other["failed"].items()}
        assert record["failed"]["1"].startswith("its upload is far out of its cohort: its weights")
        for client in "012":
            row, plain = record["clients"][client], other["clients"][client]
            assert row["difference_norm"] == plain["difference_norm"]
