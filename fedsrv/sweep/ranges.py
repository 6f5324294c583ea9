"""What a sweep's file says of a search: ranges of settings, and how many trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Number = int | float
SEARCHED = ("training", "server_optimizer", "method", "net", "compression")
"""Tables whose keys may be searched. Keys of others change what a score measures."""


class Range(BaseModel):
    """The values that a setting may have."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    low: Number | None = None
    high: Number | None = None
    """Both ends belong to it; it holds whole numbers if both are whole."""
    log: bool = False
    """Whether the logarithm is drawn evenly."""
    choices: (
        Annotated[tuple[bool | int | float | str, ...], Field(strict=False, min_length=1)] | None
    ) = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        given = [value is not None for value in (self.low, self.high, self.choices)]
        if given not in ([True, True, False], [False, False, True]):
            raise ValueError("give low and high, or choices")
        low, high = self.low or 0, self.high or 0
        if low > high or (self.log and low <= 0):
            raise ValueError("low is at most high, and above 0 with log")
        return self


class Search(BaseModel):
    """``[search]`` of a sweep's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ranges: Annotated[Mapping[str, Range], Field(min_length=1)]
    trials: Annotated[int, Field(ge=1, le=100_000)] = 20
    """Runs of each row."""
    prune_after: Annotated[int, Field(ge=1)] = 5
    """Trials that come to their end first. A later one ends as soon as its best score so far lies
    below the median of what earlier ones had in the same scored round."""

    @model_validator(mode="after")
    def _may_be_searched(self) -> Self:
        for key in self.ranges:
            table, dot, _ = key.partition(".")
            if table not in SEARCHED or not dot or key == "method.name":
                raise ValueError(
                    f"ranges: {key!r} cannot be searched; keys of {', '.join(SEARCHED)} can"
                )
        return self
