"""A method's settings: from a table of a config to the fields of its class, and back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fedmodels.errors import ConfigError, suggestion
from fedmodels.printable import shown
from fedmodels.training.declaration import build, hints_of

if TYPE_CHECKING:
    from fedmodels.training.run import RunFacts

T = TypeVar("T")


class SharedSettings:
    """Settings that several methods share, such as those of a search.

    A method has them as one field. In a config they are keys of ``[method]`` itself: a part has no
    table of its own.
    """

    def check(self, run: RunFacts) -> None:
        """Check that a run has what the technique needs, such as images.

        Raises:
            ConfigError: says what is missing.
        """


def parts_of(cls: type[Any], name: str = "") -> dict[str, type[Any]]:
    """Return the parts of a method's class by the name of their field."""
    hints = hints_of(cls, name or cls.__name__)
    kinds = ((field.name, hints[field.name]) for field in dataclasses.fields(cls))
    return {
        k: kind for k, kind in kinds if isinstance(kind, type) and issubclass(kind, SharedSettings)
    }


def check_parts(method: Any, run: RunFacts) -> None:
    """Check that a run has what the techniques of a method need.

    Raises:
        ConfigError: names the method, and what is missing.
    """
    for name in parts_of(type(method)):
        try:
            getattr(method, name).check(run)
        except ConfigError as error:
            raise ConfigError(f"method {method.name!r}: {error}") from None


def keys_of(cls: type[Any]) -> dict[str, tuple[type[Any], dataclasses.Field[Any]]]:
    """Return the keys of a method's table: for each the class that has the field, and the field."""
    parts, found = parts_of(cls), dict[str, tuple[type[Any], dataclasses.Field[Any]]]()
    for field in dataclasses.fields(cls):
        if field.name in parts:
            found |= keys_of(parts[field.name])
        else:
            found[field.name] = cls, field
    return found


def from_table(
    cls: type[T], table: Mapping[str, Any], where: str, name: str, further: Collection[str] = ()
) -> T:
    """Return a method, or a table of it, with checked values.

    Error lines name ``further`` keys too, which the table may have beside the class's own.

    Raises:
        ConfigError: a key is unknown, or a value of the wrong type.
    """
    kind = typing.cast("Any", cls)
    parts, hints = parts_of(kind, name), hints_of(kind, name)
    owners = {key: part for part, inner in parts.items() for key in keys_of(inner)}
    own = {field.name for field in dataclasses.fields(kind)} - parts.keys()
    values: dict[str, Any] = {}
    shared: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for key, value in table.items():
        if key in owners:
            shared[owners[key]][key] = value
        elif key not in own:
            known = sorted({*own, *owners, *further})
            raise ConfigError(
                f"unknown key {key!r} in [{where}]; {name} has: {', '.join(known) or 'none'}."
                f"{suggestion(key, [*known, *(['name'] if where == 'method' else [])])}"
            )
        elif not dataclasses.is_dataclass(hints[key]):
            values[key] = _value(hints[key], value, f"{where}.{key}")
        elif isinstance(value, Mapping):
            inner = typing.cast("type[Any]", hints[key])
            values[key] = from_table(inner, value, f"{where}.{key}", name)
        else:
            raise ConfigError(f"{where}.{key} must be a table (given: {shown(value)})")
    for part, inner in parts.items():
        values[part] = from_table(inner, shared[part], where, name)
    return build(cls, values, where, name)


def to_table(method: Any) -> dict[str, Any]:
    """Return the values of a method's fields under their keys; :func:`from_table` reads them."""
    parts, found = parts_of(type(method)), dict[str, Any]()
    for key, value in dataclasses.asdict(method).items():
        found |= value if key in parts else {key: value}
    return found


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return a value of the type that a field has."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from fedmodels.config.faults import fault_of

    try:
        adapter = TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))
        return adapter.validate_python(value, strict=not _is_number(value))
    except ValidationError as error:
        what = fault_of(error, value).message
        raise ConfigError(f"{where}: {what} (given: {shown(value)})") from None


def _is_number(value: object) -> bool:
    """Let 1 stand for 1.0, but not "1" for 1."""
    return isinstance(value, int | float | list) and not isinstance(value, bool)
