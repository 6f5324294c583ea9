"""What a key of a config may be; anything else is told before a run begins."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import core_schema

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
CountDetail = Literal["exact", "rounded", "none"]
"""How exactly clients tell how many examples of each class they have."""
DETAILS: tuple[CountDetail, ...] = ("exact", "rounded", "none")
"""The same in falling order of what is told."""


class StrictTable(BaseModel):
    """A TOML table that knows all its keys; values are of their type, and never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def differs(self, key: str) -> bool:
        """Tell whether a key has another value than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)


@dataclass(frozen=True)
class TableAt:
    """A table that few configs have; its module is imported for a config that has it.

    A field of type ``Annotated[Any, TableAt("module:Class")] | None`` reads, says and describes
    what one of type ``Class | None`` would; in place of a class there may be a type of several.
    """

    place: str
    """Module and name."""

    @cached_property
    def table(self) -> Any:
        """The class, or the type."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)

    @cached_property
    def _form(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.table)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Return how a value is read and written: as the class says."""
        return core_schema.no_info_before_validator_function(
            lambda value: self._form.validate_python(value), core_schema.any_schema()
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Return a reference to the JSON Schema of the class, or that of the type."""
        known: Any = self._form.core_schema
        if not isinstance(self.table, type):
            several: dict[str, Any] = handler(known)
            return several
        name = self.table.__name__
        refers = core_schema.definition_reference_schema(name)
        form: dict[str, Any] = handler(
            core_schema.definitions_schema(refers, [{**known, "ref": name}])
        )
        return form


@dataclass(frozen=True)
class Refusal:
    """Two parts that do not go together."""

    pair: tuple[str, str]
    why: str
    """The line of the error; ``{0}`` is the experiment."""
    only: Literal["", "each", "mean"] = ""
    """For which methods alone, by what their server half reads; all unless given."""
    when: Callable[[Any], bool] = lambda experiment: True
    where: str = ""
    """Under which further setting, in words, where ``when`` says so."""


def canonical(value: Any) -> str:
    """Return plain values as JSON, the same in whatever order keys stand, in lists as well."""
    return json.dumps(value, sort_keys=True)


def digest_of(facts: Mapping[str, Any] | None) -> str:
    """Return the sha256 of a table that is given as plain values; empty where it says nothing."""
    return hashlib.sha256(canonical(facts).encode()).hexdigest() if facts else ""


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested tables by dotted key, each in its canonical form."""
    out: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out.update(leaves(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = canonical(value)
    return out
