"""The config of a run that goes on: what it leaves out stays as the run resolved it.

A default may be another one in a later release. A run keeps those that it began with; ``run.db``
has them, under ``defaults``, beside the resolved experiment.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmodels.config.bounds import leaves
from fedmodels.config.changes import difference, forbidden_changes
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.facts.config_file import put, read_tables
from fedmodels.facts.resolution import experiment_of
from fedsrv.state.run_directory import reading

log = logging.getLogger(__name__)


def read_resumed(path: Path, overrides: Sequence[str], run: Path) -> Experiment:
    """Read the config by which a run is resumed.

    Args:
        path: the config file.
        overrides: those of :func:`fedmodels.facts.config_file.parse_experiment`.
        run: the run directory.

    Raises:
        ConfigError: it cannot be read, or says what it must not.
    """
    tables = read_tables(path, overrides)
    now, facts = experiment_of(tables, str(path)), _facts(run)
    try:
        before = experiment_of(facts["experiment"], str(run / "run.db"))
    except (KeyError, ConfigError):
        return now  # whoever resumes the run looks again
    if before.method.name != now.method.name:
        return now
    kept = _kept(before, now, tables, facts.get("defaults"))
    for key, value in kept.items():
        put(tables, key, value)
    if not kept:
        return now
    log.warning(
        "note: the config leaves out %s: the run keeps the default that it began with, %s",
        ", ".join(kept), ", ".join(f"{key} = {value}" for key, value in kept.items()),
    )  # fmt: skip
    return experiment_of(tables, str(path))


def _kept(
    before: Experiment,
    now: Experiment,
    tables: Mapping[str, Any],
    defaults: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the keys that a config leaves out and of which a run has another default.

    A run of an earlier version says nothing of defaults: what the config must not change stays.
    """
    held = {key: json.loads(text) for key, text in leaves(before.to_dict()).items()}
    if defaults is None:
        differing = forbidden_changes(before, now)
        defaults = held
    else:
        differing = difference(before, now)
    return {
        key: held[key] for key in differing
        if key in held and defaults.get(key) == held[key] and not _states(tables, key)
    }  # fmt: skip


def _states(tables: Mapping[str, Any], key: str) -> bool:
    """Tell whether plain tables have a dotted key."""
    found: Any = tables
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    return True


def _facts(run: Path) -> dict[str, Any]:
    """Return the experiment that a run holds, and its defaults; nothing where it cannot be read."""
    try:
        with reading(run) as db:
            rows = db.execute("SELECT key, value FROM meta WHERE key IN ('experiment', 'defaults')")
            found = {str(key): json.loads(value) for key, value in rows}
    except (sqlite3.Error, ValueError, RecursionError, OSError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, dict)}
