"""What a key of a config may be; anything else is told before a run begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

NonNegative = Annotated[float, Field(ge=0)]
"""Such as the weight of a term of a loss: 0 leaves it out."""
Positive = Annotated[float, Field(gt=0)]
"""Such as a temperature or a learning rate."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, such as the weight of one of two terms."""
MAX_COUNT = 2**31 - 1
"""No count is larger: torch takes none beyond it."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A count; 0 is allowed."""
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""A count of at least one."""


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


def digest_of(facts: Mapping[str, Any] | None) -> str:
    """Return the sha256 of a table that is given as plain values; empty where it says nothing."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest() if facts else ""


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested tables by dotted key, as JSON."""
    out: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out.update(leaves(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = json.dumps(value)
    return out
