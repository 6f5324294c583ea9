"""A table or figure of a paper: its cells as configs and metrics, its figures, our records."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedmodels.config.experiment import Experiment
from fedmodels.config.presets import preset_file
from fedmodels.errors import ConfigError
from fedmodels.facts.config_file import parse_experiment
from fedplugins.studies.plan import config_for

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAPERS = ("gldp", "fedmlp", "pfedgrp", "fedali")
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]


class Strict(BaseModel):
    """A table of a file: no other keys, no other types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Score(Strict):
    """One figure of a run, in the paper's view."""

    metric: str = ""
    """Its path in ``summary.json``; a metric where there is no dot.

    Empty where no run writes it.
    """
    rows: Mapping[str, str] = {}
    """Rows whose paper's view is another metric."""
    counted: Literal["", "upload", "forward", "parameters"] = ""
    """What code counts from a cell's config, without a run: the most bytes of an upload, the
    multiply-adds of the net's forward pass, or its parameters."""
    of: str = ""
    """The row that others are counted relative to, as the paper does."""

    def path(self, row: str) -> str:
        """Return the path of a row's figure; empty where no run writes it."""
        found = self.rows.get(row, self.metric)
        return found if "." in found or not found else f"metrics.{found}"


class Beside(Strict):
    """Recorded runs that stand beside a table: its own cells, or the nearest that ran here."""

    study: str
    setting: str = ""
    """The record's."""
    heading: str
    """What was run, in a few words."""
    of: str
    """The column whose config the size is measured against."""
    rows: Mapping[str, str]
    """Row of the table -> row of the record."""
    scores: Mapping[str, str] = {}
    """Score -> where the record has it, if that is another path than the paper's view."""
    is_cell: bool = False
    """Whether the runs are those of the column ``of``, but for what the heading says."""


class Table(Strict):
    """What a file of this directory says."""

    title: str
    shows: str
    """What the paper's figures are of: model and moment, test set, classes to choose among."""
    preset: str
    settings: Mapping[str, Strings]
    """Column of the paper -> what its config sets; ``preset=NAME`` takes another preset."""
    scores: Mapping[str, Score]
    rows: Mapping[str, str]
    """Row of the paper -> method and switches, as in a sweep."""
    apart: Mapping[str, Mapping[str, str]] = {}
    """Row -> column -> further switches of that row there, where a paper has them by data set."""
    absent: Mapping[str, Strings] = {}
    """Row -> columns that the paper leaves empty."""
    unscored: Mapping[str, Strings] = {}
    """Row -> scores that no run of its method has: the paper's figure stands without ours."""
    figures: Mapping[str, Numbers] = {}
    """Row -> its figures, setting by setting and score by score; nan where the paper has none.
    Empty where the paper's figures are a picture."""
    spreads: Mapping[str, Strings] = {}
    """Row -> what stands behind ± at each of its figures, in the paper's digits; empty where none.
    """
    curve: str = ""
    """The metric of ``rounds.jsonl`` that a figure draws by round."""
    command: str = ""
    """What shows it, where that is no metric of a run."""
    beside: tuple[Beside, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _figures_fit(self) -> Table:
        cells = len(self.settings) * len(self.scores)
        for row, found in self.figures.items():
            if row not in self.rows or {len(found), len(self.spreads.get(row, found))} != {cells}:
                raise ValueError(f"figures of {row!r}: {len(found)} for {cells} cells, or no row")
        for name, score in self.scores.items():
            if not (score.metric or score.counted or self.command):
                raise ValueError(f"score {name!r}: no metric, no count and no command shows it")
        for row, columns in (*self.absent.items(), *self.apart.items()):
            if row not in self.rows or not {*columns} <= self.settings.keys():
                raise ValueError(f"{row!r}: no such row, or no such columns: {', '.join(columns)}")
        for row, scores in self.unscored.items():
            if row not in self.rows or not {*scores} <= self.scores.keys():
                raise ValueError(f"unscored: {row!r} is no row, or has no such scores: {scores}")
        if both := self.absent.keys() & self.figures.keys():
            raise ValueError(f"figures and empty columns of {', '.join(both)}: give nan there")
        for one in self.beside:
            if one.of not in self.settings or not one.rows.keys() <= self.rows.keys():
                raise ValueError(f"beside {one.study}: no such column or row")
        return self


@dataclass(frozen=True)
class Cell:
    """One cell of a paper's table."""

    row: str
    setting: str
    score: str
    paper: float | None
    """The paper's figure; None where it cannot be read."""
    spread: str = ""
    """What stands behind ± in the paper."""


@dataclass(frozen=True)
class Shown:
    """A table, and where it stands."""

    paper: str
    name: str
    """Such as ``table-3``."""
    table: Table

    def cells(self) -> Iterator[Cell]:
        """Yield every cell."""
        told = (self.table.figures, self.table.spreads)
        given = {row: tuple(iter(of.get(row, ())) for of in told) for row in self.table.rows}
        for row, setting in self.runs():
            figures, spreads = given[row]
            for score in self.table.scores:
                yield Cell(row, setting, score, next(figures, None), next(spreads, ""))

    def runs(self) -> Iterator[tuple[str, str]]:
        """Yield the row and the column of every config."""
        for row in self.table.rows:
            for setting in self.table.settings:
                if setting not in self.table.absent.get(row, ()):
                    yield row, setting

    @cached_property
    def _presets(self) -> dict[str, Mapping[str, Any]]:
        return {}

    @cached_property
    def _experiments(self) -> dict[tuple[str, str], Experiment]:
        return {}

    def config(self, row: str, setting: str) -> str:
        """Return the TOML of the runs behind a row in a column."""
        sets = list(self.table.settings[setting])
        preset = self.table.preset
        for item in [each for each in sets if each.startswith("preset=")]:
            sets.remove(item)
            preset = item.removeprefix("preset=")
        if preset not in self._presets:
            self._presets[preset] = tomllib.loads(
                preset_file(preset.removesuffix(".toml")).read_text()
            )
        method = f"{self.table.rows[row]} {self.table.apart.get(row, {}).get(setting, '')}"
        return config_for(self._presets[preset], method, sets)

    def experiment(self, row: str, setting: str) -> Experiment:
        """Return the experiment behind a row in a column.

        Raises:
            ConfigError: its config is none.
        """
        if (row, setting) not in self._experiments:
            try:
                self._experiments[row, setting] = _parsed(self.config(row, setting))
            except ConfigError as error:
                raise ConfigError(f"{self.paper} {self.name}, {row}, {setting}: {error}") from None
        return self._experiments[row, setting]


@cache
def _parsed(config: str) -> Experiment:
    """Parse a config once: tables and figures share many."""
    return parse_experiment(config)


def read(path: Path) -> Shown:
    """Read a file of a paper's directory."""
    table = Table.model_validate(tomllib.loads(path.read_text("utf-8")))
    return Shown(path.parent.name, path.stem, table)


def tables_of(papers: Sequence[str] = PAPERS) -> list[Shown]:
    """Return the tables and figures of these papers, in the papers' order."""

    def place(path: Path) -> tuple[bool, int]:
        kind, _, number = path.stem.partition("-")
        return kind != "table", int(number)

    found = [sorted((HERE / paper).glob("*-*.toml"), key=place) for paper in papers]
    return [read(path) for paths in found for path in paths]
