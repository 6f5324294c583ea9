"""The figure of detectors, as reports and ``fedsrv metrics`` explain it."""

from __future__ import annotations

from fedmodels.numerics.metric_tables import number

FIGURES = (
    number(
        "error_drift", "whether a detector found a change of errors",
        "with `[evaluate] detector`: 1 where the detector found a change in the errors of the "
        "client's model on a new task, before it trains on it, else 0; of a round: mean over the "
        "clients that report it", "the detector", "0 … 1",
    ),
)  # fmt: skip
