"""The registry of methods; one file per method, found by name, third parties' by entry point."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from fedmodels.errors import ConfigError, suggestion
from fedmodels.own_code import is_own, loaded, of_a_file, own

if TYPE_CHECKING:
    from fedmodels.training.method import Method

_MODULES = {
    "fedavg": "fedavg",
    "fedprox": "fedprox",
    "local": "local",
    "centralized": "centralized",
    "fedper": "fedper",
    "fedrep": "fedrep",
    "apfl": "apfl",
    "ditto": "ditto",
    "fedproto": "fedproto",
    "gldp": "gldp",
    "fedali": "fedali",
    "moon": "moon",
    "fedpac": "fedpac",
    "fedntd": "fedntd",
    "creff": "creff",
    "fedic": "fedic",
    "fedmlp": "fedmlp",
    "pfedgrp": "pfedgrp",
    "fedavg-replay": "fedavg_replay",
    "pfedgraph": "pfedgraph",
    "pfedgraph-replay": "pfedgraph_replay",
    "fedem": "fedem",
    "fedcil": "fedcil",
    "af-fcl": "af_fcl",
    "mfcl": "mfcl",
    "target": "target",
}
"""Registered name -> module; a name is imported only when it is used."""

_CLASSES: dict[str, type[Method]] = {}

M = TypeVar("M", bound="type[Method]")


def register(name: str) -> Callable[[M], M]:
    """Register a method class under its name."""

    def put(cls: M) -> M:
        cls.name = name
        _CLASSES[name] = cls
        return cls

    return put


def names() -> list[str]:
    """Return the name of every registered method."""
    return [*_MODULES, *(p.name for p in entry_points(group="fedtide.methods"))]


def method_class(name: str) -> type[Method]:
    """Return the class behind a name.

    Raises:
        ConfigError: the name is not registered.
    """
    if is_own(name):
        return _own_class(name)
    if name not in _CLASSES:
        if name in _MODULES:
            importlib.import_module(f"fedmodels.methods.{_MODULES[name]}")
        else:
            found = list(entry_points(group="fedtide.methods", name=name))
            if not found:
                raise ConfigError(
                    f"unknown method {name!r}; known: {', '.join(names())}."
                    + (of_a_file(name) or suggestion(name, names()))
                )
            loaded(found[0])
            if name not in _CLASSES:
                raise ConfigError(
                    f"the entry point {name!r} of fedtide.methods, {found[0].value}, registers no "
                    "method of that name: give both the same name"
                )
            _check(name, _CLASSES[name])
    return _CLASSES[name]


def _own_class(name: str) -> type[Method]:
    """Return the method class that a file defines."""
    from fedmodels.training.method import Method

    found = own(name)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{name} is no method: it must be a class that inherits from FedAvg")
    if not dataclasses.is_dataclass(found) or "__dataclass_fields__" not in vars(found):
        raise ConfigError(
            f"{name} must be a frozen dataclass: @dataclass(frozen=True, kw_only=True)"
        )
    _check(name, found)
    found.name = vars(found).get("name", found.__name__.lower())
    return found


def _check(name: str, cls: type[Method]) -> None:
    from fedmodels.training.declaration import check_class  # the listing of names needs no torch

    check_class(name, cls)


def make(name: str, **hyper_parameters: Any) -> Method:
    """Return a method; ``make("fedprox", mu=0.1)``.

    A reading may stand in ``reading``, where ``hyper_parameters()`` has it, or beside it:
    ``make("gldp", reading={"heads": "round"})`` is ``make("gldp", heads="round")``.

    Raises:
        ConfigError: unknown method or hyper-parameter, or a value of the wrong type.
    """
    from fedmodels.training.declaration import built

    if not isinstance(name, str):
        called = getattr(name, "__name__", "Mine")
        raise ConfigError(
            f"a method is made by its name, such as 'fedprox' or 'my_method.py:{called}'; of a "
            f"class, write {called}(…)"
        )
    cls = method_class(name)
    values = _checked(cls, _with_readings_apart(cls, hyper_parameters), "method", name)
    return built(cls, values, "method", name)


def reading_of(cls: type[Method]) -> type[Any] | None:
    """Return the dataclass of a method's ``reading``; None where it has no such table."""
    found = typing.get_type_hints(cls).get("reading")
    return found if dataclasses.is_dataclass(found) and isinstance(found, type) else None


def _with_readings_apart(cls: type[Method], table: dict[str, Any]) -> dict[str, Any]:
    """Return a method's table with every reading in ``reading``."""
    reading, inside = reading_of(cls), table.get("reading", {})
    if reading is None or not isinstance(inside, Mapping):
        return table
    beside = [field.name for field in dataclasses.fields(reading) if field.name in table]
    if not beside:
        return table
    for key in beside:
        if key in inside:
            raise ConfigError(f"method.{key} and method.reading.{key} are one switch: give one")
    plain = {key: value for key, value in table.items() if key not in beside}
    return {**plain, "reading": {**inside, **{key: table[key] for key in beside}}}


def _checked(cls: type[Any], table: Mapping[str, Any], where: str, name: str) -> dict[str, Any]:
    """Return a table's values as the fields of a dataclass, a table in it as one of its own."""
    from fedmodels.training.declaration import built, hints_of

    fields = {f.name for f in dataclasses.fields(cls)}
    hints = hints_of(cls, name)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in fields:
            has = ", ".join(sorted(fields)) or "none"
            raise ConfigError(
                f"unknown key {key!r} in [{where}]; {name} has: {has}.{suggestion(key, fields)}"
            )
        if not dataclasses.is_dataclass(hints[key]):
            values[key] = _value(hints[key], value, f"{where}.{key}")
        elif isinstance(value, Mapping):
            inner = typing.cast("type[Any]", hints[key])
            place = f"{where}.{key}"
            values[key] = built(inner, _checked(inner, value, place, name), place, name)
        else:
            raise ConfigError(f"{where}.{key} must be a table (given: {value!r})")
    return values


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return a value of the type that a field has."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from fedmodels.config.faults import fault_of

    try:
        adapter = TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))
        return adapter.validate_python(value, strict=not _is_number(value))
    except ValidationError as error:
        what = fault_of(error, value).message
        raise ConfigError(f"{where}: {what} (given: {value!r})") from None


def _is_number(value: object) -> bool:
    """Let 1 stand for 1.0, but not "1" for 1."""
    return isinstance(value, int | float | list) and not isinstance(value, bool)
