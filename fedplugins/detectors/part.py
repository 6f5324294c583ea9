"""What switches a detector on, and where its code is."""

from __future__ import annotations

from fedmodels.config.part import Part

PART = Part(
    "detectors",
    "[evaluate] detector",
    lambda experiment: experiment.evaluate.detector is not None,
    "drift.md",
    home="fedplugins.detectors",
    after="drift",
    tables={"evaluate": "keys:DetectorKeys"},
    server="server:Detections",
    client="client:ErrorDetector",
    shared="shared:Detector",
    refuses="refusals:REFUSED",
    tells=("error_drift",),
    sample={"evaluate": {"detector": "page-hinkley"}},
)
