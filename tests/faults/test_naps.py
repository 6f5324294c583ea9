"""Naps, stalls of the disk and stops follow from a seed, and end."""

from __future__ import annotations

import importlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.inside import fault_points
from tests.faults.inside.fault_points import NAPS_S, Process
from tests.faults.plans import COORDINATOR, LONG_S, SHORT_S, Draw, Fault, Plan, Reached
from tests.faults.processes import INSIDE

PLACES = [f"place-{number}" for number in range(40)] * 20


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long threads have slept, which they do at once."""
    found: list[float] = []
    monkeypatch.setattr(fault_points.time, "sleep", found.append)
    return found


def process(folder: Path, plan: Plan, role: str = COORDINATOR) -> Process:
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan.to_dict()))
    return Process(role, folder)


def naps(folder: Path, plan: Plan, slept: list[float], role: str = COORDINATOR) -> list[float]:
    slept.clear()
    one = process(folder, plan, role)
    for place in PLACES:
        one.nap(place)
    return [*slept]


def test_naps_follow_from_seed_role_and_place(tmp_path, slept):
    plan = Plan(seed=1, naps=True)
    first = naps(tmp_path, plan, slept)
    assert first
    assert sum(first) <= NAPS_S + 0.2
    assert naps(tmp_path, plan, slept) == first
    assert naps(tmp_path, Plan(seed=2, naps=True), slept) != first
    assert naps(tmp_path, plan, slept, "relay") != first


def test_nobody_naps_where_no_plan_says_so(tmp_path, slept):
    assert naps(tmp_path, Plan(seed=1), slept) == []
    process(tmp_path, Plan(seed=1)).sync_slowly()
    assert slept == []


def test_a_slow_disk_takes_20_to_50_ms_and_now_and_then_300(tmp_path, slept):
    one = process(tmp_path, Plan(seed=1, slow_disk=True))
    for _ in range(200):
        one.sync_slowly()
    assert 1 <= slept.count(0.3) <= 20
    assert all(0.02 <= seconds <= 0.05 for seconds in slept if seconds != 0.3)


def test_seeds_draw_naps_slow_disks_and_processes_that_stand_still():
    census = [Reached(role, point) for role in (COORDINATOR, "client-0") for point in "abc"]
    plans = [Draw(census).plan(seed) for seed in range(60)]
    assert {(plan.naps, plan.slow_disk) for plan in plans} == {
        (naps, slow) for naps in (False, True) for slow in (False, True)
    }
    stops = [fault for plan in plans for fault in plan.faults if fault.then == "stop"]
    assert {fault.stops for fault in stops} == {(COORDINATOR,), ("client-0",)}
    assert all(SHORT_S <= fault.seconds <= LONG_S and not fault.strikes for fault in stops)
    assert [Draw(census).plan(seed) for seed in range(60)] == plans


def test_threads_nap_before_they_take_a_lock_and_after_they_gave_it_back(monkeypatch):
    """In our code alone: in the programs, that is, and neither in tests nor in gRPC."""
    monkeypatch.syspath_prepend(INSIDE)
    hooks = importlib.import_module("fault_hooks")
    places = list[str]()
    monkeypatch.setattr(hooks, "nap", places.append)
    kind = type("Shared", (threading.Condition,), {})
    hooks._at_borders(kind, "__enter__", "__exit__")
    shared = kind()
    code = "def hand_over():\n  with shared:\n    places.append('held')\nhand_over()"
    exec(compile(code, "/lib/fedsrv/state/some.py", "exec"), {"shared": shared, "places": places})
    assert places == ["some.py:hand_over:Shared before", "held", "some.py:hand_over:Shared after"]
    places.clear()
    exec(compile(code, "/lib/grpc/some.py", "exec"), {"shared": shared, "places": places})
    assert places == ["held"]


@pytest.mark.parametrize("make", ["_Lock", "_RLock"])
def test_a_lock_with_naps_is_a_lock(make, monkeypatch):
    monkeypatch.syspath_prepend(INSIDE)
    lock = getattr(importlib.import_module("fault_hooks"), make)()
    with lock, ThreadPoolExecutor(1) as pool:
        assert not pool.submit(lock.acquire, blocking=False).result()
        if make == "_RLock":
            assert lock._is_owned()
            assert lock.acquire()
            lock.release()
    changed = threading.Condition(lock)
    with changed:
        changed.notify_all()


@pytest.mark.parametrize(
    ("strikes", "spoilt"), [((), []), (("relay",), []), (("relay", COORDINATOR), ["half"])]
)
def test_only_what_dies_leaves_something_half_done(strikes, spoilt, tmp_path, monkeypatch):
    monkeypatch.setattr(fault_points.os, "kill", lambda *what: None)
    (tmp_path / "fault-0.done").touch()
    found = []
    fault = Fault(COORDINATOR, "write.middle", 1, strikes=strikes)
    one = process(tmp_path, Plan(faults=(fault,)))
    one.strike(0, lambda: found.append("half"))
    assert found == spoilt
