"""New files for a trained model: read, cut and scaled as those that it was trained on.

The transform of training travels in the model's own file. Arrays are taken as they are.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcli.data.archives import Archives, is_archive
from fedcli.data.arrays import read_array
from fedcli.data.folders import TABLE_ENDS, ending, files_below, note_left_out
from fedcli.data.image_files import ENDS, OTHERS, is_image, read_image
from fedcli.data.own.bad_rows import faults_of, why_bad
from fedcli.data.own.cells import check_columns, parsed
from fedcli.data.own.recordings import RecordingRows, rows_of, windowed
from fedcli.data.own.table_files import (
    OTHER_TABLES,
    TableRows,
    as_in_run,
    files_of,
    read_tables,
    tell_styles,
)
from fedcli.data.own.typed_columns import text_of
from fedmodels.config.columns import OF_TARGETS, ROLES, Columns
from fedmodels.config.recipe import recipe_in
from fedmodels.config.transforms import ImageTransform, TableTransform, Transform, parse_transform
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError
from fedmodels.nets.trained import ModelFacts

ARRAYS = ".npy"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewInputs:
    """The inputs of one file."""

    file: Path
    x: NDArray[Any]  # (n, *input_shape), raw
    unit: str = ""
    """What the places of inputs count: lines or rows of a table, frames, or inputs of an array."""
    places: Sequence[tuple[int, int]] = ()
    """The first and the last place of each input; none where the file holds a single one."""
    kept: Sequence[Sequence[str]] = ()
    """Of each input the cells of the columns that pass through, from its first row."""
    left: Sequence[tuple[int, str, Sequence[str]]] = ()
    """Rows that make no input: their place, why, and their cells that pass through."""
    why: str = ""
    """Why the whole file has no input, where it has none."""

    def called(self, number: int) -> str:
        """Return what an input is called: the file, and the place in it where there are several."""
        if not self.places:
            return str(self.file)
        first, last = self.places[number]
        if not self.unit:
            return f"{self.file}[{first}]"
        return f"{self.file}, {self.unit} {first}" + (f" to {last}" if last > first else "")


def how_of(facts: ModelFacts, model: object) -> Transform | None:
    """Return how files become the inputs of a model; None where nothing but arrays does.

    Raises:
        DataError: its file says what it must not.
    """
    how = parse_transform(facts.transform, model) or _usual(facts)
    if isinstance(how, TableTransform):
        how = how.model_copy(update={"columns": how.of_site})
    return how


def new_files(paths: Sequence[Path], how: Transform | None, packed: Archives) -> Iterator[Path]:
    """Yield files; of a directory or an archive, every file of the kind that the model takes.

    Raises:
        DataError: there is none.
    """
    is_of_tables = isinstance(how, TableTransform)
    for path in paths:
        place = packed.unpacked(path) if is_archive(path) and not is_of_tables else path
        if is_of_tables and (place.is_dir() or is_archive(place)):
            found = files_of(place, packed)
        elif place.is_dir():
            found = [file for file in files_below(place) if is_image(file)]
        else:
            yield path
            continue
        if not found:
            raise DataError(f"{path} holds no file that the model takes: {', '.join(ENDS)}")
        if path.is_dir():
            taken = [packed.holding(file) for file in found]
            note_left_out(path, taken, OTHER_TABLES if is_of_tables else OTHERS)
        yield from found


def read_file(
    path: Path, facts: ModelFacts, how: Transform | None, keep: Sequence[str], packed: Archives
) -> Iterator[NewInputs]:
    """Yield the inputs of a file, and of each sheet of a workbook.

    Raises:
        DataError: it cannot be read, does not fit the model or is beyond it.
    """
    shown = packed.shown(path)
    for found in _read(path, facts, how, keep, shown):
        yield replace(_checked(found, facts), file=shown)


def read_by(recipe: Path, facts: ModelFacts, model: object) -> ModelFacts:
    """Return the facts of a model for files that are read by another recipe.

    Raises:
        ConfigError: the recipe is no good, or the model takes no tables.
    """
    how = parse_transform(facts.transform, model)
    if not isinstance(how, TableTransform):
        raise ConfigError(f"--recipe is for tables, and {model} takes none")
    found, line = recipe_in(recipe).for_run(how.columns)
    if line:
        log.warning("note: %s", line)
    how = how.model_copy(update={"recipe": found, "decimal": None})  # that mark was another site's
    how.of_site  # noqa: B018  (what contradicts the columns is refused)
    return replace(facts, transform=how.facts())


def _usual(facts: ModelFacts) -> Transform | None:
    """Return how images are read where a model's file says nothing of it."""
    if len(facts.input_shape) == 3 and facts.input_shape[0] in (1, 3):
        return ImageTransform(channels="grey" if facts.input_shape[0] == 1 else "rgb")
    return None


def _read(
    path: Path, facts: ModelFacts, how: Transform | None, keep: Sequence[str], shown: Path
) -> list[NewInputs]:
    """Read one file by its kind."""
    shape = tuple(facts.input_shape)
    if keep and not (isinstance(how, TableTransform) and ending(path) in TABLE_ENDS):
        raise DataError(f"{path} has no column {keep[0]!r} to keep: it is no table")
    if path.suffix == ARRAYS:
        return [_array(path, read_array(path), facts)]
    is_table = ending(path) in TABLE_ENDS
    if isinstance(how, TableTransform) and is_table:
        return _read_tables(path, how, keep, shown)
    if isinstance(how, ImageTransform) and not is_table:
        return [_read_picture(path, facts, how)]
    takes = "no other files" if how is None else how.kind.removesuffix("s") + "s"
    kind = "a table" if is_table else "an image" if is_image(path) else f"not an {ARRAYS} file"
    raise DataError(f"{path} is {kind}; the model takes arrays {list(shape)}, and {takes}")


def _array(path: Path, x: NDArray[Any], facts: ModelFacts) -> NewInputs:
    x = x[None] if x.shape == tuple(facts.input_shape) else x
    return NewInputs(path, x, "", [(i, i) for i in range(len(x))] if len(x) > 1 else ())


def given(x: NDArray[Any], name: Path, facts: ModelFacts) -> NewInputs:
    """Return an array of one input or of several, by a name that error lines call it.

    Raises:
        DataError: it does not fit the model.
    """
    return _checked(_array(name, x, facts), facts)


def _read_picture(path: Path, facts: ModelFacts, how: ImageTransform) -> NewInputs:
    """Read an image, or each of its frames."""
    x = np.stack(read_image(path, how))
    if not facts.is_of_bytes or (x.dtype == np.uint16) != (facts.scale > 255):
        trained = f"values from 0 to {facts.scale:g}" if facts.is_of_bytes else "numbers"
        raise DataError(
            f"{path} holds {8 * x.itemsize} bits a shade, and the model was trained on {trained}: "
            f"give an {ARRAYS} file of inputs as they were, or save it likewise"
        )
    return NewInputs(
        path, x, "frame", [(i + 1, i + 1) for i in range(len(x))] if len(x) > 1 else ()
    )


def _read_tables(
    path: Path, how: TableTransform, keep: Sequence[str] = (), shown: Path | None = None
) -> list[NewInputs]:
    """Read the windows of a recording, or the rows of a table; labels are not needed.

    A note calls the file as it is ``shown``.
    """
    tables = _marked(how, lambda columns: read_tables(path, columns, how.recipe, keep))
    found = list[NewInputs]()
    for table in tables:
        columns = _unlabelled(how.columns, [str(name) for name in table.frame.columns], path)
        if not len(table.frame):
            raise DataError(f"{path} holds no row below the names of its columns")
        tell_styles([table], shown or path)
        read = read_rows(table, columns, how, path, keep)
        found.append(replace(read, unit=f"{table.part} row" if len(tables) > 1 else read.unit))
    return found


def read_rows(
    table: TableRows, columns: Columns, how: TableTransform, path: Path, keep: Sequence[str] = ()
) -> NewInputs:
    """Return the inputs of a table's rows; those that make none are named.

    Raises:
        DataError: no row makes an input, or a column is missing; names the file.
    """
    check_columns(table.names, columns, path, table.recipe, table.apart)
    run_names = {table.recipe.called(n): n for n in table.recipe.columns}
    keep = [n if n in table.frame.columns else run_names.get(n, n) for n in keep]
    for name in keep:
        if name not in table.frame.columns:
            raise DataError(f"{path} has no column {name!r} to keep")
    through = table.frame[[*keep]]
    through = through.astype(object).where(through.notna(), None)
    kept = [[*map(_kept, cells)] for cells in through.to_numpy().tolist()]
    bad, lost, faults = _set_aside(table, columns)
    there = np.flatnonzero(~lost)
    try:
        whole = rows_of(table.kept(~lost), columns, bad=bad[~lost], is_new=True)[0]
        _check_length(whole, columns, path)
        rows = windowed(whole, columns, path)
    except DataError:
        if faults:
            rows_of(table, columns, is_new=True)  # an error that names the first one says more
        raise
    rows = rows.at(np.argsort(there[rows.first], kind="stable"))  # as the file has them
    x = rows.x if how.fill is None else np.where(np.isnan(rows.x), np.array(how.fill), rows.x)
    lines, first = table.numbers, there[rows.first]
    places = zip(lines[first].tolist(), lines[there[rows.last]].tolist(), strict=True)
    if columns.window is None and columns.rate is None:
        out = {*range(len(table.frame))} - {*first.tolist()}
        faults = {row: faults.get(row, "left out") for row in sorted(out)}
    left = [(int(lines[row]), why, kept[row]) for row, why in sorted(faults.items())]
    return NewInputs(path, x, table.unit, list(places), [kept[row] for row in first.tolist()], left)


def _kept(cell: Any) -> str:
    """Return a cell that passes through as a CSV has it; empty text for none."""
    return "" if cell is None else text_of(cell.item() if isinstance(cell, np.generic) else cell)


def given_rows(
    rows: Sequence[Mapping[str, Any]], name: Path, facts: ModelFacts, how: TableTransform
) -> NewInputs:
    """Return the inputs of rows by column names; columns that the model does not ask for are left.

    Raises:
        DataError: they do not fit the model.
    """
    how = how.model_copy(update={"columns": how.of_site})
    columns, known = how.columns, {key for row in rows for key in row}
    own = {name: one.names(name) for name, one in how.recipe.columns.items() if name not in known}
    if any({*own.get(name, ())} & known for name in columns.features or ()):
        return _checked(_rows_of_site(rows, known, name, how), facts)
    check_columns([*known], _unlabelled(columns, [*known], name), name)
    asked = (*(columns.features or ()), columns.client, columns.session, columns.time)
    names = [one for one in asked if one is not None and any(one in row for row in rows)]
    cells = {one: [row.get(one) for row in rows] for one in names}
    if any(not isinstance(v, str | int | float | None) for of in cells.values() for v in of):
        raise DataError(f"{name} holds a value that is no number and no text")
    frame = importlib.import_module("pandas").DataFrame(cells, index=range(len(rows)))
    (table,) = _marked(how, lambda columns: [TableRows.of_frame(frame, name, columns)])
    columns = _unlabelled(columns, names, name)
    return _checked(read_rows(table, columns, how, name), facts)


def _rows_of_site(
    rows: Sequence[Mapping[str, Any]], known: Collection[str], name: Path, how: TableTransform
) -> NewInputs:
    """Return the inputs of rows by the names and in the units of the site's files."""
    recipe = how.recipe.resolved(known, name).model_copy(update={"mark": None})
    of_file = recipe.in_files(how.columns)
    asked = (*(of_file.features or ()), of_file.client, of_file.session, of_file.time)
    cells = {
        one: [row.get(one) for row in rows] for one in asked if one is not None and one in known
    }
    if any(not isinstance(v, str | int | float | None) for of in cells.values() for v in of):
        raise DataError(f"{name} holds a value that is no number and no text")
    frame = importlib.import_module("pandas").DataFrame(cells, index=range(len(rows)))

    def read(columns: Columns) -> list[TableRows]:
        table = TableRows.of_frame(frame, name, recipe.in_files(columns), recipe)
        return [as_in_run(table, recipe)]

    (table,) = _marked(how, read)
    return read_rows(table, _unlabelled(how.columns, table.names, name), how, name)


def _set_aside(
    table: TableRows, columns: Columns
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], dict[int, str]]:
    """Tell which rows a model takes no number of, and whose time is unknown (n,); and why, by row.

    Where most cells of a column are texts, or no row is left, nothing is set aside: an error that
    names the first one says more.
    """
    strict = columns
    if columns.missing == "drop":  # each such row is told of
        strict = columns.model_copy(update={"missing": None})
    found, none = faults_of(table, strict), np.zeros(len(table.frame), dtype=bool)
    lost = found.get(columns.time or "", none)
    bad = np.any([*found.values(), none], axis=0)
    filled = {name: parsed(table, name, columns)[1] for name in columns.features or ()
              if name in found}  # fmt: skip
    of_texts = any(2 * (found[name] & filled[name]).sum() > len(none) for name in filled)
    of_times = any(table.frame[name].dtype.kind in "mM" for name in found if name != columns.time)
    if of_texts or of_times or bad.all():
        return none, none, {}
    why = dict[int, str]()
    for row in np.flatnonzero(bad).tolist():
        name, held = why_bad(table, found, row)
        is_empty = name in filled and not filled[name][row]
        why[row] = f"{printable(name)} {'is empty' if is_empty else held}"
    return bad, lost, why


def _marked(how: TableTransform, read: Callable[[Columns], list[TableRows]]) -> list[TableRows]:
    """Read rows; where their numbers do not tell their decimal mark, it is that of training."""
    if how.decimal is None or how.columns.decimal is not None:
        return read(how.columns)
    try:
        tables = read(how.columns)
    except DataError:
        tables = []
    if tables and not any(table.marks.unsure for table in tables):
        return tables
    return read(how.columns.model_copy(update={"decimal": how.decimal}))


def _check_length(rows: RecordingRows, columns: Columns, path: Path) -> None:
    """Raise DataError unless a recording is long enough for a window of the model."""
    length, longest = columns.window or 0, int(rows.start.max(initial=-1)) + 1
    if longest < length:
        pieces = int((rows.start == 0).sum())
        whose = "its longest stretch without a gap" if pieces > 1 else "it"
        count = "1 row" if longest == 1 else f"{longest} rows"
        at = f" at {columns.rate:g} a second" if columns.rate else ""
        raise DataError(
            f"{path} is too short: {whose} has {count}{at}, and a window of the model has {length}"
        )


def _unlabelled(columns: Columns, known: Sequence[str], path: Path) -> Columns:
    """Return the columns of a recording that nobody has labelled.

    Label, part and group say nothing of a new row. Clients, sessions and times keep rows of one
    recording together where the file has them, and a row that stands by itself needs none.

    Raises:
        DataError: there are no times, and rows are to be resampled.
    """
    if columns.rate is not None and columns.time not in known:
        raise DataError(
            f"{path} has no column {columns.time!r}: the model was trained on {columns.rate:g} "
            "rows per second, and needs times"
        )
    alone = columns.window is None and columns.rate is None and columns.missing != "interpolate"
    kept = {role: name for role in ("client", "session", "time")
            if not alone and (name := getattr(columns, role)) in known}  # fmt: skip
    update: dict[str, Any] = {role: kept.get(role) for role in ROLES}
    update |= dict.fromkeys(("label_from", "client_from", *OF_TARGETS))
    if "time" not in kept:
        update |= dict.fromkeys(("gap", "time_unit", "day_first", "date_formats"))
    return columns.model_copy(update=update)


def _checked(found: NewInputs, facts: ModelFacts) -> NewInputs:
    """Return inputs in the type that the model takes; raise DataError if they do not fit it."""
    path, x, shape = found.file, found.x, tuple(facts.input_shape)
    if x.dtype.kind not in "iuf":
        raise DataError(f"{path} holds {x.dtype}; expected numbers")
    if x.shape[1:] != shape:
        held = list(x.shape) if path.suffix in (ARRAYS, "") else list(x.shape[1:])
        raise DataError(f"{path} is {held}; the model takes {list(shape)}, or several")
    if not len(x):
        raise DataError(f"{path} holds no example")
    with np.errstate(over="ignore"):
        narrow = x.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise DataError(f"{path} holds values that are not finite in float32")
    if fault := facts.fault_of(torch.from_numpy(narrow)):
        raise DataError(f"{path} {fault}")
    kept = x.astype(np.float64) if facts.is_wide else narrow
    return replace(found, x=kept)
