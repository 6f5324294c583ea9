"""The keys of detectors in ``[evaluate]``."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import model_validator

from fedmodels.config.bounds import NAMED, StrictTable


class DetectorKeys(StrictTable):
    """What ``[evaluate]`` says of a detector."""

    detector: Annotated[str | None, NAMED] = None
    """Let a detector look at the errors that each client's model makes on a new task before it
    trains on it: a name of the entry points ``fedtide.detectors``, or ``file.py:Name``
    (docs/drift.md)."""
    detector_sha256: str | None = None
    """What the file holds; a run writes it."""

    @property
    def scored_by(self) -> str:
        """Return the key by which models are looked at with clients' examples; empty if none is."""
        of_the_core: Any = super()
        return of_the_core.scored_by or ("[evaluate] detector" if self.detector else "")

    @model_validator(mode="after")
    def _digest_is_of_a_detector(self) -> DetectorKeys:
        if self.detector is None and self.detector_sha256 is not None:
            raise ValueError("detector_sha256 is what a detector's file holds: name the detector")
        return self


def keys_of(experiment: Any) -> DetectorKeys:
    """Return what a config says of detectors."""
    return cast(DetectorKeys, experiment.evaluate)
