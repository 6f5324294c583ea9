"""Notes on examples that no training uses, and on clients that have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsrv.engine.client_profile import clients_text, untrained
from fedsrv.engine.plan import Plan
from fedsrv.engine.server_part import NOTHING, ServerPart
from fedsrv.progress.events import EventLog
from fedsrv.state.record import Record
from fedsrv.state.store import Store


class UnusedData(ServerPart):
    """Says which examples train nothing."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Begin; nothing was told."""
        super().__init__(store, events, given)
        self._told = set[str]()
        """Kinds of notes that were told: they are the same in most rounds."""

    def gathered(self, plan: Plan) -> None:
        """Name clients that have nothing to train on."""
        if not self.experiment.method.pools_data and (line := untrained(plan.profiles)):
            self.events.tell("note", line=line)

    def committed(self, record: Record) -> None:
        """Tell, once of each kind, that clients left examples out."""
        for kind, line in left_out_of(record).items():
            if kind not in self._told:
                self._told.add(kind)
                self.events.tell("note", line=line)


def left_out_of(record: Record) -> dict[str, str]:
    """Return lines on the training examples that a record's clients left out, by what they are.

    ``some`` are of a last batch of one; ``all`` are of clients that took no step.
    """
    rows = {c: r for c, r in record["clients"].items() if r.get("skipped_examples")}
    idle = [c for c, r in rows.items() if r["skipped_examples"] == r["num_examples"]]
    some = {c: r["skipped_examples"] for c, r in rows.items() if c not in idle}
    why = "the net normalises over the batch, and a batch of one example cannot be normalised"
    found = {}
    if some:
        found["some"] = (
            f"round {record['round'] + 1} left {sum(some.values())} training examples out, at "
            f"{clients_text([*some])}: {why}; in other epochs they are others"
        )
    if idle:
        found["all"] = (
            f"round {record['round'] + 1} trained nothing at {clients_text(idle)}: {why}; give "
            "them more examples, or take a net without batch normalisation"
        )
    return found
