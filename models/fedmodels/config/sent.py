"""The part of an experiment that crosses the wire: everything but places on a machine.

The coordinator sends no path, and a client takes none. So no key of an experiment makes a client
open a file that its own user has not named.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from fedmodels.config.bounds import HERE, NAMED, TableAt, canonical
from fedmodels.config.combinations import BESIDE
from fedmodels.config.experiment import Experiment
from fedmodels.own.code_names import is_own, short_name


def without_places(
    tables: Mapping[str, Any], model: type[BaseModel] = Experiment
) -> dict[str, Any]:
    """Return the tables of an experiment without paths; a file of code keeps its bare name."""
    return _placed(tables, model, lambda path: None, short_name)


def with_whole_places(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of an experiment whose paths do not depend on the current directory."""

    def whole(name: str) -> str:
        return os.path.abspath(name) if is_own(name) else name

    return _placed(tables, Experiment, os.path.abspath, whole)


def _placed(
    tables: Mapping[str, Any],
    model: type[BaseModel],
    place: Callable[[str], str | None],
    name: Callable[[str], str],
) -> dict[str, Any]:
    """Return tables with other paths, or none where it is None, and other names of code."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        field = model.model_fields.get(key)
        marks = field.metadata if field else []
        inner = table_in(field.annotation, value) if field and isinstance(value, Mapping) else None
        if HERE in marks:
            value = place(value) if isinstance(value, str) else None
            if value is None:
                continue
        elif inner is not None:
            value = _placed(value, inner, place, name)
        elif isinstance(value, list) and field and (several := tables_in(field.annotation)):
            value = [
                _placed(each, several[0], place, name) if isinstance(each, Mapping) else each
                for each in value
            ]
        elif NAMED in marks and isinstance(value, str):
            value = name(value)
        found[key] = value
    return found


def settings_digest(experiment: Experiment) -> bytes:
    """Return a digest, 32 bytes, of all settings that decide what a client uploads.

    It is the same for the coordinator and every client, and all through a run: what a resumed run
    may change is left out, and so is what a client settles itself.
    """
    tables = _uploading(experiment)
    rate = experiment.training.lr_schedule
    left_out = [("server", "max_rollback")]
    if not (rate and rate.follows_rounds):
        left_out.append(("schedule", "rounds"))
    for name, key in left_out:
        kept = {other: value for other, value in tables.pop(name, {}).items() if other != key}
        tables |= {name: kept} if kept else {}
    return _digest(tables)


def whole_digest(experiment: Experiment) -> bytes:
    """Return a digest, 32 bytes, of all settings but those that only a client itself settles.

    It tells a training from another one: two experiments that differ in any key that code of a
    method may read have two digests.
    """
    return _digest(_uploading(experiment))


def _uploading(experiment: Experiment) -> dict[str, Any]:
    """Return the keys that are not at their defaults.

    A key that a release adds, or one of a plugin that is gone, so changes no digest. None is kept:
    it may stand where the default is another.
    """
    tables = without_places(experiment.model_dump(mode="json", exclude_defaults=True))
    return {name: table for name, table in tables.items() if name not in BESIDE}


def _digest(tables: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(canonical(tables).encode()).digest()


def table_in(annotation: Any, value: Any) -> type[BaseModel] | None:
    """Return the table that a value under a key should be; of several kinds, the value's own."""
    tables = tables_in(annotation)
    if len(tables) > 1:
        kind = value.get("kind") if isinstance(value, Mapping) else None
        is_file = isinstance(kind, str) and is_own(kind)
        tables = [t for t in tables if (kind in kinds_of(t) if kinds_of(t) else is_file)]
    return tables[0] if tables else None


def known_keys(path: Sequence[str], tables: Any) -> list[str]:
    """Return the keys of a table in what was given; of a scenario, those of its kind."""
    model = table_at(path, tables)
    return sorted(model.model_fields) if model else []


def table_at(path: Sequence[str], tables: Any) -> type[BaseModel] | None:
    """Return what a table in what was given should be; None where nothing says so."""
    model: type[BaseModel] = Experiment
    for name in path:
        tables, field = tables.get(name), model.model_fields.get(name)
        inner = table_in(field.annotation, tables) if field else None
        if inner is None or not isinstance(tables, Mapping):
            return None
        model = inner
    return model


def kinds_of(table: type[BaseModel]) -> tuple[str, ...]:
    """Return the words under ``kind`` by which a table is told; none for a user's own."""
    found = table.model_fields.get("kind")
    return get_args(found.annotation) if found else ()


def tables_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the tables that a key may hold; none where it holds a value."""
    if isinstance(annotation, TableAt):
        return tables_in(annotation.table)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for part in get_args(annotation) for table in tables_in(part)]
