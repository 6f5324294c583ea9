"""What a sweep's file says, and the runs that come of it."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedmodels.config.changes import difference
from fedmodels.config.experiment import Experiment
from fedmodels.config.faults import fault_of
from fedmodels.config.presets import config_file, preset_file
from fedmodels.errors import ArchiveError, ConfigError, reason_of, suggestion
from fedmodels.facts.config_file import override, parse_experiment

Number = int | float
SEARCHED = ("training", "server_optimizer", "method", "net", "compression")
"""Tables whose keys may be searched. Keys of others change what a score measures."""


class Range(BaseModel):
    """The values that a setting may have."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    low: Number | None = None
    high: Number | None = None
    """Both ends belong to it; it holds whole numbers if both are whole."""
    log: bool = False
    """Whether the logarithm is drawn evenly."""
    choices: (
        Annotated[tuple[bool | int | float | str, ...], Field(strict=False, min_length=1)] | None
    ) = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        given = [value is not None for value in (self.low, self.high, self.choices)]
        if given not in ([True, True, False], [False, False, True]):
            raise ValueError("give low and high, or choices")
        low, high = self.low or 0, self.high or 0
        if low > high or (self.log and low <= 0):
            raise ValueError("low is at most high, and above 0 with log")
        return self


class Search(BaseModel):
    """``[search]`` of a sweep's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ranges: Annotated[Mapping[str, Range], Field(min_length=1)]
    trials: Annotated[int, Field(ge=1, le=100_000)] = 20
    """Runs of each row."""
    prune_after: Annotated[int, Field(ge=1)] = 5
    """Trials that come to their end first. A later one ends as soon as its best score so far lies
    below the median of what earlier ones had in the same scored round."""

    @model_validator(mode="after")
    def _may_be_searched(self) -> Self:
        for key in self.ranges:
            table, dot, _ = key.partition(".")
            if table not in SEARCHED or not dot or key == "method.name":
                raise ValueError(
                    f"ranges: {key!r} cannot be searched; keys of {', '.join(SEARCHED)} can"
                )
        return self


Contract = Literal["weighting", "steps", "epochs", "tuning"]
CONTRACT: tuple[Contract, ...] = get_args(Contract)
"""What rows of a fair comparison have in common: how clients are weighted, optimiser steps of a
batch, epochs of all rounds, and numbers of their own in place of defaults."""
ROW = "a row is a method's name and its switches without blanks in them, such as 'fedprox mu=0.1'"
NEEDED = "a sweep needs preset, a config or a preset's name, and the table methods, row = 'METHOD'"
Strings = Annotated[tuple[str, ...], Field(strict=False)]


@dataclass(frozen=True)
class Length:
    """A setting at one length."""

    switches: Strings
    length: int


class Sweep(BaseModel):
    """What a sweep's file says."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    preset: Annotated[Path, Field(strict=False)]
    """The config of all runs: a file, found from here or beside the sweep's, or a preset's name."""
    methods: Annotated[Mapping[str, str], Field(min_length=1)]
    """Name of a row -> a method's name and its switches."""
    columns: Mapping[str, str] = {}
    """Heading -> where in ``summary.json``, e.g. ``metrics.a_glo``.

    Without any, those of a report's first table."""
    settings: Mapping[str, Strings] = {}
    """Name -> what is set in all rows; every row is run in every setting."""
    lengths: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = ()
    """Sizes of every run, as factors of ``lengthens``: each row is run at every one of them."""
    lengthens: Literal["schedule.rounds", "scenario.parts", "training.local_epochs"] = (
        "schedule.rounds"
    )
    """What ``lengths`` multiply. A stream whose tasks are its rounds is longer by its parts."""
    curves: Mapping[str, str] = {}
    """Heading -> a metric of ``rounds.jsonl``, shown after each round."""
    reference: bool = False
    """Whether the average forgetting of all runs is measured against the first row's."""
    search: Search | None = None
    """With ``--search``: ranges of settings, and how many trials."""
    set: Strings = ()
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)] = (
        0,
        1,
        2,
    )
    against: str = ""
    """The row that others are compared with, seed by seed; by default the first."""
    beside: Strings = ()
    """Further rows that others are compared with, such as one that shares nothing."""
    differs: Mapping[Contract, str] | None = None
    """What rows may differ in -> why. With the table, even an empty one, the rest is refused."""
    launch: Strings = ("--hosts=1",)
    """More options of ``fedsrv launch``."""

    def rungs(self) -> dict[str, Length]:
        """Return every setting at every length, by the name that tables give it."""
        found = {}
        for setting, switches in (self.settings or {"": ()}).items():
            for length in self.lengths or (1,):
                size = f"{length} × {self.lengthens.rpartition('.')[2]}" if self.lengths else ""
                name = ", ".join(part for part in (setting, size) if part)
                found[name] = Length(switches, length)
        return found

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Read a file; ConfigError if that fails, or it says what it must not."""
        try:
            table = tomllib.loads(config_file(path).read_text("utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read the sweep {path}: {reason_of(error)}") from None
        if "method" in table and "methods" not in table:
            raise ConfigError(f"{path} is the config of one run, not a sweep: use fedsrv launch")
        known = sorted(cls.model_fields)
        for key in sorted(table.keys() - cls.model_fields.keys()):
            raise ConfigError(
                f"{path}: unknown key {key!r}; known: {', '.join(known)}.{suggestion(key, known)}"
            )
        for key in ("preset", "methods"):
            if key not in table:
                raise ConfigError(f"{path}: key {key!r} is missing; {NEEDED}")
        try:
            found = cls.model_validate(table)
        except ValidationError as error:
            fault = fault_of(error, table)
            where = ".".join(fault.path)
            like = f"; {ROW}" if where.startswith("methods.") else ""
            raise ConfigError(f"{path}: {where}: {fault.message}{like}") from None
        for part in ("methods", "columns", "settings", "curves"):
            for name in getattr(found, part):
                _check_name(f"{path}: [{part}]", name)
        for row, method in found.methods.items():
            _check_row(f"{path}: methods.{row}", method)
        if found.curves and not found.columns:
            raise ConfigError(f"{path}: curves are shown beside columns: give [columns] as well")
        for key, names in (("against", filter(None, [found.against])), ("beside", found.beside)):
            for name in names:
                if name not in found.methods:
                    raise ConfigError(f"{path}: {key} = {name!r} is not one of its methods")
        return found.model_copy(update={"preset": _preset(found.preset, path.parent)})


def _check_name(where: str, name: str) -> None:
    """Refuse a name that would break the line or the cell of a table that it stands in."""
    if not name.isprintable() or "|" in name or not name.strip():
        raise ConfigError(f"{where}: {name!r} is no name for a table: one line of text without |")


def _check_row(where: str, method: str) -> None:
    """Refuse a row that names no method, or whose further words are no switches."""
    name, *switches = method.split() or [""]
    if not name or "=" in name:
        raise ConfigError(f"{where} names no method; {ROW}")
    for switch in switches:
        key, _, value = switch.partition("=")
        if not key or not value:
            raise ConfigError(f"{where}: {switch!r} is no switch; {ROW}")


def _preset(given: Path, beside: Path) -> Path:
    """Return the file of a preset: by its place, beside the sweep's file, or by its name."""
    for place in (given, beside / given):
        if place.is_file():
            return place
    if given.suffix or len(given.parts) > 1:
        raise ConfigError(f"preset = {str(given)!r} is no file, here or in {beside}")
    return preset_file(str(given))


def _tables(preset: Path) -> dict[str, Any]:
    """Return the tables of a preset, which is an experiment by itself."""
    try:
        text = preset.read_text("utf-8-sig")
        parse_experiment(text, f"preset {preset}")
        return tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the preset {preset}: {reason_of(error)}") from None


@dataclass(frozen=True, order=True)
class Cell:
    """One row of a sweep's tables: a method in a setting."""

    setting: str
    row: str

    @property
    def title(self) -> str:
        """Return its name in tables."""
        return f"{self.setting}: {self.row}" if self.setting else self.row


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    cell: Cell
    seed: int
    config: str
    """The run's experiment, as TOML."""
    directory: Path
    data: Path
    """The partition that the runs of a setting and a seed share."""
    own_data: bool
    """Whether the method deals out data of its own: all of them pooled."""

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end."""
        return (self.directory / "summary.json").exists()

    @property
    def config_file(self) -> Path:
        """Where its TOML is written before it begins."""
        return self.directory.with_name(self.directory.name + ".toml")

    def changes(self) -> list[str]:
        """Return the keys in which its config differs from the one it was begun with.

        The reference is left out: its path is another where the runs were moved. What a
        custom file held when the run was begun is written in the run's directory.

        Raises:
            ArchiveError: the config it was begun with is none any more.
        """
        if not self.config_file.exists():
            return []
        try:
            before = parse_experiment(self.config_file.read_text("utf-8"), str(self.config_file))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ArchiveError(f"{self.config_file} is damaged: {error}") from None
        now = parse_experiment(self.config, self.cell.row)
        found = [key for key in difference(before, now) if key != "evaluate.reference"]
        return found + _edited(self.directory / "config.toml", now)

    def check_config(self) -> None:
        """Check that it was begun with the config that it has now.

        Raises:
            ConfigError: names the keys that differ.
            ArchiveError: as of :meth:`changes`.
        """
        if keys := self.changes():
            raise ConfigError(
                f"{self.directory} was run with another config; it differs in {', '.join(keys)}. "
                "Give another --out, or remove that directory to run it again"
            )


def _edited(config: Path, now: Experiment) -> list[str]:
    """Return the digests of custom code that differ from those a run was begun with."""
    try:
        then = tomllib.loads(config.read_text("utf-8"))
    except (OSError, ValueError):  # a damaged run is told of where it is read
        return []
    net = then.get("net", {})
    found = [("method", now.method.code_sha256, then.get("method", {}))]
    several = zip(now.net.each, [net, *net.get("by_client", ())], strict=False)
    found += [("net", table.code_sha256, began) for table, began in several]
    return [
        f"{key}.code_sha256"
        for key, digest, began in found
        if digest and began.get("code_sha256") not in (None, digest)
    ]


def plan(
    sweep: Sweep, out: Path, rows: Sequence[str], seeds: Sequence[int], more: Sequence[str] = ()
) -> list[PlannedRun]:
    """Return every run of a sweep; those of one seed and setting begin with the first row.

    Raises:
        ConfigError: a row is not the sweep's, or no experiment comes of it.
    """
    for row in rows:
        if row not in sweep.methods:
            known = suggestion(row, sweep.methods) or f" Its rows are: {', '.join(sweep.methods)}"
            raise ConfigError(f"--only {row!r} is no row of the sweep.{known}")
    _refuse_what_rows_and_seeds_say(sweep, more)
    for what, given in (("row", rows), ("seed", seeds)):
        for item, count in Counter(given).items():
            if count > 1:
                raise ConfigError(f"{what} {item!r} is named {count} times; once is enough")
    preset = _tables(sweep.preset)
    found = list(_planned(sweep, preset, out, rows, seeds, more))
    places = Counter(run.directory for run in found) + Counter({run.data for run in found})
    for place, count in places.items():
        if count > 1:
            raise ConfigError(f"two runs of the sweep would write {place.name}: name them apart")
    return found


def _refuse_what_rows_and_seeds_say(sweep: Sweep, more: Sequence[str]) -> None:
    """Refuse settings under which runs of two names would be one and the same.

    Raises:
        ConfigError: says where the seed and the method belong.
    """
    settings = [item for rung in sweep.rungs().values() for item in rung.switches]
    for item in (*sweep.set, *settings, *more):
        key = item.partition("=")[0].strip()
        if key == "seed":
            raise ConfigError(f"{item!r}: the seeds of a sweep's runs are its seeds, or --seed")
        if key in ("method", "method.name"):
            raise ConfigError(f"{item!r}: the methods of a sweep's runs are its rows, in methods")
    for option in sweep.launch:
        if option.partition("=")[0] in ("--set", "--out", "--resume"):
            raise ConfigError(
                f"launch has {option!r}, which the sweep says itself; what all runs are set goes "
                "into set"
            )


def _planned(
    sweep: Sweep,
    preset: Mapping[str, Any],
    out: Path,
    rows: Sequence[str],
    seeds: Sequence[int],
    more: Sequence[str],
) -> Iterator[PlannedRun]:
    for setting, rung in sweep.rungs().items():
        for seed in seeds:
            place = "-".join([*([_slug(setting)] if setting else []), "{}", f"seed{seed}"])
            first = out / place.format(_slug(rows[0]))
            for row in rows:
                overrides = [*sweep.set, *rung.switches, *more]
                if sweep.reference and row != rows[0]:
                    overrides.append(f"evaluate.reference={first.resolve()}")
                config = config_for(preset, sweep.methods[row], overrides)
                if rung.length > 1:
                    config = lengthened(config, sweep.lengthens, rung.length)
                experiment = parse_experiment(config, row)
                if experiment.schedule.has_no_end and experiment.begins.close_after_s is None:
                    raise ConfigError(
                        f"{row}: a run of a sweep has to end by itself, and this one would wait "
                        "for new data for good: give [trigger] close_after_s"
                    )
                pools = experiment.method.pools_data
                directory, data = out / place.format(_slug(row)), out / place.format("data")
                yield PlannedRun(Cell(setting, row), seed, config, directory, data, pools)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def lengthened(config: str, key: str, factor: int) -> str:
    """Return the TOML of an experiment in which one key has ``factor`` times its value.

    Raises:
        ConfigError: the experiment has no such key.
    """
    table, _, name = key.partition(".")
    value = getattr(getattr(parse_experiment(config), table), name, None)
    if value is None:
        raise ConfigError(f"lengthens = {key!r}: [{table}] of the sweep's runs has no {name!r}")
    tables = tomllib.loads(config)
    override(tables, f"{key}={factor * value}")
    return tomli_w.dumps(tables)


def config_for(preset: Mapping[str, Any], method: str, overrides: Iterable[str]) -> str:
    """Return the TOML of a preset with another method and overrides.

    Args:
        preset: its tables.
        method: its name and switches; a switch with a dot belongs to the table that it names, and
            ``reading.KEY`` to ``[method.reading]``.
        overrides: ``KEY=VALUE``, as ``--set`` takes them.
    """
    name, *switches = method.split()
    tables = deepcopy(dict(preset))
    if tables["method"]["name"] != name:
        tables["method"] = {"name": name}
    for item in (*overrides, *map(_in_its_table, switches)):
        override(tables, item)
    return tomli_w.dumps(tables)


def _in_its_table(switch: str) -> str:
    """Return a switch of a row as ``--set`` takes it."""
    table, dot, _ = switch.partition("=")[0].partition(".")
    return switch if dot and table != "reading" else f"method.{switch}"
