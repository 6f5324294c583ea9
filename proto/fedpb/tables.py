"""Tables of values to messages and back: what a config says, in the types of TOML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedmodels.errors import PayloadError
from fedpb.v1 import table_pb2 as pb

MAX_DEPTH = 16
"""Limit of tables and lists inside of each other."""
MAX_VALUES = 10_000
"""Limit of values in one table, those of inner tables and lists included."""
_INT64 = range(-(2**63), 2**63)


def table_of(values: Mapping[str, Any]) -> pb.Table:
    """Return plain values as a message.

    Args:
        values: None, booleans, integers, numbers, strings, and lists and mappings of them.

    Raises:
        PayloadError: a value is none of these, or does not fit into its type.
    """
    return pb.Table(entries=[pb.Entry(key=k, value=_message(k, v)) for k, v in values.items()])


def _message(key: str, value: object) -> pb.Value:
    match value:
        case None:
            return pb.Value()
        case bool():
            return pb.Value(boolean=value)
        case int() if value in _INT64:
            return pb.Value(integer=value)
        case float() if math.isfinite(value):
            return pb.Value(number=value)
        case str():
            return pb.Value(text=value)
        case Mapping():
            return pb.Value(table=table_of(value))
        case list() | tuple():
            return pb.Value(list=pb.ValueList(values=[_message(key, each) for each in value]))
    raise PayloadError(f"the value of {key!r} cannot be sent: {value!r}")


def values_of(table: pb.Table) -> dict[str, Any]:
    """Return the plain values of a message.

    Raises:
        PayloadError: a key comes twice, a number is not finite, or there is too much of anything.
    """
    return _Reader().table(table, 1)


class _Reader:
    """Reads one table, and counts what it holds."""

    def __init__(self) -> None:
        self.left = MAX_VALUES

    def table(self, table: pb.Table, depth: int) -> dict[str, Any]:
        self._count(len(table.entries), depth)
        found: dict[str, Any] = {}
        for entry in table.entries:
            if entry.key in found:
                raise PayloadError(f"key {entry.key[:60]!r} comes twice in a table")
            found[entry.key] = self._value(entry.value, depth)
        return found

    def _list(self, values: Iterable[pb.Value], size: int, depth: int) -> list[Any]:
        self._count(size, depth)
        return [self._value(each, depth) for each in values]

    def _value(self, value: pb.Value, depth: int) -> Any:
        kind = value.WhichOneof("kind")
        if kind is None:
            return None
        if kind == "table":
            return self.table(value.table, depth + 1)
        if kind == "list":
            held = value.list.values
            return self._list(held, len(held), depth + 1)
        found = getattr(value, kind)
        if kind == "number" and not math.isfinite(found):
            raise PayloadError("a table holds a number that is not finite")
        return found

    def _count(self, values: int, depth: int) -> None:
        self.left -= values
        if self.left < 0:
            raise PayloadError(f"a table holds more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise PayloadError(f"a table nests deeper than {MAX_DEPTH} levels")
