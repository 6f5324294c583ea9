"""A table of a config that refuses keys it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictTable(BaseModel):
    """A TOML table that knows all its keys; values are of their type, and never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
