"""A part: one capability that a config may leave out, as the core or a plugin describes it.

A plugin's module with its part imports nothing else: it is loaded with every config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, create_model

from fedmodels.config.bounds import canonical
from fedmodels.errors import ConfigError
from fedmodels.plugins import gone, known, loaded, owner_of

Side = Literal["server", "client", "shared"]
ROOMS: Mapping[Side, str] = {
    "server": "fedsrv.parts", "client": "fedcli.parts", "shared": "fedmodels",
}  # fmt: skip
"""Where the halves of the core's own parts are; its functions are below ``fedmodels`` as well."""
Experiment = Any
"""Of :mod:`fedmodels.config.experiment`, which needs the tables of plugins and so this module."""
Table = TypeVar("Table", bound=type[BaseModel])


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
    """The figures that clients report of a training for it; a method's own have other names."""
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


def with_plugins(table: Table) -> Table:
    """Return the class of a whole config with the tables that plugins add, each at its defaults."""
    fields: dict[str, Any] = {}
    for part in parts_of_plugins():
        for name, place in part.tables.items():
            module, _, kind = place.partition(":")
            added = getattr(import_module(f"{part.home}.{module}"), kind)
            fields[name] = (added, added())
    if not fields:
        return table
    made = create_model(
        table.__name__, __base__=table, __module__=table.__module__, __doc__=table.__doc__, **fields
    )
    return made  # type: ignore[return-value]


def keys_of(experiment: Experiment, table: str) -> Any:
    """Return a table of a config that a plugin adds; types do not know it."""
    return getattr(experiment, table)


def without_gone(tables: Mapping[str, Any], *, is_received: bool = False) -> dict[str, Any]:
    """Return the tables of a config without those of plugins that are gone, if at their defaults.

    So a run of an installation that has a plugin goes on in one that lacks it. A client does
    without a table that decides nothing of what it uploads, whatever that says.

    Args:
        tables: those of a file, or of a coordinator.
        is_received: whether they come from a coordinator.

    Raises:
        ConfigError: a table asks for a plugin that is gone.
    """
    kept = dict(tables)
    for name in tables:
        if (owner := owner_of("tables", name)) is None:
            continue
        defaults = known()[owner]["tables"][name]
        given = tables[name]
        is_beside = is_received and name in known()[owner].get("beside", ())
        if not is_beside and not _is_at(given, defaults):
            raise ConfigError(gone(f"[{name}]", owner))
        del kept[name]
    return kept


def _is_at(given: Any, defaults: Mapping[str, Any]) -> bool:
    """Tell whether a table has no values but its defaults."""
    return isinstance(given, Mapping) and all(
        key in defaults and canonical(value) == canonical(defaults[key])
        for key, value in given.items()
    )
