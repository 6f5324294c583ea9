"""The figures of drift, as reports and ``fedsrv metrics`` explain them."""

from __future__ import annotations

from fedmodels.numerics.metric_tables import Metric, number

SOURCE = "Smyth 2004; Rebjock et al. 2021"

FIGURES = (
    Metric(
        "drift_delay", "tasks until drift is reported",
        "with `[evaluate] drift`, of the coordinator's alarms: tasks from a change of a client's "
        "domains or concepts to the first alarm before its next change; mean over those that "
        "have one",
        better=-1, unit="", range="≥ 0",
    ),
    Metric(
        "drift_missed", "changes without an alarm",
        "part of the clients' changes without an alarm before the next change and the end",
        better=-1,
    ),
    Metric(
        "drift_false_alarms", "tasks with a false alarm of drift",
        "part of the tasks, from the second one of a client, that show what the one before did "
        "and have an alarm, unless it is the first one since a change",
        better=-1,
    ),
    number(
        "input_drift", "how far inputs moved",
        "with `[evaluate] drift`: of the number of the training data that moved most surely since "
        "the client's earlier tasks, the largest gap between its distributions then and now, "
        "within classes (docs/drift.md); of a round: mean over the clients that report it", SOURCE,
        "0 … 1",
    ),
    number(
        "input_drift_p", "chance of inputs that far apart",
        "p-value of `input_drift`, over all numbers that were tested (Simes)", SOURCE, "0 … 1",
    ),
    number(
        "input_drift_number", "which number of the inputs moved",
        "its place in the list of watched numbers, where `input_drift_p` is below 0.01", SOURCE,
    ),
    *(number(
        f"input_drift_number_{n}", f"number of the {word} column of the inputs that moved",
        f"as `input_drift_number`, of the {word} column that moved (Benjamini and Hochberg)",
        SOURCE,
    ) for n, word in ((2, "second"), (3, "third"))),
    number(
        "prediction_drift", "how far predictions moved",
        "as `input_drift`, of the softmax that the client's model, before it trains, gives for the "
        "test data of the tasks that are compared", SOURCE, "0 … 1",
    ),
    number(
        "prediction_drift_p", "chance of predictions that far apart",
        "p-value of `prediction_drift`, as `input_drift_p`", SOURCE, "0 … 1",
    ),
    number(
        "prediction_drift_number", "which number of the predictions moved",
        "as `input_drift_number`", SOURCE,
    ),
    *(number(
        f"prediction_drift_number_{n}", f"number of the {word} class of predictions that moved",
        f"as `input_drift_number_{n}`", SOURCE,
    ) for n, word in ((2, "second"), (3, "third"))),
)  # fmt: skip
"""What clients report, and what the coordinator computes at a run's end."""
