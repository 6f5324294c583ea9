"""What a partition follows from, and where that differs from what a config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedmodels.config.bounds import leaves
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.own.code_names import short_name

if TYPE_CHECKING:
    from fedmodels.config.data import Data
    from fedmodels.config.scenario import ScenarioTable

NOT_DEALT = ("data.root", "data.input_shape", "data.num_classes", "data.validation_share",
             "data.repeats", "data.unusual")  # fmt: skip
"""Keys that change no partition."""
DIGEST = "scenario.code_sha256"
"""Of a user's function; a config lacks it where the file is not there, and nothing is dealt out."""
SHOWN = 3
"""Differences that one line names."""
MAX_LETTERS = 60
"""Of a value in that line: it may have come from a stranger."""


def data_and_scenario(experiment: Experiment, option: str = "") -> tuple[Data, ScenarioTable]:
    """Return what says how data are dealt out; ConfigError if the config leaves it out.

    ``option`` is how the caller may give data that were dealt out elsewhere, if that is possible.
    """
    for name in ("data", "scenario"):
        if getattr(experiment, name) is None:
            given = f", or give a directory with one of each client's own as {option}"
            raise ConfigError(
                f"the config has no [{name}]: add it to partition data{given * bool(option)}"
            )
    assert experiment.data is not None
    assert experiment.scenario is not None
    return experiment.data, experiment.scenario


def differences(experiment: Experiment, made: Mapping[str, Any]) -> list[str]:
    """Return where a config differs from what a partition was made with, an entry for each key.

    Args:
        experiment: what is to be run; tables it leaves out differ in nothing.
        made: what the partition follows from, as it is written beside it.
    """
    wanted: dict[str, Any] = {}
    if experiment.data is not None:
        wanted["data"] = experiment.data.model_dump(mode="json")
    if experiment.scenario is not None:
        wanted |= {
            "scenario": experiment.scenario.identity(),
            "clients": experiment.schedule.clients,
        }
        wanted["seed"] = experiment.seed
    is_known = getattr(experiment.scenario, "code_sha256", None) is not None
    left_out = NOT_DEALT if is_known else (*NOT_DEALT, DIGEST)
    ours, theirs = (leaves(placeless(t)) for t in (wanted, {k: made.get(k) for k in wanted}))
    return [
        f"{_named(key)} = {_short(ours.get(key))} in the config, {_short(theirs.get(key))} there"
        for key in sorted(ours.keys() | theirs.keys())
        if key not in left_out and _said(ours.get(key)) != _said(theirs.get(key))
    ]


def placeless(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a partition follows from without the places of custom files."""
    short = dict(made)
    for table, key in (("data", "name"), ("scenario", "kind")):
        given = made.get(table)
        if isinstance(given, Mapping) and isinstance(given.get(key), str):
            short[table] = {**given, key: short_name(given[key])}
    return short


def check_origin(
    experiment: Experiment, made: Mapping[str, Any], whose: str, option: str = ""
) -> None:
    """Check that data were dealt out as a config says; ConfigError names the keys that differ.

    ``option`` is how the caller gave the data, if data are dealt out where it is left out.
    """
    found = differences(experiment, made)
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ConfigError(
            f"{whose} is of another partition than the config says: {'; '.join(found[:SHOWN])}"
            f"{more}; make one of this config with fedcli partition, or change the config"
        )
    if experiment.method.pools_data != bool(made.get("gathered")):
        raise ConfigError(_of_the_other_kind(experiment, whose, option))


def _of_the_other_kind(experiment: Experiment, whose: str, option: str) -> str:
    """Say that data are dealt out where they should be pooled, or the other way round."""
    if experiment.method.pools_data:
        leave_out = f"leave out {option}, or "
        return (
            f"{whose} is partitioned among clients, but centralized trains only on client 0's: "
            f"{leave_out * bool(option)}make a pooled one with fedcli partition"
        )
    return (
        f"{whose} is pooled, all of it at client 0, and {experiment.method.name} trains on what "
        "clients hold: make one of this config with fedcli partition"
    )


def _named(key: str) -> str:
    """Return a key as the config has it."""
    return "schedule.clients" if key == "clients" else key


def _said(value: str | None) -> str | None:
    return None if value == "null" else value


def _short(value: str | None) -> str:
    text = _said(value) or "nothing"
    return text if len(text) <= MAX_LETTERS else f"{text[:MAX_LETTERS]}…"
