"""Checks of what a method class from outside of fedtide declares, when it is first used."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from fedmodels.errors import ConfigError, FedtideError
from fedmodels.training.method import Method

TAKEN = ("name", "code_sha256")
"""Keys of ``[method]`` that are no hyper-parameters."""
PROPERTIES = ("views", "rules")
GONE = {
    "evaluation": "broadcast with ctx.scores",
    "load_global": 'load with ctx.view == "global"',
    "keeps_history": 'trains_on = "history"',
    "replays": 'trains_on = "replay"',
    "replaces_old_data": 'trains_on = "memory"',
    "keeps_state": "what init_client and after_local return",
    "takes_means": "uploads.mean()",
}
"""Attributes of earlier versions that nothing reads any more, and what stands for each now."""
T = TypeVar("T")
PLAIN = (bool, int, float, str, type(None))


def check_class(name: str, cls: type[Method]) -> None:
    """Check what can be known of a class before a method of it is made.

    Raises:
        ConfigError: says what is wrong and what to write.
    """
    for field in dataclasses.fields(cls):
        if field.name in TAKEN:
            raise ConfigError(
                f"{name}: no field may be called {field.name!r}, a key that [method] has already; "
                "rename it"
            )
    for key in PROPERTIES:
        if inspect.isfunction(inspect.getattr_static(cls, key)):
            raise ConfigError(f"{name}: {key} must be a property: put @property above it")
    for key, now in GONE.items():
        if hasattr(cls, key):
            raise ConfigError(f"{name}: {key} is not asked any more: {now} stands for it")
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
    """Check that a config can hold a hyper-parameter.

    Raises:
        ConfigError: it cannot.
    """
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
