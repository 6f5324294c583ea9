"""``[deploy]``: which models of a client are served while it trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import StrictTable


class Deploy(StrictTable):
    """``[deploy]``: which models of a client are served while it trains: docs/serving.md.

    Left out, models are there when the run ends, and a client may still ``fedcli join --deploy``.
    """

    guard: Literal["held_out", "none"] = "held_out"
    """What a client compares a new model with the live one on. ``held_out``: what it keeps for
    validation of the tasks that it has met (``data.validation_share``); without such a part its own
    test data, on which the accuracy of a live model is flattered then. ``none``: every new model
    goes live."""
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """A new model goes live with an accuracy this much lower than the live one's, or, where numbers
    or several labels are learned, with a loss larger by this part; with more than 0, models may get
    worse step by step."""

    keep_mb: Annotated[int, Field(ge=0, le=10_000)] = 256
    """MiB of earlier live models that a client keeps for ``fedcli rollback --to``, beside the live
    one and the one before; the last model of each task is kept longest."""

    @model_validator(mode="after")
    def _tolerance_has_a_guard(self) -> Deploy:
        if self.guard == "none" and self.differs("tolerance"):
            raise ValueError('tolerance does nothing with guard = "none": leave it out')
        return self
