"""What switches the measuring of drift on, and where its code is."""

from __future__ import annotations

from fedmodels.config.part import Part

PART = Part(
    "drift",
    "[evaluate] drift",
    lambda experiment: experiment.evaluate.drift,
    "drift.md",
    home="fedplugins.drift",
    after="refused models",
    tables={"evaluate": "keys:DriftKeys"},
    server="server:Drift",
    client="client:DriftMeter",
    shared="shared:Drift",
    tells=("input_drift", "input_drift_p", "input_drift_number",
           "input_drift_number_2", "input_drift_number_3",
           "prediction_drift", "prediction_drift_p", "prediction_drift_number",
           "prediction_drift_number_2", "prediction_drift_number_3"),
    computes=("drift_delay", "drift_missed", "drift_false_alarms"),
    panels="panels:of_drift",
    lines="panels:what_moved",
    draws=("drift",),
    sample={"evaluate": {"drift": True}},
    changes={"evaluate.drift": "trainings from the next round"},
)  # fmt: skip
