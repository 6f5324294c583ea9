"""In which keys two experiments differ, and which of them a resumed run may change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedmodels.config.bounds import leaves
from fedmodels.config.combinations import part_at, parts_on
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.own.code_names import short_name


def changeable(experiment: Experiment) -> Mapping[str, str]:
    """Return the keys that ``--resume`` may change as one of a run's parts says; mostly none."""
    places = (part.at("resumes") for part in parts_on(experiment) if part.resumes)
    return next(map(part_at, places), {})


def is_among(key: str, keys: Iterable[str]) -> bool:
    """Tell whether a dotted key is one of some keys, or stands in one of them that is a table."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def why_fixed(key: str, now: Experiment) -> str:
    """Return what keeps a changeable key as it is; empty if nothing does."""
    if now.scenario is not None and key in ("schedule.clients", "data.columns.missing"):
        return f"{key} cannot change, because [scenario] partitioned the data by it"
    if now.privacy is not None and key in (
        "schedule.rounds", "schedule.clients", "server.min_clients",
    ):  # fmt: skip
        return f"{key} stays, since the noise of [privacy] was fixed by it"
    return ""


def difference(one: Experiment, other: Experiment) -> list[str]:
    """Return the dotted keys in which two experiments differ."""
    a, b = (leaves(e.to_dict()) for e in (one, other))
    for found in (a, b):  # what a custom function returns tells data apart, not its place
        if "data.name" in found:
            found["data.name"] = short_name(json.loads(found["data.name"]))
    for found in (a, b):  # the digest says what the run began with, wherever that lies by now
        if found.pop("net.begin_from", None) is not None:
            found.pop("net.weights", None)
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def forbidden_changes(before: Experiment, now: Experiment) -> list[str]:
    """Return the dotted keys in which a resumed run differs from what it was, and must not.

    It may have another ``max_rollback``, and more rounds at the end, unless learning rates of
    earlier rounds would change with their number. A part may let more change
    (:func:`changeable`).
    """
    if keys := changeable(now).keys() & changeable(before).keys():
        return [
            key for key in difference(before, now)
            if key != "server.max_rollback" and (not is_among(key, keys) or why_fixed(key, now))
        ]  # fmt: skip
    schedule, one_task = now.schedule, now.most_tasks == 1
    allowed = {"server.max_rollback"}
    rate = now.training.lr_schedule
    longer = schedule.rounds >= before.schedule.rounds and not (rate and rate.follows_rounds)
    if longer and (schedule.order == "rounds_outer" or one_task):
        allowed.add("schedule.rounds")
    return [key for key in difference(before, now) if key not in allowed]


def another_config(run: Path, changed: Sequence[str], now: Experiment) -> ConfigError:
    """Return the error of a run that is resumed with another config, ``now``."""
    why, course = "", now.training.lr_schedule
    if changeable(now):
        return _another_of(run, changed, now)
    if "schedule.rounds" in changed and course is not None and course.follows_rounds:
        why = (
            "; learning rates of earlier rounds would change with the number of rounds, as "
            "[training.lr_schedule] has no length: rounds may be added where a run begins with one"
        )
    elif "schedule.rounds" in changed:
        why = "; rounds may be added where every round visits every task, and never taken away"
    file = run / "config.toml"
    advice = f"Resume with the config in {file}"
    if not file.exists():
        advice = (
            "Resume with the config that it was begun with, or give another directory: its start "
            "ended before it wrote config.toml"
        )
    return ConfigError(
        f"{run} was begun with another config; it differs in {', '.join(changed)}{why}. {advice}"
    )


def _another_of(run: Path, changed: Sequence[str], now: Experiment) -> ConfigError:
    """Return the error of a run in which other keys can change."""
    why = "; ".join(filter(None, (why_fixed(key, now) for key in changed)))
    return ConfigError(
        f"{run} goes on, and {', '.join(changed)} cannot change in it{f' ({why})' if why else ''}: "
        f"resume with what {run / 'config.toml'} says there, or begin a new run from the models of "
        f"this one ([net] begin_from = {str(run)!r}); docs/streams.md has what can change"
    )
