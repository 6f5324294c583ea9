"""A part: one capability that a config may leave out, as the core or a plugin describes it.

A plugin's module with its part imports nothing else: it is loaded with every config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, create_model

from fedmodels.config.bounds import canonical
from fedmodels.errors import ConfigError
from fedmodels.plugins import gone, gone_plugins, loaded, part_of

Side = Literal["server", "client", "shared"]
ROOMS: Mapping[Side, str] = {
    "server": "fedsrv.parts", "client": "fedcli.parts", "shared": "fedmodels",
}  # fmt: skip
"""Where the halves of the core's own parts are; its functions are below ``fedmodels`` as well."""
Experiment = Any
"""Of :mod:`fedmodels.config.experiment`, which needs the tables of plugins and so this module."""
Table = TypeVar("Table", bound=BaseModel)


@dataclass(frozen=True)
class Part:
    """One capability that a config may leave out.

    A place is ``module:name``, below the package ``home`` of a plugin. Of the core's own parts it
    is below a room of :data:`ROOMS`, or below ``fedmodels``.
    """

    name: str
    keys: str
    """What switches it on, as a config has it; empty for what is always there."""
    is_on: Callable[[Experiment], bool] = lambda experiment: True
    page: str = ""
    """File under ``docs/`` that tells of it."""
    check: Callable[[Experiment], None] = lambda experiment: None
    """Checks its own numbers, while it is on."""
    server: str = ""
    """Place of its half at the coordinator, a class."""
    client: str = ""
    """Of its half at a client."""
    shared: str = ""
    """Of what both halves know of it: how tensors travel, what clients keep."""
    tells: tuple[str, ...] = ()
    """The figures that clients report of a training for it; a method's own have other names. The
    entry points ``fedtide.figures`` define those of plugins."""
    computes: tuple[str, ...] = ()
    """The figures that the coordinator computes for it; no method may have one of these names."""
    panels: str = ""
    """Of the function that yields its charts of a report and of the live page, from a RunRecord."""
    lines: str = ""
    """Of the function that returns lines on a run, the newest first, from a RunRecord."""
    draws: tuple[str, ...] = ()
    """The purposes of the random numbers that it draws."""
    settles: str = ""
    """Of the function that refuses a method, or settles keys by it: it takes the experiment and
    the method, and returns the experiment."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """The keys of it, or tables, that may change while a run goes on, and what a change is for."""
    resumes: str = ""
    """Of the mapping of all keys that ``--resume`` may change in a run of it."""
    fits: str = ""
    """Of the function that refuses a method and the facts of a run."""
    refuses: str = ""
    """Of the refusals of its pairs, where its section has them."""
    is_beside: bool = False
    """Whether its table decides nothing of what clients train and upload."""
    sample: Mapping[str, Any] = field(default_factory=dict)
    """The tables of a small config that switches it on, with which tests try a plugin's part."""
    home: str = ""
    """The package of a plugin, below which its places are."""
    after: str = ""
    """Of a plugin's part: the part that it follows in the order of all; the last unless given."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Of a plugin's part: the tables of a config that it adds, or adds keys to, and the place of
    the class of each."""

    def at(self, what: str) -> str:
        """Return a place with its package: of a half, or of a function; empty where it has none."""
        place: str = getattr(self, what)
        room = self.home or ROOMS.get(what, "fedmodels")  # type: ignore[call-overload]
        return place and f"{room}.{place}"


@cache
def parts_of_plugins() -> tuple[Part, ...]:
    """Return the parts that plugins bring, sorted by the names of their entry points."""
    return tuple(loaded("fedtide.parts"))


def in_their_places(listed: Sequence[Part], further: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts of the core with those of plugins, each behind the one that it names."""
    placed = [*listed]
    for part in further:
        names = [other.name for other in placed]
        placed.insert(names.index(part.after) + 1 if part.after in names else len(names), part)
    return tuple(placed)


_WITH_KEYS = set[str]()
"""The tables of the core to which plugins may add keys; modules of the config fill it at import."""


def _named(tables: Iterable[str]) -> str:
    return ", ".join(f"[{name}]" for name in sorted(tables))


def with_plugins(table: type[Table]) -> type[Table]:
    """Return the class of a whole config with the tables that plugins add, each at its defaults."""
    added = {name: kind for name, kind in _added() if name not in _WITH_KEYS}
    for name in added.keys() & table.model_fields.keys():
        raise ConfigError(f"a plugin adds keys to [{name}], and may to {_named(_WITH_KEYS)} alone")
    fields: dict[str, Any] = {name: (kind, kind()) for name, kind in added.items()}
    return _made(table, (table,), fields) if fields else table


def with_keys(table: type[Table], name: str) -> type[Table]:
    """Return the class of a table of a config, of this name, with the keys that plugins add."""
    _WITH_KEYS.add(name)
    further = tuple(kind for other, kind in _added() if other == name)
    return _made(table, (*further, table), {}) if further else table


def _added() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the tables that plugins add, or add keys to, and the class of each."""
    for part in parts_of_plugins():
        for name, place in part.tables.items():
            yield name, part_of(f"{part.home}.{place}")


def _made(
    table: type[Table], bases: tuple[type[BaseModel], ...], fields: dict[str, Any]
) -> type[Table]:
    name, module, about = table.__name__, table.__module__, table.__doc__
    made: Any = create_model(name, __base__=bases, __module__=module, __doc__=about, **fields)
    return made  # type: ignore[no-any-return]


def keys_of(experiment: Experiment, table: str) -> Any:
    """Return a table of a config that a plugin adds; types do not know it."""
    return getattr(experiment, table)


def without_gone(tables: Mapping[str, Any], *, is_received: bool = False) -> dict[str, Any]:
    """Return the tables of a config without what is of plugins that are gone, if at its defaults.

    So a run of an installation that has a plugin goes on in one that lacks it. A client does
    without a table that decides nothing of what it uploads, whatever that says.

    Args:
        tables: those of a file, or of a coordinator.
        is_received: whether they come from a coordinator.

    Raises:
        ConfigError: something asks for a plugin that is gone.
    """
    kept = dict(tables)
    for owner, brings in gone_plugins():
        for name, defaults in brings.get("tables", {}).items():
            if name not in kept:
                continue
            is_whole = name in brings["owns"]
            if is_whole and is_received and name in brings["beside"]:
                del kept[name]
            elif isinstance(given := kept[name], Mapping):
                kept[name] = _without(given, name, owner, defaults, is_whole)
                if is_whole:
                    del kept[name]
            elif is_whole:
                raise ConfigError(gone(f"[{name}]", owner))
    return kept


def _without(
    given: Mapping[str, Any], table: str, owner: str, defaults: Mapping[str, Any], is_whole: bool
) -> dict[str, Any]:
    """Return a table without the keys of a plugin that is gone."""
    for key, value in given.items():
        is_default = key in defaults and canonical(value) == canonical(defaults[key])
        if not is_default and (is_whole or key in defaults):
            raise ConfigError(gone(f"[{table}]" if is_whole else f"[{table}] {key}", owner))
    return {key: value for key, value in given.items() if key not in defaults}
