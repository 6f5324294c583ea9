"""The keys of drift in ``[evaluate]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from fedmodels.config.bounds import StrictTable

if TYPE_CHECKING:
    from fedmodels.config.experiment import Experiment

MOST_KEPT = 160
"""Summaries of a client in its private state: each has at most 48 means of each number."""


class DriftKeys(StrictTable):
    """What ``[evaluate]`` says of drift."""

    drift: bool = False
    """Let clients report how far the inputs and the predictions of a task moved from those of
    earlier tasks (``input_drift``, ``prediction_drift``): a forward pass of at most 1000 test
    examples for each task that is compared, and summaries of inputs in the private state. What is
    beyond chance is a warning: docs/drift.md."""
    drift_reference: Literal["first", "sliding", "season"] | None = None
    """What a task is compared with: the client's first tasks, which shows slow drift (``first``,
    unless given), or its last ones, each beside the task before; or those of the same time of
    earlier years alone (``season``)."""
    drift_window: Annotated[int, Field(ge=1, le=24)] | None = None
    """How many tasks the reference has; 3 unless given."""
    drift_season: Annotated[int, Field(ge=2, le=53)] | None = None
    """After how many tasks a season comes again, as 12 months (unless given) or 52 weeks."""

    @property
    def season(self) -> int:
        """Return after how many tasks a season comes again; 0: none is asked for."""
        return (self.drift_season or 12) if self.drift_reference == "season" else 0

    @property
    def scored_by(self) -> str:
        """Return the key by which models are looked at with clients' examples; empty if none is."""
        of_the_core: Any = super()
        return of_the_core.scored_by or ("[evaluate] drift" if self.drift else "")

    @model_validator(mode="after")
    def _drift_is_asked_for(self) -> DriftKeys:
        for key in ("drift_reference", "drift_window", "drift_season"):
            if not self.drift and getattr(self, key) is not None:
                raise ValueError(f"{key} says how drift is measured: set drift = true, or leave "
                                 "it out")  # fmt: skip
        if self.drift_season is not None and self.drift_reference != "season":
            raise ValueError('drift_season is for drift_reference = "season": leave it out')
        if self.season and self.season * (self.drift_window or 1) > MOST_KEPT:
            raise ValueError(f"drift_season times drift_window is more than the {MOST_KEPT} tasks "
                             "of which summaries are kept")  # fmt: skip
        return self


def keys_of(experiment: Experiment) -> DriftKeys:
    """Return what a config says of drift."""
    return cast(DriftKeys, experiment.evaluate)
