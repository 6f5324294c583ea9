"""What these commands print for programs, and the JSON Schema of what any command prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import TypeAdapter

from fedmodels.console.rows import SHAPES as OF_OTHERS
from fedmodels.console.rows import Printed


class MethodLine(Printed):
    """A method."""

    name: str
    about: str
    """What it is, in a sentence."""
    paper: str
    """Where it comes from; empty for one of another package that does not say."""


class Setting(Printed):
    """A key of a method's or a net's table in a config."""

    key: str
    required: bool
    """Whether a config has to give it: it has no default."""
    default: Any
    """Its value unless given, in the types of TOML; null: there is none."""
    meaning: str
    kind: Literal["setting", "switch", "reading"]
    """Whether it is a number or the like, a variant of the method, or a reading of its paper."""


class NetLine(Printed):
    """A net, and its size at the inputs that it is made for."""

    name: str
    about: str
    inputs: str
    """What it takes, in words; empty where that depends on its options, like the rest."""
    input_shape: list[int] | None
    classes: int | None
    parameters: int | None
    multiply_adds: int | None
    """Of one input, forward."""
    source: str


class MetricLine(Printed):
    """A metric of reports."""

    name: str
    title: str
    meaning: str
    population: str
    """Over whom it is taken."""
    range: str
    better: Literal["more", "less"] | None
    """Which values are better; null: neither."""
    source: str


SHAPES: Mapping[str, Any] = {
    "methods": list[MethodLine], "method": list[Setting], "nets": list[NetLine],
    "net": list[Setting], "metrics": list[MetricLine], **OF_OTHERS,
}  # fmt: skip
"""What each command prints with ``--json``; ``method`` and ``net`` are of one that is named."""


def schema_of(what: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints; ``what`` is one of :data:`SHAPES`."""
    found: dict[str, Any] = TypeAdapter(SHAPES[what]).json_schema(mode="serialization")
    return found
