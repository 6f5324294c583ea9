"""In which keys two experiments differ, and which of them a resumed run may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.own_code import short_name


def difference(one: Experiment, other: Experiment) -> list[str]:
    """Return the dotted keys in which two experiments differ."""
    a, b = (leaves(e.to_dict()) for e in (one, other))
    for found in (a, b):  # what a custom function returns tells data apart, not its place
        if "data.name" in found:
            found["data.name"] = short_name(json.loads(found["data.name"]))
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def forbidden_changes(before: Experiment, now: Experiment) -> list[str]:
    """Return the dotted keys in which a resumed run differs from what it was, and must not.

    It may have another ``max_rollback``, and more rounds at the end, unless learning rates of
    earlier rounds would change with their number.
    """
    scenario, schedule = now.scenario, now.schedule
    one_task = scenario is not None and scenario.tasks == 1 and not scenario.fixes_tasks
    allowed = {"server.max_rollback"}
    rate = now.training.lr_schedule
    longer = schedule.rounds >= before.schedule.rounds and not (rate and rate.follows_rounds)
    if longer and (schedule.order == "rounds_outer" or one_task):
        allowed.add("schedule.rounds")
    return [key for key in difference(before, now) if key not in allowed]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested tables by dotted key, as JSON."""
    out: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out.update(leaves(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = json.dumps(value)
    return out
