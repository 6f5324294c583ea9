"""The commits of a run: written while clients train on, and undone where states are gone.

After a crash the engine computes an interaction without a commit again, to the same bits. So
clients need not wait for the commit. A thread writes it while clients train for the next
interaction, and the next commit waits for this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from fedmodels.errors import FedtideError, TooFewClients
from fedmodels.numerics.data_drift import ALPHA
from fedmodels.training.contexts import ServerState
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.cohort import Cohort, StateLost
from fedsrv.engine.odd_uploads import Oddity, first_odd
from fedsrv.engine.plan import Plan
from fedsrv.engine.rows import commit_facts, drifted_in, left_out_of
from fedsrv.engine.schedule import takes_part
from fedsrv.events import EventLog
from fedsrv.state.history import History
from fedsrv.state.record import Record, trained_in
from fedsrv.state.store import Store
from fedsrv.state.syncer import Syncer


class Commits:
    """Writes commits one after the other, and knows who trained when."""

    def __init__(self, store: Store, cohort: Cohort, events: EventLog) -> None:
        self.store, self.cohort, self.events = store, cohort, events
        self.history = History()
        self.last_trained: dict[int, int] = {}
        """Interaction of each client's last upload that counts; names the private state to hold."""
        self._writer = ThreadPoolExecutor(1, "committer")
        self._syncer = Syncer(store.sync)
        self._under_way: Future[None] | None = None
        self._told = set[str]()
        """Kinds of notes on skipped examples that were told."""
        self._in_a_row: dict[str, int] = {}
        """How often in a row each client's upload stood out."""
        self._warned: dict[tuple[str, str], int] = {}
        """The last task of which drift was told, by part and client."""

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()
        self._syncer.close()

    # --- to go on from a commit -------------------------------------------------------------------

    def remember(self, plan: Plan, interaction: int) -> None:
        """Read who trained when, up to an interaction, and ask clients for the states behind it."""
        self.history = self.store.history()
        trained = self.history.last_trained(interaction)
        self.last_trained = {
            c: n for c, n in trained.items() if takes_part(c, interaction + 1, plan.aside)
        }
        if plan.is_stateful:
            self.cohort.require(self._holds_state, self.last_trained, self.store.watermark)

    def go_to_common(self, plan: Plan, lost: StateLost | None) -> int:
        """Go to the last commit whose server and client states all still exist, and return it.

        Args:
            plan: says whether clients keep private states, and who was set aside.
            lost: the state whose loss makes the run go back; None at its start.

        Raises:
            RunFailed: that commit lies further back than the run may go.
        """
        store = self.store
        for client in self.cohort.starting_over():
            store.start_over(client)
            self.events.tell("started-over", client)
        committed, versions = store.committed, self.cohort.versions()
        held = {c: v for c, v in versions.items() if plan.is_stateful and c not in plan.aside}
        target = store.history().target(store.newest, store.has_state, held)
        if target < committed:
            why = str(lost or "states of the server or of clients are gone")
            reason = f"{why}; interactions after {target + 1} are computed again"
            whose = lost.client if lost else ""
            self.events.tell("rollback", whose, interaction=target, reason=reason)
        store.go_to(target)
        self.cohort.commit(target, -1)
        self.remember(plan, target)
        self._syncer.want(target)  # later commits are not safe yet
        return target

    def _holds_state(self, client: int, versions: Sequence[int]) -> bool:
        """Tell whether a client holds its required private state; called from any thread."""
        if self.last_trained.get(client, -1) in (-1, *versions):
            return True
        self.history.check(client, versions)
        return False

    # --- to add one -------------------------------------------------------------------------------

    def add(self, record: Record, state: ServerState, counts: str | None, of: int) -> None:
        """Begin to write a commit; no other one is under way.

        Args:
            record: of the interaction.
            state: after it.
            counts: what clients counted; None if the record has its scores.
            of: the interactions of the run.
        """
        self._under_way = self._writer.submit(self._write, record, state, counts, of)
        self.last_trained |= trained_in(record)

    def settle(self) -> None:
        """Wait until the last interaction is committed; raise the error of its commit."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _write(self, record: Record, state: ServerState, counts: str | None, of: int) -> None:
        """Commit an interaction, advance the watermark, and report it."""
        self.store.commit(record, state, counts)
        committed = record["interaction"]
        self._syncer.want(committed)
        clients = self.cohort.durable()
        watermark = min(self._syncer.durable, committed if clients is None else clients)
        floor = self.store.advance(watermark)
        self.history = self.history.after(committed, trained_in(record), floor)
        self.cohort.commit(committed, self.store.oldest_begun(floor))
        self.events.tell("commit", **commit_facts(record), of=of)
        for kind, line in left_out_of(record).items():
            if kind not in self._told:  # it is the same in most rounds
                self._told.add(kind)
                self.events.tell("note", line=line)
        self._warn_of_drift(record)
        self._warn_of_uploads(record)

    def _warn_of_uploads(self, record: Record) -> None:
        """Note that a client's upload stands out: the 1st, 2nd, 4th, 8th ... time in a row."""
        warned = record.get("warned", {})
        for client in map(str, record["cohort"]):
            self._in_a_row[client] = self._in_a_row.get(client, 0) + 1 if client in warned else 0
            times = self._in_a_row[client]
            if times and times & (times - 1) == 0:
                row = f" (as its last {times} did)" if times > 1 else ""
                place = f"client {client} in interaction {record['interaction'] + 1}"
                line = f"the upload of {place} stands out and counts{row}: {warned[client]}"
                self.events.tell("note", line=line)

    def _warn_of_drift(self, record: Record) -> None:
        """Say once of each client and task that examples moved from those of the task before."""
        for part, moved in drifted_in(record).items():
            task = record["task"]
            news = {c: d for c, d in moved.items() if self._warned.get((part, c), -1) < task}
            self._warned |= {(part, client): task for client in news}
            if news:
                line = (
                    f"{part}s of task {task} moved from those of the task before at "
                    f"{clients_text([*news])}: by up to {max(news.values()):.2f} of 1 "
                    f"(Kolmogorov-Smirnov, p < {ALPHA:g}; docs/metrics.md#drift)"
                )
                self.events.tell("note", line=line)


# --- which one the run can go on from -------------------------------------------------------------


def odd_commit(store: Store) -> tuple[int, int, Oddity] | None:
    """Return where the odd uploads of one client begin (:func:`first_odd`).

    Only commits count that a run can go back before.
    """
    numbers = range(store.committed, store.floor, -1)
    return first_odd(record for n in numbers if (record := store.record(n)) is not None)


def back_before_the_odd(store: Store, events: EventLog, failed: FedtideError) -> FedtideError:
    """Go back before the latest commit with an odd upload; return the error that the run ends with.

    Clients that fail right after such a commit most likely fail because of that upload.

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
