"""A method's settings: from a table of a config to the fields of its class, and back.

A class from outside of fedtide is checked here when it is first used.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from fedmodels.console.printable import shown
from fedmodels.errors import ConfigError, FedtideError, suggestion

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from fedmodels.training.method import Method
    from fedmodels.training.run import RunFacts

T = TypeVar("T")
TAKEN = ("name", "code_sha256")
"""Keys of ``[method]`` that are no hyper-parameters."""
PROPERTIES = ("views", "rules")
PLAIN = (bool, int, float, str, type(None))


class SharedSettings:
    """Settings that several methods share, such as those of a search.

    A method has them as one field. In a config they are keys of ``[method]`` itself: a part has no
    table of its own.
    """

    def check(self, run: RunFacts) -> None:
        """Check that a run has what the technique needs; ConfigError says what is missing."""


def parts_of(cls: type[Any], name: str = "") -> dict[str, type[Any]]:
    """Return the parts of a method's class by the name of their field."""
    hints = hints_of(cls, name or cls.__name__)
    kinds = ((field.name, hints[field.name]) for field in dataclasses.fields(cls))
    return {
        k: kind for k, kind in kinds if isinstance(kind, type) and issubclass(kind, SharedSettings)
    }


def check_parts(method: Any, run: RunFacts) -> None:
    """Check that a run has what a method's techniques need; ConfigError says what is missing."""
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
            values[key] = _value(kind, key, value, f"{where}.{key}")
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


def _value(cls: Any, key: str, value: Any, where: str) -> Any:
    """Return a value of the type that a field has."""
    from pydantic import ValidationError

    from fedmodels.config.faults import fault_of

    try:
        return _adapter(cls, key).validate_python(value, strict=not _is_number(value))
    except ValidationError as error:
        what = fault_of(error, value).message
        raise ConfigError(f"{where}: {what} (given: {shown(value)})") from None


@lru_cache(maxsize=1024)
def _adapter(cls: Any, key: str) -> TypeAdapter[Any]:
    """Return what checks the values of a field: making it takes longer than its use."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(_hints(cls)[key], config=ConfigDict(allow_inf_nan=False))


def _is_number(value: object) -> bool:
    """Let 1 stand for 1.0, but not "1" for 1."""
    return isinstance(value, int | float | list) and not isinstance(value, bool)


def check_class(name: str, cls: type[Method]) -> None:
    """Check a class before a method of it is made; ConfigError says what to write."""
    for field in dataclasses.fields(cls):
        if field.name in TAKEN:
            raise ConfigError(
                f"{name}: no field may be called {field.name!r}, a key that [method] has already; "
                "rename it"
            )
    for key in PROPERTIES:
        if inspect.isfunction(inspect.getattr_static(cls, key)):
            raise ConfigError(f"{name}: {key} must be a property: put @property above it")
    _check_calls(name, cls)
    hints_of(cls, name)


def _check_calls(name: str, cls: type[Method]) -> None:
    """Check that functions that a class overrides take what they are called with."""
    for key, own in vars(cls).items():
        base = next((vars(b)[key] for b in cls.__mro__[1:] if key in vars(b)), None)
        if not (inspect.isfunction(own) and inspect.isfunction(base)) or key.startswith("__"):
            continue
        wanted = list(inspect.signature(base).parameters)
        try:
            inspect.signature(own).bind(*wanted)
        except TypeError:
            raise ConfigError(
                f"{name}: {key} takes ({', '.join(inspect.signature(own).parameters)}), and is "
                f"called with ({', '.join(wanted)})"
            ) from None


@lru_cache(maxsize=512)
def _hints(cls: type[Any]) -> Mapping[str, Any]:
    """Return the types of a class's fields: reading them anew takes a millisecond."""
    return typing.get_type_hints(cls, include_extras=True)


def hints_of(cls: type[Any], name: str) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields.

    Raises:
        ConfigError: one names what its file does not know.
    """
    try:
        return _hints(typing.cast("Any", cls))
    except Exception as error:  # whatever the text of an annotation does
        raise ConfigError(
            f"{name}: the type of a field cannot be read: {error}; import what it names"
        ) from None


def build(cls: type[T], values: Mapping[str, Any], where: str, name: str) -> T:
    """Return a method, or its reading, with these fields.

    Raises:
        ConfigError: a field without a default is missing, or the class refuses the values.
    """
    for field in dataclasses.fields(typing.cast("Any", cls)):
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if field.init and no_default and field.name not in values:
            raise ConfigError(
                f"key {field.name!r} is missing in [{where}]: {name} has no default for it"
            )
    try:
        return cls(**values)
    except FedtideError:
        raise
    except Exception as error:  # whatever __post_init__ raises
        raise ConfigError(
            f"[{where}] {name} refuses its values: {type(error).__name__}: {error}"
        ) from error


def check_plain(name: str, value: object, key: str) -> None:
    """Check that a config can hold a hyper-parameter; ConfigError if it cannot."""
    if isinstance(value, Mapping):
        for inner, part in value.items():
            check_plain(name, part, f"{key}.{inner}" if key else str(inner))
    elif isinstance(value, list | tuple):
        for part in value:
            check_plain(name, part, key)
    elif not isinstance(value, PLAIN):
        raise ConfigError(
            f"{name}: the field {key!r} holds a {type(value).__name__}, which no config can hold; "
            "give it a number, a text, a list or a table, and make the rest of them"
        )
