"""What is installed beside the core: plugins, each found by the entry points of its package.

A plugin of our own is a folder ``fedplugins/NAME``. The core imports none of them: it knows the
groups of entry points, and ``plugins.json``, which says what each of ours brings. So a command or
a table of a plugin whose folder is gone is told by its name. ``docs/site/plugins.py`` writes it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError

OURS = "fedplugins"
"""The package in which plugins of our own stand."""
GROUPS: Mapping[str, str] = {
    "fedtide.detectors": "what makes a detector of drift, by the interface of river",
    "fedtide.figures": "a tuple of Metric of fedmodels.numerics.metric_tables",
    "fedtide.methods": "a method, by the name that its class is registered under",
    "fedtide.parts": "a Part of fedmodels.config.part: what a config may leave out",
    "fedtide.watchers": "a Watcher of fedsrv.commands.watchers: an option of serve and launch",
    "fedsrv.queues": "a function that serves a directory of runs, by the options of serve",
    "fedsrv.relays": "a function that says who may pass the calls of clients on",
    "fedsrv.commands": "a Typer app, whose commands fedsrv has",
    "fedcli.services": "a Service of the plugin serving: an option of serve-model",
    "fedcli.commands": "a Typer app, whose commands fedcli has",
}
"""The groups of entry points of plugins, and what one of each is."""
STORED = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Plugin:
    """A plugin, as ``fedsrv plugins`` tells of it."""

    name: str
    package: str
    """The distribution that brings it."""
    groups: tuple[str, ...]
    """Where it adds something."""
    is_here: bool = True
    """Whether its folder is there; of our own alone it may be gone."""


@cache
def _all(path: tuple[str, ...]) -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points of a search path by group and name: 30 ms, once for each path."""
    found: Any = entry_points()
    return {g: sorted(found.select(group=g), key=lambda p: p.name) for g in found.groups}


def offered(group: str) -> list[EntryPoint]:
    """Return what plugins add to a group, sorted by name; not what stood in a deleted folder."""
    return [point for point in _all(tuple(sys.path)).get(group, ()) if _is_here(point)]


def folder_of(point: EntryPoint) -> str:
    """Return the name of the plugin of our own that it is of; empty for others'."""
    package, *below = point.module.split(".")
    return below[0] if package == OURS else ""


def _is_here(point: EntryPoint) -> bool:
    """Tell whether its folder is there: the metadata of a package outlive a folder of our own."""
    name = folder_of(point)
    return not name or is_here(name)


@cache
def is_here(name: str) -> bool:
    """Tell whether a plugin of our own has its code; compiled files may outlive it."""
    specs = (find_spec(OURS), find_spec(f"{OURS}.{name}") if find_spec(OURS) else None)
    return all(spec is not None and spec.origin is not None for spec in specs)


def loaded(group: str) -> Iterator[Any]:
    """Yield what plugins add to a group, sorted by name.

    Raises:
        ConfigError: one cannot be loaded.
    """
    return map(_loaded, offered(group))


def usable(group: str) -> Iterator[Any]:
    """Yield likewise what can be loaded, and say of the rest that it is missing.

    For what every command needs: one broken package is no reason that none works.
    """
    for point in offered(group):
        try:
            yield _loaded(point)
        except ConfigError as error:
            print(f"note: {error}; it adds nothing", file=sys.stderr)


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # it is code of others
        whose = f" of {point.dist.name}" if point.dist else ""
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(f"the plugin {point.name}{whose} cannot be loaded: {why}") from error


def part_of(place: str) -> Any:
    """Return what stands at a place of a plugin, ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@cache
def known() -> Mapping[str, Mapping[str, Any]]:
    """Return what each plugin of our own brings, whether or not it is here."""
    stored: dict[str, dict[str, Any]] = json.loads(STORED.read_text("utf-8"))
    return stored


def gone_plugins() -> list[tuple[str, Mapping[str, Any]]]:
    """Return the plugins of our own whose folder is gone, and what each would bring."""
    there = {folder_of(point) for group in GROUPS for point in offered(group)}  # '' of others'
    return [(name, brings) for name, brings in known().items() if name not in there]


def owner_of(kind: str, name: str) -> str | None:
    """Return the plugin of our own that brings a thing of a kind, such as ``commands``.

    None where none brings it, or where it is here.
    """
    owner = next((p for p, brings in known().items() if name in brings.get(kind, ())), None)
    return owner if owner in dict(gone_plugins()) else None


def gone(name: str, owner: str) -> str:
    """Return the line on a thing of a plugin that is not here."""
    return f"{name} is of the plugin {owner}, which this installation lacks"


def _groups_of(points: Sequence[EntryPoint]) -> tuple[str, ...]:
    """Return the groups of a plugin's entry points, with the number of those with many."""
    numbers = Counter(point.group for point in points)
    return tuple(f"{group} ({n})" if n > 1 else group for group, n in numbers.items())


def plugins() -> list[Plugin]:
    """Return all plugins: those of our own, here or gone, then those of others."""
    groups: dict[tuple[str, str], list[EntryPoint]] = {}
    for point in (point for group in GROUPS for point in offered(group)):
        whose = point.dist.name if point.dist else ""
        groups.setdefault((folder_of(point) or point.name, whose), []).append(point)
    here = [Plugin(*key, _groups_of(points)) for key, points in groups.items()]
    gone = [Plugin(name, "fedtide", (), False) for name, _ in gone_plugins()]
    return sorted([*here, *gone], key=lambda p: (p.name not in known(), p.name))
