"""Prequential scores of a round (``[evaluate] prequential``)."""

from __future__ import annotations

from statistics import fmean

from fedsrv.engine.reduction import Reduced
from fedsrv.engine.server_part import Interaction, ServerPart
from fedsrv.state.record import Record


class PrequentialScores(ServerPart):
    """Tells how good clients' models are on new tasks before anybody trains on these."""

    def records(self, at: Interaction, found: Reduced, record: Record) -> None:
        """Put down the mean over the clients that begin a task."""
        rows = record["clients"].values()
        if values := [row["prequential"] for row in rows if "prequential" in row]:
            record["metrics"]["prequential"] = fmean(values)
