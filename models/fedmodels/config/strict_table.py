"""A table of a config that refuses keys it does not know."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict

HERE = "here"
NAMED = "named"
Place = Annotated[str | None, HERE]
"""A path on the machine of whoever wrote the config. It never crosses the wire."""
CodeName = Annotated[str, NAMED]
"""A registered name, or ``file.py:Name``, of which the directory never crosses the wire."""


class StrictTable(BaseModel):
    """A TOML table that knows all its keys; values are of their type, and never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def differs(self, key: str) -> bool:
        """Tell whether a key has another value than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)
