"""Variants of methods: other readings of a paper, as subclasses that override whole functions.

A key of ``[method.reading]`` picks one. Where several keys do, the method's class inherits from the
class of each in the order of their table: what one overrides hands on to the next by ``super()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fedmodels.console.printable import shown
from fedmodels.errors import ConfigError, suggestion

Choices = Mapping[Any, type[Any] | None]
"""The class behind each value of a key; the first value is the default, which has none."""


@dataclass(frozen=True)
class Variants:
    """The variants of one method."""

    readings: Mapping[str, Choices] = field(default_factory=dict)
    """By key of ``[method.reading]``."""
    switches: Mapping[str, Choices] = field(default_factory=dict)
    """By key of ``[method]``."""
    apart: tuple[tuple[str, str], ...] = ()
    """Pairs that exclude each other; a key stands for all its values but the default, and
    ``key = "value"`` for one. All others may be combined."""

    @property
    def choices(self) -> dict[str, Choices]:
        """Return the choices of every key, in the order in which their classes inherit."""
        return {**self.readings, **self.switches}

    def defaults(self) -> dict[str, Any]:
        """Return the default of every key."""
        return {key: next(iter(each)) for key, each in self.choices.items()}

    def picked(
        self, cls: Any, fields: Mapping[str, object], table: Mapping[str, Any], name: str
    ) -> tuple[type[Any], dict[str, Any]]:
        """Return the class that a method's table asks for, and the values of its fields.

        A reading may stand beside the table ``reading``.

        Raises:
            ConfigError: a key is given twice or unknown, or has an unknown value.
        """
        values = self._flat(table, name)
        chosen = {key: values.pop(key, value) for key, value in self.defaults().items()}
        kinds = [kind for key, value in chosen.items() if (kind := self._class_of(key, value))]
        for pair in self.apart:
            if all(self._has({**values, **chosen}, each) for each in pair):
                raise ConfigError(f"{name}: {pair[0]} and {pair[1]} exclude each other: give one")
        values |= {key: value for key, value in chosen.items() if key in fields}
        combined: type[Any] = _combined(cls, tuple(kinds), tuple(chosen.items()))
        return combined, values

    def _has(self, given: Mapping[str, Any], asked: str) -> bool:
        """Return whether a method's table has one side of a pair that is apart."""
        key, _, value = asked.partition(" = ")
        return f'"{given.get(key)}"' == value if value else bool(self.choices[key][given[key]])

    def _flat(self, table: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return a method's table with the readings beside the other keys."""
        inside = table.get("reading", {})
        if not isinstance(inside, Mapping):
            raise ConfigError(f"method.reading must be a table (given: {shown(inside)})")
        values = {key: value for key, value in table.items() if key != "reading"}
        for key, value in inside.items():
            if key not in self.readings:
                has = ", ".join(sorted(self.readings))
                raise ConfigError(
                    f"unknown key {key!r} in [method.reading]; {name} has: {has}."
                    f"{suggestion(key, self.readings)}"
                )
            if key in values:
                raise ConfigError(f"method.{key} and method.reading.{key} are one switch: give one")
            values[key] = value
        return values

    def _class_of(self, key: str, value: object) -> type[Any] | None:
        choices = self.choices[key]
        if not any(value == each and type(value) is type(each) for each in choices):
            table = "method.reading" if key in self.readings else "method"
            told = " or ".join(repr(each) for each in choices)
            raise ConfigError(f"{table}.{key}: Input should be {told} (given: {shown(value)})")
        return choices[value]


@cache
def _combined(cls: Any, kinds: tuple[Any, ...], chosen: tuple[tuple[str, Any], ...]) -> Any:
    """Return the method's class with the functions of its variants before its own."""
    if not kinds:
        return cls
    name = f"{cls.__name__}[{', '.join(kind.__name__ for kind in kinds)}]"
    return type(name, (*kinds, cls), {"chosen": dict(chosen), "__module__": cls.__module__})
