"""The harness notices when a promise is broken: repairs are taken back, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.faults import playing
from tests.faults.ground import CLIENTS, Setting
from tests.faults.plans import COMMIT_S, COORDINATOR, MACHINE, RELAY, Fault, Plan, Reached
from tests.faults.verdict import troubles

pytestmark = pytest.mark.loopback

Census = Sequence[Reached]
RECORDED = "sql-commit.after"
"""Where a record has become one."""
FIRST = next(iter(CLIENTS))


def first_behind(point: str, behind: str, nth: int = 1) -> tuple[Fault, ...]:
    """Kill the coordinator at the first of some points behind another one.

    How often it comes there before depends on time, as others make transactions, too.
    """
    return Fault(COORDINATOR, behind, nth), Fault(COORDINATOR, point, 1, (COORDINATOR,))


def between_record_and_name(census: Census) -> tuple[Fault, ...]:
    return first_behind(RECORDED, "commit.before", nth=2)


def answer_that_never_comes(census: Census) -> Fault:
    return Fault(
        FIRST,
        "push.after",
        1,
        then="lose",
        waits_for=(COORDINATOR, "commit.after"),
        seconds=COMMIT_S,
    )


def power_at_the_end(census: Census) -> Fault:
    return Fault(COORDINATOR, "finish.before", 1, (COORDINATOR, *CLIENTS), MACHINE, mercy=False)


def while_clients_finish(census: Census) -> tuple[Fault, ...]:
    return first_behind("result.before", "finish.before")


def sum_on_its_way(census: Census) -> tuple[Fault, ...]:
    """The coordinator dies while a sum is on its way, and opens the trip again before it comes.

    The relay's clients get their orders only when the sum was answered.
    """
    again = (COORDINATOR, "broadcast.before")
    answered = (RELAY, "up-sum.after", "up-sum.refused")
    return (
        Fault(RELAY, "up-sum.before", 1, (COORDINATOR,), waits_for=again, seconds=LONG_ENOUGH_S),
        Fault(*again, 1, waits_for=answered, seconds=LONG_ENOUGH_S),
    )


def late_for_the_next_relay(census: Census) -> tuple[Fault, ...]:
    """A relay dies with an upload, and one client stands still until the next one has the rest."""
    sent = (RELAY, "up-sum.before")
    return (
        Fault(RELAY, "up-push.before", 1, (RELAY,), stops=(FIRST,), waits_for=sent, seconds=5.0),
    )


LONG_ENOUGH_S = 60.0
"""Above what a process takes to come to its next point; a fault goes on when it has."""
ALONE, RELAYED = Setting("fedper"), Setting("fedper", relayed=True)
BREAKS: dict[str, tuple[Setting, Callable[[Census], Fault | tuple[Fault, ...]], str]] = {
    "commit-before-rename": (ALONE, between_record_and_name, "was committed"),
    "no-deduplication": (ALONE, answer_that_never_comes, ""),
    "watermark-too-early": (ALONE, power_at_the_end, "was called safe"),
    "finish-before-acceptance": (ALONE, while_clients_finish, "hang: the coordinator"),
    "sum-of-before": (RELAYED, sum_on_its_way, "did not come"),
    "strangers-left-out": (RELAYED, late_for_the_next_relay, "records"),
}
"""In which run what is taken back, the faults that show it, and what is said then."""


def plan_of(broken: str, census: Census, *, is_broken: bool) -> Plan:
    found = BREAKS[broken][1](census)
    faults = found if isinstance(found, tuple) else (found,)
    return Plan(faults, broken=broken if is_broken else "")


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_promise_is_noticed(broken, ground, monkeypatch):
    setting, _, said = BREAKS[broken]
    undisturbed = ground.undisturbed(setting)
    monkeypatch.setattr(playing, "LINGERS_S", 6.0)  # what hangs does so for good
    plan = plan_of(broken, undisturbed.census(), is_broken=True)
    played = ground.play(setting, plan)
    assert played.struck == list(plan.faults)
    found = troubles(played, undisturbed)
    assert any(said in trouble for trouble in found), found


@pytest.mark.parametrize("broken", BREAKS)
def test_the_same_fault_does_no_harm_otherwise(broken, ground):
    setting = BREAKS[broken][0]
    undisturbed = ground.undisturbed(setting)
    plan = plan_of(broken, undisturbed.census(), is_broken=False)
    played = ground.play(setting, plan)
    assert played.struck == list(plan.faults)
    assert troubles(played, undisturbed) == []


def test_a_value_that_a_process_touches_without_its_lock_is_noticed(ground):
    """The check is on in the processes that tests start."""
    undisturbed = ground.undisturbed(RELAYED)
    played = ground.play(RELAYED, Plan(broken="lock-left-out"))
    found = troubles(played, undisturbed)
    assert any("Relaying._ended without _lock" in trouble for trouble in found), found
