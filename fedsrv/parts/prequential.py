"""Prequential scores of a round (``[evaluate] prequential``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from fedmodels.parts.prequential import NAMES
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.server_part import CurrentInteraction, ServerPart
from fedsrv.engine.summary import Figures
from fedsrv.state.record import Record


class PrequentialScores(ServerPart):
    """Tells how good clients' models are on new tasks before anybody trains on these."""

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down the mean over the clients that begin a task."""
        rows = record["clients"].values()
        for name in NAMES:
            if values := [row[name] for row in rows if name in row]:
                record["metrics"][name] = fmean(values)

    def figures(self) -> Mapping[str, Figures]:
        """Return what computes the score over the whole stream of a run that has ended."""
        return {"prequential": over_streams}


def over_streams(records: Sequence[Record]) -> dict[str, float]:
    """Return the mean over clients of the mean score on tasks before they were trained on."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for client, row in record["clients"].items():
            for name in NAMES:
                if name in row:
                    found.setdefault(name, {}).setdefault(client, []).append(row[name])
    return {name: float(np.mean([*map(np.mean, each.values())])) for name, each in found.items()}
