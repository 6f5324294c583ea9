"""Where a run goes on: at the last commit whose server and client states all still exist."""

from __future__ import annotations

from fedmodels.errors import FedtideError, TooFewClients
from fedsrv.engine.cohort import Cohort, StateLost
from fedsrv.engine.odd_uploads import Oddity, first_odd
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
    held = {c: kept for c, kept in versions.items() if c not in store.aside()} if stateful else {}
    target = store.history().target(store.newest, store.has_state, held)
    if target < committed:
        why = str(lost or "states of the server or of clients are gone")
        reason = f"{why}; interactions after {target + 1} are computed again"
        events.tell("rollback", lost.client if lost else "", interaction=target, reason=reason)
    store.go_to(target)
    return target


def odd_commit(store: Store) -> tuple[int, int, Oddity] | None:
    """Return the first of the latest commits with an odd upload of one client, who, and in what.

    A run can go back before it.
    """
    numbers = range(store.committed, store.floor, -1)
    return first_odd(record for n in numbers if (record := store.record(n)) is not None)


def back_before_the_odd(store: Store, events: EventLog, failed: FedtideError) -> FedtideError:
    """Go back before the latest commit with an odd upload; return the error that the run ends with.

    Clients that fail right after such a commit most likely fail for its sake.

    Args:
        store: commits; none is under way.
        events: log of what happens.
        failed: says which clients failed, and why; returned where no upload was odd.
    """
    found = odd_commit(store)
    if found is None:
        return failed
    interaction, client, oddity = found
    shown = interaction + 1
    why = f"client {client}'s upload in interaction {shown} was odd: {oddity}"
    reason = f"{why}; clients failed right after it"
    events.tell("rollback", client, interaction=interaction - 1, reason=reason)
    store.take_back(interaction - 1)
    return TooFewClients(
        f"{why}. Right after it clients failed, the first so: {failed}. The run is back before it: "
        f"--resume computes interaction {shown} again, and --resume --without {client} goes on "
        f"without client {client}"
    )
