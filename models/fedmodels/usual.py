"""Keys of a config at their defaults, by which clients of an earlier release can join.

The default of a key that a release adds is what the releases before it did. So a client that does
not know the key loses nothing where it has its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import known_keys

KeyPath = tuple[str, ...]
"""The keys that lead to a value in tables inside of each other."""


def usual_keys(experiment: Experiment) -> set[KeyPath]:
    """Return the keys of a resolved experiment whose values are defaults."""
    usual = _usual_settings(experiment.method.name)
    method = experiment.method.hyper_parameters()
    own = {("method", key) for key, value in method.items() if key in usual and usual[key] == value}
    return {*_usual(experiment, ()), *own}


def without_unknown(tables: Mapping[str, Any], usual: Sequence[KeyPath]) -> dict[str, Any]:
    """Return the tables of a server without usual keys that this release does not know."""
    found = dict(tables)
    for path in usual:
        if path[-1] not in _known(path[:-1], tables):
            _leave_out(found, path)
    return found


def _usual(table: BaseModel, above: KeyPath) -> Iterator[KeyPath]:
    for name, field in type(table).model_fields.items():
        value, path = getattr(table, name), (*above, name)
        if not field.is_required() and value == field.get_default(call_default_factory=True):
            yield path
        if isinstance(value, BaseModel):
            yield from _usual(value, path)


def _usual_settings(method: str) -> dict[str, Any]:
    """Return a method's settings as they are where a config says nothing."""
    from fedmodels.methods import make, settings_of

    return settings_of(make(method))


def _known(path: KeyPath, tables: Mapping[str, Any]) -> Sequence[str]:
    """Return the keys that this release has in a table."""
    method = tables.get("method")
    if path == ("method",) and isinstance(method, Mapping):
        return [*_usual_settings(str(method.get("name"))), *known_keys(path, tables)]
    return known_keys(path, tables)


def _leave_out(tables: dict[str, Any], path: KeyPath) -> None:
    """Take a key out of tables, of which those on its way are copied."""
    for name in path[:-1]:
        if not isinstance(tables.get(name), Mapping):
            return
        tables[name] = tables = dict(tables[name])
    tables.pop(path[-1], None)
