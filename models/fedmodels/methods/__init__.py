"""The registry of methods; one file per method, found by name; of plugins, by entry point."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

from fedmodels.errors import ConfigError, suggestion
from fedmodels.own.code_names import OWN_MODULE, is_own, of_a_file
from fedmodels.plugins import OURS, folder_of, gone, offered, owner_of

if TYPE_CHECKING:
    from fedmodels.config.experiment import Experiment
    from fedmodels.methods.variants import Variants
    from fedmodels.training.method import Method

_NAMES = (
    "fedavg", "fedprox", "local", "centralized", "fedper", "fedrep", "fedproto", "gldp", "fedali",
    "fedmlp", "pfedgrp", "fedavg-replay",
)  # fmt: skip
_MODULES = {name: name.replace("-", "_") for name in _NAMES}
"""Registered name -> module; a name is imported only when it is used."""
VARIED = {
    "gldp": "gldp",
    "fedmlp": "fedmlp",
    "pfedgrp": "pfedgrp",
    "fedali": "fedali",
    "fedper": "heads",
    "fedrep": "heads",
}
"""Method -> the module of ``variants`` that says in ``OF`` which variants the method has.

The class of a plugin's method names such a module by ``variants_in``."""
GROUP = "fedtide.methods"

_CLASSES: dict[str, type[Method]] = {}

M = TypeVar("M", bound="type[Method]")
_make_dataclass = dataclasses.dataclass(frozen=True, kw_only=True)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def register(name: str) -> Callable[[M], M]:
    """Register a method class under its name; a method of fedtide becomes a frozen dataclass."""

    def put(cls: M) -> M:
        if name in _MODULES or cls.__module__.startswith(f"{OURS}."):
            _make_dataclass(cls)
        cls.name = name
        _CLASSES[name] = cls
        return cls

    return put


def names() -> list[str]:
    """Return the name of every registered method: those of the core, then those of plugins."""
    return [*_MODULES, *(point.name for point in offered(GROUP))]


def file_of(name: str) -> Path | None:
    """Return the file of a method that comes with fedtide, without importing it."""
    if name in _MODULES:
        return Path(__file__).with_name(f"{_MODULES[name]}.py")
    point = next((p for p in offered(GROUP) if p.name == name), None)
    spec = find_spec(point.module) if point and folder_of(point) else None
    return Path(spec.origin) if spec and spec.origin else None


def method_class(name: str) -> type[Method]:
    """Return the class behind a name; ConfigError if none is registered."""
    if is_own(name):
        return _own_class(name)
    if name not in _CLASSES:
        if name in _MODULES:
            importlib.import_module(f"fedmodels.methods.{_MODULES[name]}")
        else:
            _load(name)
    if file_of(name) is None:
        _prepare(name, _CLASSES[name])
    return _CLASSES[name]


def _load(name: str) -> None:
    """Import the method of a plugin."""
    point = next((p for p in offered(GROUP) if p.name == name), None)
    if point is None:
        if owner := owner_of("methods", name):
            raise ConfigError(gone(f"method {name!r}", owner))
        raise ConfigError(
            f"unknown method {name!r}; known: {', '.join(names())}."
            + (of_a_file(name) or suggestion(name, names()))
        )
    from fedmodels.own.own_code import load_entry_point

    load_entry_point(point)
    if name not in _CLASSES:
        raise ConfigError(
            f"the entry point {name!r} of {GROUP}, {point.value}, registers no "
            "method of that name: give both the same name"
        )


def _own_class(name: str) -> type[Method]:
    """Return the method class that a file defines."""
    from fedmodels.own.own_code import own
    from fedmodels.training.method import Method

    found = own(name)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{name} is no method: it must be a class that inherits from FedAvg")
    _prepare(name, found)
    found.name = vars(found).get("name", found.__name__.lower())
    return found


def _prepare(name: str, cls: type[Method]) -> None:
    """Make a dataclass of a class that is none, and check what it declares."""
    from fedmodels.training.settings import check_class  # the listing of names needs no torch

    if "__dataclass_fields__" not in vars(cls):
        try:
            _make_dataclass(cls)
        except (TypeError, ValueError) as error:  # such as a list as a default
            raise ConfigError(f"{name} makes no dataclass: {error}") from None
    check_class(name, cls)


def make(name: str, **hyper_parameters: Any) -> Method:
    """Return a method; ``make("fedprox", mu=0.1)``.

    A reading may stand in ``reading``, where :func:`settings_of` has it, or beside it:
    ``make("gldp", reading={"heads": "round"})`` is ``make("gldp", heads="round")``.

    Raises:
        ConfigError: unknown method or hyper-parameter, or a value of the wrong type.
    """
    from fedmodels.training.settings import from_table, keys_of

    if not isinstance(name, str):
        called = getattr(name, "__name__", "Mine")
        raise ConfigError(
            f"a method is made by its name, such as 'fedprox' or 'my_method.py:{called}'; of a "
            f"class, write {called}(…)"
        )
    cls, variants = method_class(name), variants_of(name)
    if variants is None:
        return from_table(cls, hyper_parameters, "method", name)
    picked, values = variants.picked(cls, keys_of(cls), hyper_parameters, name)
    made: Method = from_table(picked, values, "method", name, variants.choices)
    return made


def variants_of(name: str) -> Variants | None:
    """Return the variants of a registered method; None where it has none."""
    if name in _MODULES:
        place = f"{__name__}.variants.{VARIED[name]}" if name in VARIED else ""
    else:
        is_ours = file_of(name) is not None
        place = getattr(method_class(name), "variants_in", "") if is_ours else ""
    if not place:
        return None
    found: Variants = importlib.import_module(place).OF[name]
    return found


def settings_of(method: Method) -> dict[str, Any]:
    """Return every setting of a method, as ``[method]`` has them; :func:`make` gives it again."""
    from fedmodels.training.settings import to_table

    is_own_class = type(method).__module__.startswith(OWN_MODULE)
    is_registered = not is_own_class and isinstance(method, _CLASSES.get(method.name, ()))
    variants = variants_of(method.name if is_registered else "")
    if variants is None:
        return to_table(method)
    found = {**to_table(method), **variants.defaults(), **getattr(method, "chosen", {})}
    readings = {key: found.pop(key) for key in variants.readings}
    return {**found, "reading": readings} if readings else found


def trains_at_server(experiment: Experiment) -> bool:
    """Tell whether the server half of an experiment's method trains on examples."""
    from fedmodels.training.asked import needs_server_data

    return needs_server_data(method_class(experiment.method.name))
