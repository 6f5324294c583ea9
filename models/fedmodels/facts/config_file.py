"""A config file and the options that override it: from TOML to an experiment."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedmodels.config.experiment import Experiment, NetTable
from fedmodels.config.presets import config_file, suggest_config
from fedmodels.config.sent import known_keys
from fedmodels.errors import ConfigError, reason_of
from fedmodels.facts.resolution import experiment_of

log = logging.getLogger(__name__)


def read_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read and check a config file or a preset; ``overrides``: see :func:`parse_experiment`.

    Raises:
        ConfigError: it cannot be read, or says what it must not.
    """
    return experiment_of(read_tables(path, overrides), str(path))


def read_tables(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a config file's plain tables, likewise, without a check of what they say.

    Raises:
        ConfigError: it cannot be read, or is no TOML of one run.
    """
    try:
        text = config_file(path).read_text("utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        meant = suggest_config(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the config {path}: {reason_of(error)}{meant}") from None
    return _parsed(text, str(path), overrides)


def parse_experiment(
    text: str, source: str = "config", overrides: Sequence[str] = ()
) -> Experiment:
    """Parse and check a TOML experiment.

    Args:
        text: the TOML.
        source: its name in error lines.
        overrides: ``key.path=value`` items that replace or add keys; a value is read as TOML and
            taken as a string where it is none.

    Raises:
        ConfigError: names the key, what it may be and the nearest known one.
    """
    return experiment_of(_parsed(text, source, overrides), source)


def _parsed(text: str, source: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the plain tables of a TOML text with overrides in them."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    if "methods" in tables and "method" not in tables:
        raise ConfigError(f"{source} is a sweep, not the config of one run: use fedsrv sweep")
    drop_former_keys(tables, overrides)
    for item in overrides:
        override(tables, item)
    return tables


def drop_former_keys(tables: dict[str, Any], overrides: Sequence[str]) -> None:
    """Where another method, net or scenario is asked for, leave out what belongs to the former.

    All hyper-parameters of the former method go. Keys of a net or of a scenario stay where the
    new one has them as well.
    """
    for name, key in (("method", "name"), ("net", "name"), ("scenario", "kind")):
        table = tables.get(name)
        asked = [item for item in overrides if item.partition("=")[0].strip() == f"{name}.{key}"]
        if not asked or not isinstance(table, dict) or not isinstance(table.get(key), str):
            continue
        there: dict[str, Any] = {}
        override(there, asked[-1])
        former, new = table[key], there[name][key]
        if not isinstance(new, str) or new == former:
            continue
        dropped = sorted(k for k in table if k != key and not _stays(name, k, new))
        if dropped:
            tables[name] = {k: value for k, value in table.items() if k not in dropped}
            log.warning(
                "note: %s.%s is set to %s: %s of %s in the file %s left out",
                name, key, new, ", ".join(dropped), former, "is" if len(dropped) == 1 else "are",
            )  # fmt: skip


def _stays(table: str, key: str, new: str) -> bool:
    """Whether a key of a table still means something to the method, net or scenario ``new``."""
    if table == "method":
        return False
    if table == "scenario":
        return key in known_keys([table], {table: {"kind": new}})
    from fedmodels.nets import check_net  # it imports torch

    try:
        check_net(new, [key])
    except ConfigError:
        return key in NetTable.model_fields
    return True


def override(tables: dict[str, Any], item: str) -> None:
    """Put what one ``KEY=VALUE`` says into plain tables; ConfigError if it is not of that form."""
    path, equals, text = item.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {item!r} is not key=value, such as --set method.lam=0.3")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    put(tables, path.strip(), value)


def put(tables: dict[str, Any], path: str, value: Any) -> None:
    """Put a value under a dotted key of plain tables.

    Raises:
        ConfigError: a part of the path is a value.
    """
    *parents, leaf = path.split(".")
    table = tables
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path} cannot be set: {name!r} is a value, not a table")
    table[leaf] = value
