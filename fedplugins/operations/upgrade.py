"""What an upgrade would change for a run: a release that is installed here, and a run directory.

Nothing is written, and no path is told.
"""

from __future__ import annotations

import json
import platform
import sqlite3
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.facts.resolution import experiment_of
from fedmodels.facts.usual import defaults_of
from fedpb import PROTOCOL
from fedsrv.state.rows import BEFORE, EARLIER, FORMAT
from fedsrv.state.run_directory import reading

Line = tuple[str, str]
"""What a fact is about, and what it says."""


def upgrade(run: Path) -> tuple[dict[str, str], str]:
    """Return what this release would change for a run, and why it cannot continue it, or nothing.

    Raises:
        ConfigError: the directory holds no run.
        ArchiveError: its database cannot be read.
    """
    if not (run / "run.db").is_file():
        raise ConfigError(f"{run} is not a run directory: there is no run.db")
    form, facts = _database(run)
    refused, lines = "", [*_versions(run), _format(form), ("protocol", _sites())]
    if form not in (FORMAT, BEFORE, EARLIER):
        refused = "the run's database has a format that this release does not read"
    elif "experiment" in facts:
        try:
            now = experiment_of(facts["experiment"], "the run's config")
        except ConfigError as error:
            refused = str(error)
        else:
            lines += _defaults(now, facts.get("defaults"))
    return dict(lines), refused


def _database(run: Path) -> tuple[int, dict[str, Any]]:
    """Return the format of a run's database, and the config and the defaults that it holds."""
    try:
        with reading(run) as db:
            (form,) = db.execute("PRAGMA user_version").fetchone()
            rows = db.execute("SELECT key, value FROM meta WHERE key IN ('experiment', 'defaults')")
            found = {str(key): json.loads(value) for key, value in rows}
    except (sqlite3.Error, ValueError, RecursionError, OSError) as error:
        raise ArchiveError(
            f"{run / 'run.db'} cannot be read ({error}); see fedsrv verify"
        ) from None
    return int(form), {key: value for key, value in found.items() if isinstance(value, dict)}


def _versions(run: Path) -> Iterator[Line]:
    """Yield with what the run was last computed and with what it would continue."""
    try:
        then = json.loads((run / "env.json").read_text("utf-8"))
    except (OSError, ValueError):
        then = {}
    then = then if isinstance(then, dict) else {}
    now = {
        "fedtide": version("fedtide"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpcio": version("grpcio"),
        "machine": platform.machine(),
    }
    for name, here in now.items():
        before = str(then.get(name, "unknown"))
        yield name, here if before == here else f"{before} becomes {here}"
    rounds = [n for n in ("torch", "machine") if str(then.get(n)) != now[n]]
    if rounds:
        yield "digest", f"may differ: another {' and another '.join(rounds)} may round differently"
    elif str(then.get("fedtide")) != now["fedtide"]:
        yield "digest", "stays, unless CHANGELOG.md names the run's method"
    else:
        yield "digest", "stays"


def _format(form: int) -> Line:
    if form == FORMAT:
        return "database", f"format {form}, as here: the release that wrote it can continue, too"
    if form > FORMAT:
        return "database", f"format {form}, of a later release; this one reads up to {FORMAT}"
    return "database", (
        f"format {form} becomes {FORMAT} with --resume, and releases before that one cannot go "
        "back: make a backup first"
    )


def _sites() -> str:
    return f"{PROTOCOL}: sites and relays whose release speaks another are refused"


def _defaults(now: Experiment, recorded: Mapping[str, Any] | None) -> Iterator[Line]:
    """Yield the defaults that are others now; the run keeps those that it began with."""
    if recorded is None:
        yield "defaults", "not recorded: keys that must not change stay as they are"
        return
    here, held = defaults_of(now), defaults_of(now, recorded)
    kept = [f"{key} = {json.dumps(held[key])}" for key in sorted(held.keys() - here.keys())]
    yield "defaults", f"others now; the run keeps {', '.join(kept)}" if kept else "as they were"
