"""Which clients' detectors found a change: the share of a round's clients, and a line on each."""

from __future__ import annotations

import math
from typing import Any

from fedmodels.own.code_names import short_name
from fedplugins.detectors.keys import keys_of
from fedplugins.detectors.shared import NAME
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.server_part import CurrentInteraction, ServerPart
from fedsrv.state.record import Record


class Detections(ServerPart):
    """Records and tells what detectors at clients found."""

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down the share of the clients with a change, of those that looked."""
        if told := [row[NAME] for row in record["clients"].values() if NAME in row]:
            record["metrics"][NAME] = math.fsum(told) / len(told)

    def committed(self, record: Record) -> None:
        """Say at which clients the errors changed."""
        rows: dict[str, Any] = record["clients"]
        if clients := [client for client, row in rows.items() if row.get(NAME)]:
            name = short_name(keys_of(self.experiment).detector or "")
            self.events.tell(
                "note",
                line=f"the models' errors on new tasks changed at {clients_text(clients)}, as "
                f"{name} says there; docs/drift.md",
            )
