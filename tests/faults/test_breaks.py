"""The harness notices when a promise is broken: four repairs are taken back, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.faults import playing
from tests.faults.ground import CLIENTS, Setting
from tests.faults.plans import COORDINATOR, MACHINE, Fault, Plan, Reached
from tests.faults.verdict import troubles

pytestmark = pytest.mark.loopback

Census = Sequence[Reached]
RECORDED = "sql-commit.after"
"""Where a record has become one."""
FIRST = next(iter(CLIENTS))


def nth_behind(census: Census, point: str, behind: str, times: int = 1) -> int:
    """Return which arrival of the coordinator at a point is the first behind another point."""
    ours = [at.point for at in census if at.role == COORDINATOR]
    places = [place for place, at in enumerate(ours) if at == behind]
    return ours[: places[times - 1]].count(point) + 1


def between_record_and_name(census: Census) -> Fault:
    nth = nth_behind(census, RECORDED, "commit.before", times=2)
    return Fault(COORDINATOR, RECORDED, nth, (COORDINATOR,))


def answer_that_never_comes(census: Census) -> Fault:
    return Fault(FIRST, "push.after", 1, then="lose", waits_for_commit=True)


def power_at_the_end(census: Census) -> Fault:
    return Fault(COORDINATOR, "finish.before", 1, (COORDINATOR, *CLIENTS), MACHINE, mercy=False)


def while_clients_finish(census: Census) -> Fault:
    nth = nth_behind(census, "result.before", "finish.before")
    return Fault(COORDINATOR, "result.before", nth, (COORDINATOR,))


BREAKS: dict[str, tuple[Callable[[Census], Fault], str]] = {
    "commit-before-rename": (between_record_and_name, "was committed"),
    "no-deduplication": (answer_that_never_comes, ""),
    "watermark-too-early": (power_at_the_end, "was called safe"),
    "finish-before-acceptance": (while_clients_finish, "hang: the coordinator"),
}
"""What is taken back, a fault that shows it, and what is said then."""


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_promise_is_noticed(broken, ground, monkeypatch):
    undisturbed = ground.undisturbed(Setting("fedper"))
    monkeypatch.setattr(playing, "LINGERS_S", 6.0)  # what hangs does so for good
    fault_of, said = BREAKS[broken]
    plan = Plan((fault_of(undisturbed.census()),), broken=broken)
    played = ground.play(Setting("fedper"), plan)
    assert played.struck == list(plan.faults)
    found = troubles(played, undisturbed)
    assert any(said in trouble for trouble in found), found


@pytest.mark.parametrize("broken", BREAKS)
def test_the_same_fault_does_no_harm_otherwise(broken, ground):
    undisturbed = ground.undisturbed(Setting("fedper"))
    plan = Plan((BREAKS[broken][0](undisturbed.census()),))
    played = ground.play(Setting("fedper"), plan)
    assert played.struck == list(plan.faults)
    assert troubles(played, undisturbed) == []
