"""Well-formed messages that lie: generated from the schema, one value at a time.

The descriptors of protobuf tell every field of a message, in all messages it holds. Each field is
given boundary values of its type, references to what there is not, and bombs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
BOMB_BYTES = 3 << 20
"""Repeated values grow to about this size: a message of gRPC may have 4 MiB."""
TEXTS = (
    "", "\x1b[2J\r\nerror: forged", "9" * 5000, "-1", "../../0", "evaluator", "task/30000000",
    "views", "global", "[" * 100_000, '{"a":' * 50_000, "x" * (1 << 20), "\u202e\ufffe",
)  # fmt: skip
BYTES = (b"", b"\0" * 16, b"\xff" * 31, b"x" * (1 << 20))
NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: (0, -1, 1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, -1, 1, 2**31, 30_000_000, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 64, 10 << 30, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (
        0.0, -1.0, 0.5, 1e30, 1e300, 5e-324, math.nan, math.inf, -math.inf,
    ),
    FieldDescriptor.CPPTYPE_BOOL: (True, False),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 99, -1),
}  # fmt: skip
Change = Callable[[Any], None]


@dataclass(frozen=True)
class Lie:
    """What to change in a message, and the name of the field that lies."""

    field: str
    what: str
    change: Change

    def told(self, honest: M) -> M:
        """Return a copy of an honest message that lies."""
        copy = type(honest)()
        copy.CopyFrom(honest)
        self.change(copy)
        return copy

    def __repr__(self) -> str:
        return f"{self.field} = {self.what}"


def lies_about(descriptor: Descriptor) -> list[Lie]:
    """Return every lie there is about messages of a type."""
    return [
        Lie(field.full_name, what, change)
        for field, what, change in _changes(descriptor, lambda message: message)
    ]


Found = tuple[FieldDescriptor, str, Change]
Reach = Callable[[Any], Any]
Within = tuple[str, ...]


def _changes(descriptor: Descriptor, reach: Reach, within: Within = ()) -> Iterator[Found]:
    """Yield changes to a message type; ``reach`` finds such a message in the outermost one.

    A type that holds itself is lied about once: ``within`` names the types on the way to it.
    """
    if descriptor.full_name in within:
        return
    within = (*within, descriptor.full_name)
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from _in_map(field, reach)
        elif field.is_repeated:
            yield from _in_list(field, reach, within)
        elif field.message_type is not None:
            yield field, "absent", _clearing(field, reach)
            yield field, "empty", _emptying(field, reach)
            yield from _changes(field.message_type, _into(field, reach), within)
        else:
            if field.has_presence:  # else what is absent reads as a zero, which is among the values
                yield field, "absent", _clearing(field, reach)
            for value in _values(field):
                yield field, _shown(value), _setting(field, reach, value)


def _in_list(field: FieldDescriptor, reach: Reach, within: Within) -> Iterator[Found]:
    yield field, "none", _clearing(field, reach)
    if field.message_type is None:
        for value in _values(field):
            yield field, f"[{_shown(value)}]", _listing(field, reach, [value])
        for value in _values(field)[:3]:
            many = BOMB_BYTES // max(len(value) if isinstance(value, str | bytes) else 10, 1)
            bomb = [value] * min(many, 300_000)
            yield field, f"[{_shown(value)}] * {len(bomb)}", _listing(field, reach, bomb)
        return
    yield field, "all but the first", _without_first(field, reach)
    yield field, "one twice", _repeating(field, reach, 2)
    yield field, "a bomb", _repeating(field, reach, 100_000)
    yield field, "empty ones", _adding(field, reach, 100_000)
    yield from _changes(field.message_type, _into_first(field, reach), within)


def _in_map(field: FieldDescriptor, reach: Reach) -> Iterator[Found]:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    yield field, "none", _clearing(field, reach)
    yield field, "all but the first", _without_first(field, reach)
    for text in _values(key):
        yield field, f"{{{_shown(text)}: 1}}", _mapping(field, reach, {text: 1.0})
    for number in _values(value):
        yield field, f"{{num_examples: {number}}}", _valuing(field, reach, number)
    many = {f"k{n}": 1.0 for n in range(100_000)}
    yield field, "a bomb", _mapping(field, reach, many)


def _values(field: FieldDescriptor) -> Sequence[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return BYTES
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return TEXTS
    return NUMBERS[field.cpp_type]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 30 else f"{text[:20]}… ({len(text)})"


# --- changes --------------------------------------------------------------------------------------


def _into(field: FieldDescriptor, reach: Reach) -> Reach:
    return lambda message: getattr(reach(message), field.name)


def _into_first(field: FieldDescriptor, reach: Reach) -> Reach:
    """Reach the first message of a list, which is made where there is none."""

    def first(message: Any) -> Any:
        held = getattr(reach(message), field.name)
        return held[0] if held else held.add()

    return first


def _clearing(field: FieldDescriptor, reach: Reach) -> Change:
    return lambda message: reach(message).ClearField(field.name)


def _without_first(field: FieldDescriptor, reach: Reach) -> Change:
    """Leave out what is first in a list, or an entry of a map."""

    def change(message: Any) -> None:
        held = getattr(reach(message), field.name)
        if held:
            del held[0 if isinstance(held, Sequence) else next(iter(held))]

    return change


def _emptying(field: FieldDescriptor, reach: Reach) -> Change:
    def change(message: Any) -> None:
        reach(message).ClearField(field.name)
        getattr(reach(message), field.name).SetInParent()

    return change


def _setting(field: FieldDescriptor, reach: Reach, value: object) -> Change:
    return lambda message: setattr(reach(message), field.name, value)


def _listing(field: FieldDescriptor, reach: Reach, values: Sequence[Any]) -> Change:
    def change(message: Any) -> None:
        reach(message).ClearField(field.name)
        getattr(reach(message), field.name).extend(values)

    return change


def _repeating(field: FieldDescriptor, reach: Reach, most: int) -> Change:
    """Repeat what is first in a list, as often as the size of a message allows."""

    def change(message: Any) -> None:
        one = _into_first(field, reach)(message)
        times = max(2, min(most, BOMB_BYTES // (one.ByteSize() + 4)))
        copy = type(one)()
        copy.CopyFrom(one)
        getattr(reach(message), field.name).extend([copy] * times)

    return change


def _adding(field: FieldDescriptor, reach: Reach, times: int) -> Change:
    def change(message: Any) -> None:
        held = getattr(reach(message), field.name)
        for _ in range(times):
            held.add()

    return change


def _mapping(field: FieldDescriptor, reach: Reach, entries: dict[str, float]) -> Change:
    return lambda message: getattr(reach(message), field.name).update(entries)


def _valuing(field: FieldDescriptor, reach: Reach, number: float) -> Change:
    """Give a number to whatever a map holds; to ``num_examples`` where it holds nothing."""

    def change(message: Any) -> None:
        held = getattr(reach(message), field.name)
        for key in list(held) or ["num_examples"]:
            held[key] = number

    return change
