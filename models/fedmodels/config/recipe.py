"""The recipe of a site, ``site.toml``: how its files say what a run asks for.

    columns.spo2 = "SpO2 (%)"                                  # another name
    columns.temp = {from = "Temp", unit = "°F", factor = 0.5556, offset = -17.78}
    columns.crp  = {below = "half"}                            # <0.5 is 0.25
    columns.sex.values = {"männlich" = "m", "weiblich" = "f"}
    classes."Gelb" = "yellow"                                  # also "gelb " and "GELB"
    classes."1" = "yellow"
    decimal = ","

The keys of ``columns`` are names that the run has, those of ``values`` and ``classes`` are texts
that the site writes. Nothing here opens any data.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from fedmodels.config.bounds import StrictTable, digest_of
from fedmodels.config.columns import (
    ROLES,
    Columns,
    Decimal,
    Formats,
    Missing,
    MissingValues,
    TimeUnit,
)
from fedmodels.errors import ConfigError, RecipeError, reason_of, suggestion
from fedmodels.facts.class_names import ClassName, alike, composed

NAME = "site.toml"
MAX_BYTES = 1 << 20
"""Limit of the file."""
READING = (
    "delimiter", "decimal", "encoding", "day_first", "time_unit", "missing", "missing_values",
    "sheet", "date_formats",
)  # fmt: skip
"""Keys of ``[data.columns]`` that a site may say in place of the run."""
_LIMIT = re.compile(r"\s*([<>\u2264\u2265])=?\s*(?=[^\s<>=])")
"""What a number begins with that lies beyond a limit of detection."""
Number = Annotated[float, Field(allow_inf_nan=False, strict=False)]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]


class SiteColumn(StrictTable):
    """What a site's files call a column of the run, and how they write what is in it."""

    from_: Annotated[Name | Names | None, Field(alias="from")] = None
    """Its name in the site's files, or several, of which each file has one; by default as in the
    run."""
    unit: Annotated[str | None, Field(min_length=1)] = None
    """What may stand behind its numbers, such as ``%`` or ``°C``."""
    factor: Number = 1.0
    """By which a number is multiplied, to come to the run's unit."""
    offset: Number = 0.0
    """What is added after that."""
    below: Number | Literal["limit", "half"] | None = None
    """What ``<0.5`` stands for: the limit itself, half of it, or a number in the site's unit."""
    above: Number | Literal["limit"] | None = None
    """What ``>90`` stands for, likewise."""
    missing: MissingValues | None = None
    """Numbers and texts of this column that stand for an empty cell."""
    values: dict[str, str] = Field(default={})
    """By how the site writes them: texts of the column as the run has them."""

    def names(self, own: str) -> tuple[str, ...]:
        """Return what the site's files may call it, whose name in the run is its own."""
        found = self.from_ or own
        return (found,) if isinstance(found, str) else found

    @property
    def is_of_numbers(self) -> bool:
        """Whether a key is for numbers alone."""
        keys = ("unit", "factor", "offset", "below", "above")
        return any(map(self.differs, keys))

    def bare(self, cell: str) -> str:
        """Return a cell's number without its unit and without ``<`` or ``>``, where these may be.

        A cell that holds something else stays.
        """
        text = cell
        if self.limit_of(cell) is not None:
            text = _LIMIT.sub("", text, count=1)
        if self.unit is not None and text.rstrip().endswith(self.unit):
            text = text.rstrip().removesuffix(self.unit).rstrip()
        return text

    def limit_of(self, cell: str) -> float | Literal["limit", "half"] | None:
        """Return what a number beyond a limit stands for; None where a cell is no such number."""
        if (sign := _LIMIT.match(cell)) is None:
            return None
        return self.below if sign[1] in "<\u2264" else self.above

    @model_validator(mode="after")
    def _check_factor(self) -> SiteColumn:
        if self.factor == 0:
            raise ConfigError("factor = 0 makes all numbers alike: leave it out, or give another")
        _folded(self.values, "values")
        return self


def _column(given: Any) -> Any:
    """Return a column as a table; a text alone, or a list, is its name at the site."""
    return {"from": given} if isinstance(given, str | list) else given


class Recipe(StrictTable):
    """``site.toml``: what a site's files call columns and classes, and how they are written."""

    columns: dict[str, Annotated[SiteColumn, BeforeValidator(_column)]] = Field(default={})
    """By the run's name of a column: what the site has."""
    classes: dict[str, ClassName] = Field(default={})
    """By how the site writes a class, in a cell or as a folder's name: the run's class."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    decimal: Decimal | None = None
    encoding: str | None = None
    day_first: bool | None = None
    time_unit: TimeUnit | None = None
    missing: Missing | None = None
    missing_values: MissingValues | None = None
    mark: Name | None = None
    """Column of the site's files that only rises, such as a running number or the time of an entry:
    of what comes later, rows beyond the last mark alone are read."""
    database: Name | None = None
    """File beside a query ``*.sql``, of SQLite or DuckDB, that the query is put to."""
    sheet: Name | None = None
    date_formats: Formats | None = None
    bad: Literal["refuse", "skip"] | None = None
    """What becomes of the site's bad rows and files, in place of ``[data] bad``."""

    def facts(self) -> dict[str, Any]:
        """Return the recipe as plain values, without what it leaves open."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    @property
    def has_choices(self) -> bool:
        """Whether files may call a column by one of several names."""
        return any(not isinstance(column.from_, str | None) for column in self.columns.values())

    @cached_property
    def digest(self) -> str:
        """The sha256 of what it says, whatever its file looks like; empty where it says nothing."""
        return digest_of(self.facts())

    def __bool__(self) -> bool:
        """Tell whether it says anything."""
        return bool(self.facts())

    def over(self, columns: Columns) -> Columns:
        """Return the run's columns, with what the site says of how its files are written.

        Raises:
            ConfigError: that contradicts the columns.
        """
        update = {key: getattr(self, key) for key in READING if getattr(self, key) is not None}
        self._check(columns)
        return Columns.model_validate({**dict(columns), **update})

    def for_run(self, columns: Columns | None) -> tuple[Recipe, str]:
        """Return the part of the recipe that a run asks for, and in words what it does not ask for.

        One recipe serves several runs, which may call a column of the site differently.

        Raises:
            RecipeError: two columns of the run are one column of the site.
        """
        own, line = self, ""
        if columns is not None and columns.features is not None:
            asked = {*columns.named, *columns.features, *(columns.categories or {})}
            if left := [name for name in self.columns if name not in asked]:
                kept = {name: one for name, one in self.columns.items() if name in asked}
                own = self.model_copy(update={"columns": kept})
                own.__dict__.pop("digest", None)  # it was computed of all columns
                line = (
                    f"the run asks for no column {', '.join(map(repr, left))}, which the recipe "
                    f"has.{suggestion(left[0], asked)}"
                )
        seen = dict[str, str]()
        for there, name in ((o, n) for n, c in own.columns.items() for o in c.names(n)):
            other = seen.setdefault(there, name)
            if other != name:
                raise RecipeError(
                    f"the recipe's columns.{other} and columns.{name} are one column of the site"
                )
        return own, line

    def _check(self, columns: Columns) -> None:
        """Check that what the recipe says of a column is for one of its kind."""
        asked = {*columns.named, *(columns.features or ()), *(columns.categories or {})}
        for name, column in self.columns.items():
            if columns.features is not None and name not in asked:
                continue
            role = next((role for role in ROLES if getattr(columns, role) == name), None)
            what = "one of categories" if name in (columns.categories or {}) else f"the {role}"
            is_of_texts = role not in (None, "time") or what == "one of categories"
            if is_of_texts and column.is_of_numbers:
                raise ConfigError(
                    f"the recipe has a unit, a factor or a limit for column {name!r}, which is "
                    f"{what}: these are for columns of numbers"
                )
            if role is not None and column.missing is not None:
                raise ConfigError(
                    f"the recipe has missing for column {name!r}, which is {what}: that is for "
                    "columns that a net sees"
                )
            if column.values and (role in ("label", "time") or role is None) and name not in (
                columns.categories or {}
            ):  # fmt: skip
                other = (
                    "classes says how labels are written" if role == "label" else
                    "values are for columns of texts"
                )  # fmt: skip
                raise ConfigError(f"the recipe has values for column {name!r}: {other}")

    def of_texts(self) -> Recipe:
        """Return the recipe of files whose numbers are in the run's unit already."""
        plain = SiteColumn(unit=None)
        keys = ("unit", "factor", "offset", "below", "above", "missing")
        update = {key: getattr(plain, key) for key in keys}
        columns = {name: one.model_copy(update=update) for name, one in self.columns.items()}
        return self.model_copy(update={"columns": columns})

    def called(self, name: str) -> str:
        """Return what the site's files call a column of the run."""
        return self.columns[name].names(name)[0] if name in self.columns else name

    def resolved(self, known: Collection[str], where: object) -> Recipe:
        """Return the recipe for a file with these names: of several for a column, its own one.

        Raises:
            RecipeError: the file has two of them.
        """
        update = dict[str, SiteColumn]()
        for name, column in self.columns.items():
            found = [own for own in column.names(name) if own in known]
            if len(found) > 1:
                raise RecipeError(
                    f"{where} has the columns {found[0]!r} and {found[1]!r}, which are both "
                    f"{name!r} by the recipe: leave one out of it"
                )
            if not isinstance(column.from_, str | None):
                own = found[0] if found else column.from_[0]
                update[name] = column.model_copy(update={"from_": own})
        return self.model_copy(update={"columns": {**self.columns, **update}}) if update else self

    def in_files(self, columns: Columns) -> Columns:
        """Return the run's columns under the names that the site's files have."""
        update: dict[str, Any] = {
            role: self.called(name) for role in ROLES if (name := getattr(columns, role))
        }
        if columns.features is not None:
            update["features"] = tuple(map(self.called, columns.features))
        if columns.categories is not None:
            update["categories"] = {self.called(k): v for k, v in columns.categories.items()}
        return columns.model_copy(update=update)

    def bare(self, name: str, cell: str) -> str:
        """Return what :meth:`SiteColumn.bare` does, by a column's name in the site's files."""
        own = next((c for run, c in self.columns.items() if name in c.names(run)), None)
        return cell if own is None else own.bare(cell)

    def all_bare(self, names: Sequence[str], cells: Sequence[str]) -> list[str]:
        """Return the cells of a row as :meth:`bare` does; cells beyond the names stay."""
        of_names = map(self.bare, names, cells)
        return [*of_names, *cells[len(names) :]]

    @cached_property
    def _classes(self) -> dict[str, str]:
        return _folded(self.classes, "classes")

    def class_of(self, text: str) -> str:
        """Return the run's class for how a site writes it; the text itself where nothing is said.

        Spellings that differ in case or in spaces alone count as one.
        """
        return self._classes.get(_fold(text), text)

    def text_of(self, column: str, text: str) -> str:
        """Return a text of a column as the run has it, likewise."""
        own = self.columns.get(column)
        return text if own is None else _folded(own.values, column).get(_fold(text), text)

    @model_validator(mode="after")
    def _check_names(self) -> Recipe:
        self._classes  # noqa: B018  (two spellings that contradict each other)
        return self


def _fold(text: str) -> str:
    return alike(composed(text))


def _folded(values: Mapping[str, str], where: str) -> dict[str, str]:
    """Return texts by spellings without case and spaces; ConfigError if two stand for two texts."""
    found = dict[str, str]()
    for spelling, text in values.items():
        if found.setdefault(_fold(spelling), text) != text:
            raise ConfigError(
                f"{where}: {spelling!r} is {text!r}, and another spelling of it, in case or spaces "
                f"alone, is {found[_fold(spelling)]!r}"
            )
    return found


EMPTY = Recipe()
"""The recipe of a site that writes all as the run does."""


def recipe_in(path: Path) -> Recipe:
    """Read a ``site.toml``.

    Raises:
        RecipeError: it cannot be read, or says what it must not; names the key.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(f"the recipe {path} has more than {MAX_BYTES} bytes")
        tables = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {reason_of(error)}") from None
    except (ValueError, RecursionError) as error:
        quotes = (
            "; a name with spaces or letters beyond A to Z is in quotes"
            if "after a key" in str(error)
            else ""
        )
        raise RecipeError(f"the recipe {path} is not valid TOML: {error}{quotes}") from None
    return recipe_of(tables, path)


def recipe_of(tables: Mapping[str, Any], where: object) -> Recipe:
    """Check a recipe's tables; raise RecipeError where they say what they must not."""
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        near = ""
        if first["type"] == "extra_forbidden":
            keys = [*Recipe.model_fields] if len(first["loc"]) == 1 else [
                "from", *(key for key in SiteColumn.model_fields if key != "from_"),
            ]  # fmt: skip
            near = suggestion(str(first["loc"][-1]), keys) or f" Known are: {', '.join(keys)}"
            near = f".{near}"
        raise RecipeError(f"the recipe {where}: {place}: {first['msg']}{near}") from None
    except ConfigError as error:
        raise RecipeError(f"the recipe {where}: {error}") from None


def recipe_beside(files: Path) -> Recipe:
    """Return the recipe that lies in a directory of files, or beside one file; else an empty one.

    Raises:
        RecipeError: it is malformed.
    """
    place = (files if files.is_dir() else files.parent) / NAME
    return recipe_in(place) if place.is_file() else EMPTY
