"""How far each upload lies from its cohort: what records say of it, and who is left out for it.

An upload that lies far out of its cohort (:mod:`fedsrv.engine.comparison`) is left out and
named, as if its client had failed: it would ruin the state for everybody. An upload within the
bounds may still spoil the run. Where clients fail right after such a commit, the record tells whose
upload was odd. An upload that stands out in size or in direction, and counts, is a warning in its
record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedmodels.errors import ClientFailed, OrderDeclined, TooFewClients
from fedmodels.facts.position import Interaction
from fedsrv.engine.cohort import Answers
from fedsrv.engine.comparison import (
    SUSPECT,
    Oddity,
    agreed_on,
    far_out,
    measured_in,
    oddities,
    rows,
    standing_out,
)
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.server_part import NOTHING, CurrentInteraction, ServerPart, Settle
from fedsrv.progress.events import EventLog
from fedsrv.state.record import Record, of_parts
from fedsrv.state.store import Store


def suspects(record: Record) -> dict[int, Oddity]:
    """Return the clients whose uploads count in a record and were odd, and in what."""
    rows = record["clients"]
    cohort = {client: measured_in(rows.get(str(client), {})) for client in record["cohort"]}
    return oddities(cohort, SUSPECT)


def first_odd(records: Iterable[Record]) -> tuple[Interaction, int, Oddity] | None:
    """Return where the odd uploads of one client begin that last until the latest commit.

    Returns:
        The interaction, the client, and in what its upload is odd; None if the latest commit has no
        odd upload.

    The latest record comes first.
    """
    found: tuple[Interaction, int, Oddity] | None = None
    for record in records:
        odd = suspects(record)
        if found is None and odd:
            client = max(odd, key=lambda c: odd[c].beyond)
        elif found is not None and found[1] in odd:
            client = found[1]
        else:
            break
        found = record["interaction"], client, odd[client]
    return found


def odd_commit(store: Store) -> tuple[Interaction, int, Oddity] | None:
    """Return where the odd uploads of one client begin (:func:`first_odd`).

    Only commits count that a run can go back before.
    """
    numbers = map(Interaction, range(store.committed, store.floor, -1))
    return first_odd(record for n in numbers if (record := store.ledger.record(n)) is not None)


def _not_declined(failed: Mapping[Any, str]) -> dict[Any, str]:
    """Return those that failed at their orders: who declines by a limit of privacy does not."""
    return {c: why for c, why in failed.items() if not why.startswith(OrderDeclined.SAID)}


class OddUploads(ServerPart):
    """Leaves out what lies far out of its cohort, and says what stands out and counts."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Begin; nobody stood out."""
        super().__init__(store, events, given)
        self._in_a_row: dict[str, int] = {}
        """How often in a row each client's upload stood out, and each sum."""

    def leaves_out(self, at: CurrentInteraction, results: Answers) -> dict[int, str]:
        """Return whose uploads lie too far out of their cohort."""
        if results.added is not None:
            return results.added.far_out(results)
        return far_out(results.measured(), at.company)

    def came(self, at: CurrentInteraction, settle: Settle) -> None:
        """Refuse to go on if most clients failed right after a commit with an odd upload.

        Raises:
            TooFewClients: most clients failed, and the commit before was odd.
        """
        results = at.results
        came = {c: why for c, why in results.failed.items() if c not in results.aside}
        failed = _not_declined(came)
        if len(failed) > len(results.by_client):
            settle()
            if odd_commit(self.store) is not None:
                client, why = next(iter(failed.items()))
                raise TooFewClients(str(ClientFailed(client, at.step.round, "upload", why)))

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down how far each upload lies from what was given, and which ones stand out.

        ``warned`` has the clients whose uploads count and stand out, and in what; ``agreed`` those
        of them on whom all agree but as many as may lie: these may be excluded.
        """
        results, liars, told = at.results, self.experiment.server.attackers, of_parts(record)
        measured = results.measured()
        counts = {c: at.count(results.by_client[c].upload) for c in measured}
        for client, row in rows(measured, counts, results.aside).items():
            record["clients"].setdefault(client, {}).update(row)
        if results.added is not None:
            clients, agreed = results.added.stand_out(results, liars, record)
        else:
            clients, agreed = standing_out(measured), agreed_on(measured, liars)
        if clients:
            told["warned"] = {str(client): why for client, why in clients.items()}
        if agreed:
            told["agreed"] = agreed

    def committed(self, record: Record) -> None:
        """Note that an upload or a sum stands out: the 1st, 2nd, 4th ... time in a row."""
        cohort, told = [str(client) for client in record["cohort"]], of_parts(record)
        sums = told.get("warned_relays", {})
        before = {name for name in self._in_a_row if "-" in name}  # clients are plain numbers
        for what, who, warned in (
            ("the upload of client", cohort, told.get("warned", {})),
            ("the sum of relay", sorted({*sums, *before}), sums),
        ):
            for name in who:
                times = self._in_a_row[name] = (
                    self._in_a_row.get(name, 0) + 1 if name in warned else 0
                )
                if times and times & (times - 1) == 0:
                    row = f" (as its last {times} did)" if times > 1 else ""
                    place = f"{what} {name} in interaction {record['interaction'] + 1}"
                    line = f"{place} stands out and counts{row}: {warned[name]}"
                    self.events.tell("note", line=line)

    def explains(self, failed: Exception) -> Exception | None:
        """Go back before the latest commit with an odd upload; return the error to end with.

        Clients that fail right after such a commit most likely fail because of that upload. No
        commit is under way. Where no upload was odd, or all of them declined, nothing is done.
        """
        if isinstance(failed, ClientFailed):
            reasons: Mapping[Any, str] = {failed.client: failed.reason}
        else:
            reasons = failed.reasons if isinstance(failed, TooFewClients) else {}
        if reasons and not _not_declined(reasons):
            return None
        found = odd_commit(self.store)
        if found is None:
            return None
        interaction, client, oddity = found
        shown = interaction + 1
        why = f"client {client}'s upload in interaction {shown} was odd: {oddity}"
        reason = f"{why}; clients failed right after it"
        self.events.tell("rollback", client, interaction=interaction - 1, reason=reason)
        self.store.take_back(Interaction(interaction - 1))
        first = failed.line if isinstance(failed, TooFewClients) else failed
        return TooFewClients(
            f"{why}. Right after it clients failed, the first so: {first}. The run is back before "
            f"it: --resume computes interaction {shown} again, and --resume --without {client} "
            f"continues without client {client}"
        )
