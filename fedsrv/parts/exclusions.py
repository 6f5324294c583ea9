"""Clients that take no part any more: as an operator asked while the run goes on, or by rule.

What was asked is a decision of the run, which outlives a crash. Before the next interaction the
engine sets the clients aside, and goes on as if it had been resumed without them (``--resume
--without``). From there on a replay leaves them out as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import PayloadError
from fedmodels.facts.position import Interaction
from fedmodels.host.guarded import Guarded
from fedsrv.engine.schedule import Step
from fedsrv.engine.server_part import NOTHING, ServerPart, Settle
from fedsrv.progress.events import EventLog
from fedsrv.state.decisions import EXCLUDE
from fedsrv.state.record import Record, of_parts
from fedsrv.state.store import Store

BY_HAND = "an operator excluded it"


class Exclusions(ServerPart):
    """Who is to take no part in one run; safe between threads."""

    _gone: Guarded[set[int]] = Guarded("_lock")

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Begin; what was asked before a restart is in the store."""
        super().__init__(store, events, given)
        self._lock = threading.RLock()
        """Held from the check of what is asked until it is stored."""
        self._gone = {*store.aside()}
        self._told = False

    @property
    def _asked(self) -> set[int]:
        return {one["client"] for one in self.store.decided(EXCLUDE)}

    def ask(self, clients: Iterable[int]) -> None:
        """Let clients take no part from the next interaction on, also after a crash from now on.

        Raises:
            PayloadError: too few clients would be left.
        """
        with self._lock:
            wanted = [*clients]
            self._check_left({*wanted} | self._asked | self._gone)
            self.store.decide(EXCLUDE, *({"client": client} for client in wanted))

    def _check_left(self, gone: Collection[int]) -> None:
        needed, members = fewest(self.experiment), self.experiment.schedule.clients
        if members - len(gone) < needed:
            raise PayloadError(
                f"{members - len(gone)} of {members} clients would be left, and the run needs "
                f"{needed}"
            )

    def offers(self) -> Mapping[str, Callable[..., None]]:
        """Let an operator exclude clients."""
        return {"exclude": self.ask}

    def sets_aside(self, step: Step, aside: Mapping[int, int], settle: Settle) -> dict[int, str]:
        """Return who is to go before a step: as was asked, or by ``exclude_after``."""
        with self._lock:
            due = {client: BY_HAND for client in sorted(self._asked) if client not in aside}
        if (times := self.experiment.server.exclude_after) is not None:
            settle()
            before = map(Interaction, range(step.interaction - 1, -1, -1))
            records = (self.store.ledger.record(n) for n in before)
            odd = warned_in_a_row((r for r in records if r is not None), times)
            for client in sorted({*odd} - {*aside, *due}):
                if self._may_go({*aside, *due, client}, client):
                    what = "upload" if times == 1 else f"{times} uploads"
                    due[client] = f"its last {what} stood out (exclude_after = {times})"
        with self._lock:
            self._gone |= {*due}
        return due

    def _may_go(self, gone: Collection[int], client: int) -> bool:
        try:
            self._check_left(gone)
        except PayloadError as error:
            if not self._told:
                line = f"client {client} stays, though its uploads stand out: without it {error}"
                self.events.tell("note", line=line)
            self._told = True
            return False
        return True


def fewest(experiment: Experiment) -> int:
    """Return how many clients a run needs to go on."""
    server, privacy = experiment.server, experiment.privacy
    adds_up = experiment.min_clients if privacy is not None and privacy.noise_at_clients else 1
    return max(1, server.min_clients or 1, server.fewest_uploads, adds_up)


def warned_in_a_row(records: Iterable[Record], times: int) -> set[int]:
    """Return the clients whose last ``times`` uploads all stood out, as all others agree.

    Those that may lie need not agree (:func:`fedsrv.engine.comparison.agreed_on`): a warning that
    takes half of the cohort could be aimed. The latest record comes first.
    """
    found, open_, count = set[int](), dict[int, int](), 0
    for count, record in enumerate(records):
        warned = {*of_parts(record).get("agreed", ())}
        if count == 0:
            open_ = dict.fromkeys(warned, 0)
        for client in [c for c in open_ if c in record["cohort"]]:
            if client not in warned:
                del open_[client]
                continue
            open_[client] += 1
            if open_[client] == times:
                found.add(client)
                del open_[client]
        if not open_:
            break
    return found
