"""Where a run goes on: at the last commit whose server and client states all still exist."""

from __future__ import annotations

from fedsrv.engine.cohort import Cohort, StateLost
from fedsrv.events import EventLog
from fedsrv.state.store import Store


def go_to_common_commit(
    store: Store, cohort: Cohort, events: EventLog, lost: StateLost | None, *, stateful: bool
) -> int:
    """Go, back or forward, to the newest commit whose states all exist; return its interaction.

    Args:
        store: commits, and commits that were undone.
        cohort: the clients, which say which private states they hold.
        events: log of what happens.
        lost: the loss that interrupted the run; None at the beginning.
        stateful: whether clients keep private states at all.

    Raises:
        RunFailed: the commit lies further back than the run may go.
    """
    for client in cohort.starting_over():
        store.start_over(client)
        events.tell("started-over", client)
    committed, versions = store.committed, cohort.versions()
    held = versions if stateful else {}
    target = store.history().target(store.newest, store.has_state, held)
    if target < committed:
        why = str(lost or "states of the server or of clients are gone")
        reason = f"{why}; interactions after {target + 1} are computed again"
        events.tell("rollback", lost.client if lost else "", interaction=target, reason=reason)
    store.go_to(target)
    return target
