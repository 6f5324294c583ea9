"""The keys of drift in ``[evaluate]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from fedmodels.config.bounds import StrictTable

if TYPE_CHECKING:
    from fedmodels.config.experiment import Experiment


class DriftKeys(StrictTable):
    """What ``[evaluate]`` says of drift."""

    drift: bool = False
    """Let clients report how far the inputs and the predictions of a task moved from those of
    earlier tasks (``input_drift``, ``prediction_drift``): a forward pass of at most 1000 test
    examples for each task that is compared, and summaries of inputs in the private state. What is
    beyond chance is a warning: docs/drift.md."""
    drift_reference: Literal["first", "sliding"] | None = None
    """What a task is compared with, beside the task before: the client's first tasks, which shows
    slow drift (``first``, unless given), or its last ones."""
    drift_window: Annotated[int, Field(ge=1, le=24)] | None = None
    """How many tasks the reference has; 3 unless given."""

    @property
    def scored_by(self) -> str:
        """Return the key by which models are looked at with clients' examples; empty if none is."""
        of_the_core: Any = super()
        return of_the_core.scored_by or ("[evaluate] drift" if self.drift else "")

    @model_validator(mode="after")
    def _drift_is_asked_for(self) -> DriftKeys:
        for key in ("drift_reference", "drift_window"):
            if not self.drift and getattr(self, key) is not None:
                raise ValueError(f"{key} says how drift is measured: set drift = true, or leave "
                                 "it out")  # fmt: skip
        return self


def keys_of(experiment: Experiment) -> DriftKeys:
    """Return what a config says of drift."""
    return cast(DriftKeys, experiment.evaluate)
