"""Keys of a config at their defaults, by which clients of an earlier release can join.

The default of a key that a release adds is what the releases before it did. So a client that does
not know the key loses nothing where it has its default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from fedmodels.config.bounds import leaves
from fedmodels.config.experiment import Experiment, MethodTable
from fedmodels.config.sent import table_at

KeyPath = tuple[str, ...]
"""The keys that lead to a value in tables inside of each other."""


def usual_keys(experiment: Experiment) -> set[KeyPath]:
    """Return the keys of a resolved experiment whose values are defaults."""
    usual = _settings(experiment.method.name)
    method = experiment.method.hyper_parameters()
    own = {("method", key) for key, value in method.items() if key in usual and usual[key] == value}
    return {*_usual(experiment, ()), *own}


def defaults_of(experiment: Experiment, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the keys of a resolved experiment that have the default of a release, with its value.

    Args:
        experiment: what is run.
        before: what the run recorded earlier: those defaults that it still has stay.
    """
    held = {key: json.loads(text) for key, text in leaves(experiment.to_dict()).items()}
    usual = {".".join(path) for path in usual_keys(experiment)}
    earlier = before or {}
    return {
        key: value for key, value in held.items()
        if key in usual or (key in earlier and earlier[key] == value)
    }  # fmt: skip


def without_unknown(tables: Mapping[str, Any], usual: Sequence[KeyPath]) -> dict[str, Any]:
    """Return the tables of a server without usual keys that this release does not know.

    Nothing is left out of a table of which this release cannot say what its keys are: one that
    takes any, such as ``[net]``, one of an unknown kind, or ``[method]`` of a user's own method.
    """
    found = dict(tables)
    known = {above: _known(above, tables) for above in {path[:-1] for path in usual}}
    for path in usual:
        keys = known[path[:-1]]
        if keys and path[-1] not in keys:
            _leave_out(found, path)
    return found


def _usual(table: BaseModel, above: KeyPath) -> Iterator[KeyPath]:
    for name, field in type(table).model_fields.items():
        value, path = getattr(table, name), (*above, name)
        if not field.is_required() and value == field.get_default(call_default_factory=True):
            yield path
        if isinstance(value, BaseModel):
            yield from _usual(value, path)


def _settings(method: object) -> dict[str, Any]:
    """Return the defaults of a method of fedtide; nothing for others, whose code may be anybody's.

    A client must not run a file that its user has not named.
    """
    from fedmodels.methods import file_of, make, settings_of

    if not isinstance(method, str) or file_of(method) is None:
        return {}
    return settings_of(make(method))


def _known(path: KeyPath, tables: Mapping[str, Any]) -> Sequence[str]:
    """Return the keys that this release has in a table; none where it cannot say."""
    model = table_at(path, tables)
    if model is MethodTable:
        return _known_of_method(tables["method"].get("name"))
    if model is None or model.model_config.get("extra") == "allow":
        return []
    return list(model.model_fields)


def _known_of_method(name: object) -> Sequence[str]:
    from fedmodels.methods import variants_of

    settings = _settings(name)
    if not settings:
        return []
    variants = variants_of(str(name))
    return [*MethodTable.model_fields, *settings, *(variants.choices if variants else ())]


def _leave_out(tables: dict[str, Any], path: KeyPath) -> None:
    """Take a key out of tables, of which those on its way are copied."""
    for name in path[:-1]:
        if not isinstance(tables.get(name), Mapping):
            return
        tables[name] = tables = dict(tables[name])
    tables.pop(path[-1], None)
