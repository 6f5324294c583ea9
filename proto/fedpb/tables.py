"""Tables of values, and descriptions of data (``client.json``), to messages and back.

Values have the types of TOML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fedmodels.errors import PayloadError
from fedmodels.facts.data_description import ClientFile
from fedpb.v1 import description_pb2
from fedpb.v1 import table_pb2 as pb

MAX_DEPTH = 16
"""Limit of tables and lists inside of each other."""
MAX_VALUES = 10_000
"""Limit of values in one table, those of inner tables and lists included."""
_INT64 = range(-(2**63), 2**63)


KeyPath = tuple[str, ...]
"""The keys that lead to a value in tables inside of each other."""


def table_of(values: Mapping[str, Any], usual: Collection[KeyPath] = ()) -> pb.Table:
    """Return plain values as a message.

    Args:
        values: None, booleans, integers, numbers, strings, and lists and mappings of them.
        usual: the keys whose values are defaults.

    Raises:
        PayloadError: a value is none of these, or does not fit into its type.
    """
    table = pb.Table(entries=[pb.Entry(key=k, value=_message(k, v)) for k, v in values.items()])
    for path, entry in _entries(table):
        entry.usual = path in usual
    return table


def usual_of(table: pb.Table) -> list[KeyPath]:
    """Return the keys of a message whose values are defaults; tables before what is in them."""
    return [path for path, entry in _entries(table) if entry.usual]


def _entries(table: pb.Table, above: KeyPath = ()) -> Iterator[tuple[KeyPath, pb.Entry]]:
    """Yield the entries of a table that :func:`values_of` or :func:`table_of` has seen."""
    for entry in table.entries:
        path = (*above, entry.key)
        yield path, entry
        if entry.value.HasField("table"):
            yield from _entries(entry.value.table, path)


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


def description_of(client_json: str) -> description_pb2.ClientDescription:
    """Return the text of a ``client.json`` that was checked as a message.

    Raises:
        PayloadError: its ``partition`` holds what no message can.
    """
    facts = json.loads(client_json)
    plain = {key: value for key, value in facts.items() if key != "partition" and value is not None}
    partition = facts.get("partition")
    return description_pb2.ClientDescription(
        **plain, partition=None if partition is None else table_of(partition)
    )


def client_json_of(description: description_pb2.ClientDescription) -> str:
    """Return a message as the text of a ``client.json``, defaults filled in.

    Whether the text describes anything is for its reader to check.

    Raises:
        PayloadError: ``partition`` is malformed.
    """
    has_partition = description.HasField("partition")
    facts = {
        "format": description.format,
        "dataset": description.dataset or _default("dataset"),
        "input_shape": list(description.input_shape),
        "num_classes": description.num_classes,
        "scale": description.scale or _default("scale"),
        "mean": list(description.mean) or _default("mean"),
        "std": list(description.std) or _default("std"),
        "class_names": list(description.class_names),
        **({"name": description.name} if description.name else {}),
        **({"recipe": description.recipe} if description.recipe else {}),
        **({"counted": description.counted} if description.counted else {}),
        "partition": values_of(description.partition) if has_partition else None,
        "tasks": [_task_of(task) for task in description.tasks],
    }
    return json.dumps(facts)


def _task_of(task: description_pb2.TaskCounts) -> dict[str, Any]:
    """Return a task as ``client.json`` has it, without what most tasks lack."""
    found: dict[str, Any] = {"train": list(task.train), "test": list(task.test)}
    more = {
        "set_aside": task.set_aside, "why": task.why, "again": task.again, "unusual": task.unusual,
        "drifted": task.drifted, "digest": task.digest,
    }  # fmt: skip
    return found | {key: value for key, value in more.items() if value}


def _default(name: str) -> Any:
    return ClientFile.model_fields[name].default
