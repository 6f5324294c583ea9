"""What an open run settles of its config, and what may be changed of it while the run goes on.

A change is a dotted key and its new value; None stands for a key that is left out. The run stores a
change with the growth from which on it holds, and tells its clients by their orders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from fedmodels.config.bounds import leaves
from fedmodels.config.changes import is_among
from fedmodels.config.combinations import LISTED
from fedmodels.config.experiment import Experiment
from fedmodels.config.part import without_gone
from fedmodels.config.sent import tables_in
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.times import OPEN_DEADLINE_S

CHANGEABLE: Mapping[str, str] = {
    "training.lr": "trainings from the next round",
    "training.lr_schedule": "trainings from the next round",
    "schedule.rounds": "tasks that start from the next round",
    "schedule.clients": "joins after the resume",
    "evaluate.last_tasks": "scores from the next round",
    "data.columns.missing": "files prepared after the resume",
    **{key: what for part in LISTED for key, what in part.changes.items()},
}
"""The keys, or tables, that ``--resume`` may change, and what a change is for."""


def waits_for_most(experiment: Experiment, method: object) -> Experiment:
    """Let one site end no open run, unless the config says for whom it waits."""
    privacy, server = experiment.privacy, experiment.server
    waits_for_all = experiment.schedule.wait == "all"
    if waits_for_all and server.deadline_s is not None:
        raise ConfigError('[server] deadline_s goes on without who is late: leave wait = "all" out')
    noisy = privacy is not None and privacy.noise_at_clients  # it adds up over min_clients
    if server.min_clients is not None or server.is_robust or noisy:
        return experiment
    some = min(len(experiment.schedule.beginners), experiment.cohort_size)
    deadline_s = None if waits_for_all else OPEN_DEADLINE_S
    waits = {"min_clients": max(1, some // 2), "deadline_s": deadline_s}
    return experiment.model_copy(update={"server": server.model_copy(update=waits)})


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """Return the changeable keys that an experiment has, with their values."""
    found = leaves(experiment.to_dict())
    return {key: json.loads(value) for key, value in found.items() if is_among(key, CHANGEABLE)}


def changes_between(before: Experiment, now: Experiment) -> dict[str, tuple[Any, Any]]:
    """Return the changeable keys in which two experiments differ, with both values."""
    one, other = settings_of(before), settings_of(now)
    both = {key: (one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def with_settings(experiment: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """Return an experiment whose changeable keys are these, and no others."""
    gone = dict.fromkeys(settings_of(experiment))
    return changed(experiment, {**gone, **settings})


def changed(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """Return an experiment with other values of changeable keys.

    Raises:
        PayloadError: a key may not be changed, or not be this value.
    """
    if not changes:
        return experiment
    try:
        tables = without_gone(_grouped(changes))
    except ConfigError as error:
        raise PayloadError(str(error)) from None
    keys = [f"{name}.{key}".rstrip(".") for name, inner in tables.items() for key in inner]
    if wrong := [key for key in keys if not is_among(key, CHANGEABLE)]:
        raise PayloadError(f"{wrong[0][:60]!r} of an open run cannot be changed")
    update = {}
    try:
        for name, inner in tables.items():
            update[name] = _table(type(experiment), name, getattr(experiment, name), inner)
    except (ValidationError, KeyError, AttributeError, TypeError) as error:
        line = str(error).splitlines()[0][:200]
        raise PayloadError(f"a change of an open run cannot be: {line}") from None
    return experiment.model_copy(update=update)


def _grouped(changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return changes by the first word of their keys; the rest of a key may be empty."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        found.setdefault(name, {})[rest] = value
    return found


def _table(owner: type[BaseModel], name: str, held: Any, changes: Mapping[str, Any]) -> Any:
    """Return the value of one field with changes: a table, or what stands under the key ``""``."""
    kinds = tables_in(owner.model_fields[name].annotation)
    if bool(kinds) == ("" in changes):
        raise KeyError(f"{name} is {'a table' if kinds else 'no table'}")
    if not kinds:
        return changes[""]
    kind = kinds[0]
    values = {} if held is None else dict(held)
    for inner, rest in _grouped(changes).items():
        values[inner] = _table(kind, inner, values.get(inner), rest)
    given = {key: value for key, value in values.items() if value is not None}
    return kind.model_validate(given) if given else None
