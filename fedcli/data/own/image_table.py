"""Images that lie together, and a table beside them that says what each one is.

    root/metadata.csv       image, diagnosis, patient, site, date        [data]
    root/images/0001.jpg …                                               name = "directory"
                                                                         [data.columns]
                                                                         file = "image"
                                                                         label = "diagnosis"

A cell of the column ``file`` is a path below ``root``, or the name of one image below it, with or
without its ending.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedcli.data.arrays import IntArray
from fedcli.data.class_folders import read_images
from fedcli.data.folders import TABLE_ENDS, ending, files_below, note_left_out
from fedcli.data.image_files import OTHERS, Pixels, is_image, stated
from fedcli.data.own.bad_rows import set_rows_aside, tell_rows
from fedcli.data.own.cells import check_columns, labels_of, texts_of
from fedcli.data.own.examples import coded, dataset_of
from fedcli.data.own.recordings import PARTS
from fedcli.data.own.table_files import TableRows, read_table
from fedcli.data.own.tables import columns_of, tasks_of
from fedcli.data.own.times import calendar, times_of
from fedcli.data.set_aside import SetAside
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.source import Source
from fedmodels.config.columns import Columns
from fedmodels.config.data import TasksBy
from fedmodels.config.recipe import NAME
from fedmodels.config.transforms import ImageTransform, image_transform
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError
from fedmodels.facts.class_names import composed
from fedmodels.host.files import check_inside

Known = Mapping[str, Sequence[Path]]
"""The images below a directory, by what a cell may call them."""


def image_table(source: Source) -> Dataset:
    """Load the images below ``[data] root`` that its table names.

    Raises:
        ConfigError: a key of ``[data.columns]`` is for tables without images.
        DataError: there is no table or there are several, or a row is wrong; names the row.
    """
    root, columns = source.roots[0], source.recipe.over(columns_of(source.data))
    _check_keys(columns)
    if source.recipe.mark is not None:
        raise ConfigError("the recipe has mark, which is for tables of numbers; file names images")
    if source.data.tasks == "session":
        raise ConfigError("[data] tasks = 'session' is for tables of numbers; file names images")
    place = _table_in(root)
    table = read_table(place, columns, source.recipe)
    check_columns(table.names, columns, place, table.recipe, table.apart)
    if table.frame.empty:
        raise DataError(f"{place} holds no row below the names of its columns")
    known, aside = _images_below(root), SetAside.of(source.data, "rows")
    table, bad = set_rows_aside(table, columns, aside)
    table = _with_images(table, columns, known, bad, aside)
    aside.settle(place)
    try:
        label = labels_of(table, columns)
        client, group, part = (
            texts_of(table, name) for name in (columns.client, columns.group, columns.split)
        )
        images = _images_of(table, columns, root, known, aside.hint)
        order, task = _order(table, columns, client, source.data.tasks)
    except DataError as error:
        raise _of_all(error, table, columns, known, aside) from None
    y, classes = coded(label, columns.classes, f"{place}: column {columns.label!r}")
    owners, people = coded(client, None, f"{place}: column {columns.client!r}")
    wholes, groups = coded(group, None, f"{place}: column {columns.group!r}")
    groups = groups if columns.group else []
    listed = [*zip(images, y.tolist(), strict=True)]
    note_left_out(root, {place, root / NAME, *(path for path, _ in listed)}, OTHERS)
    files = Examples(
        np.arange(len(order), dtype=np.float64), y[order],
        groups=owners[order] if columns.client else None,
        wholes=wholes[order] if columns.group else None,
    )  # fmt: skip
    x, _, places = read_images(
        [listed[row] for row in order],
        image_transform(source.data),
        SetAside.of(source.data, "images"),
    )
    earlier = source.earlier if columns.split is None else None
    if earlier is not None:
        whose = None if files.wholes is None else files.wholes[places]
        new = earlier.new(x, whose, groups)
        x, places = x[new], places[new]
        files = files.at(np.isin(files.x, places))
    if source.data.cuts_tasks:
        of = order[files.x.astype(np.int64)]
        tasks = tasks_of(task[of], owners[of], people, source, files.wholes)
        files = replace(files, tasks=tasks)
    if columns.split is None:
        put = None if earlier is None else earlier.put(groups)
        drawn = source.data.test_seed
        parts = [*files.split(columns.test_share, drawn, source.tasks, put)]
    else:
        parts = [files.at(part[order] == name) for name in PARTS]
    how = image_transform(source.data).model_copy(update={"recipe": source.recipe})
    train, test = (_frames_of(part, x, places, how) for part in parts)
    variant = f"{len(train.y)} train and {len(test.y)} test examples"
    return dataset_of("directory", train, test, classes, variant, people if columns.client else (),
                      whole_names=groups, may_lack_tests=earlier is not None)  # fmt: skip


def _frames_of(files: Examples, x: Pixels, places: IntArray, how: ImageTransform) -> Examples:
    """Return the images of some files: all frames of a file are of its part.

    Args:
        files: their places, ascending, in place of inputs.
        x: (n, C, H, W) images of all files.
        places: (n,) of which file an image is.
        how: how the files were read.
    """
    mine = np.isin(places, files.x)
    found = files.at(np.searchsorted(files.x, places[mine]))
    return replace(found, x=x[mine], transform=stated(how, x))


def _check_keys(columns: Columns) -> None:
    """Raise ConfigError if a key says how numbers of rows become examples."""
    for key in ("features", "window", "hop", "session", "gap", "rate", "missing", "missing_values",
                "client_from", "label_from", "decimal", "categories"):  # fmt: skip
        if getattr(columns, key) is not None:
            raise ConfigError(f"[data.columns] {key} is for tables of numbers; file names images")


def _table_in(root: Path) -> Path:
    """Return the one table in a directory."""
    if not root.is_dir():
        raise DataError(f"{root} is not a directory: [data] root must hold the images and a table")
    found = [path for path in files_below(root) if ending(path) in TABLE_ENDS]
    if len(found) != 1:
        names = ", ".join(printable(str(path.relative_to(root)), 60) for path in found[:5])
        held = f"{len(found)} tables ({names})" if found else "no table *.csv, *.tsv or *.parquet"
        raise DataError(f"{root} holds {held}; one must say which image is what")
    return found[0]


def _with_images(
    table: TableRows, columns: Columns, known: Known, bad: np.ndarray, aside: SetAside
) -> TableRows:
    """Return a table without its bad rows; where these are set aside, without missing images."""
    if not aside.skips:
        return table
    bad |= _missing(table, columns, known, bad, aside)
    return table.kept(~bad)


def _missing(
    table: TableRows, columns: Columns, known: Known, bad: np.ndarray, aside: SetAside
) -> np.ndarray:
    """Note the rows (n,) that are not bad, and name no image, or one of several."""
    found = np.zeros_like(bad)
    for row, name in enumerate(texts_of(table, columns.file, bad=bad).tolist()):
        if not bad[row] and len(known.get(composed(name.removeprefix("./")), ())) != 1:
            found[row] = True
            aside.add(f"{table.name}, {table.at(row)}: no one image is called {name!r}")
    return found


def _of_all(
    error: DataError, table: TableRows, columns: Columns, known: Known, aside: SetAside
) -> DataError:
    """Return an error that names all rows that are bad; itself where none or one is."""
    if aside.skips:
        return error
    aside.first = error
    bad, lost = tell_rows(table, columns, aside)
    _missing(table, columns, known, bad | lost, aside)
    try:
        aside.settle(table.where)
    except DataError as whole:
        return whole
    return error


def _images_of(
    table: TableRows, columns: Columns, root: Path, known: Known, hint: str
) -> list[Path]:
    """Return the image of each row.

    Raises:
        DataError: an image is missing, named twice, or one of several that are called alike.
    """
    images, seen = list[Path](), dict[Path, int]()
    for row, name in enumerate(texts_of(table, columns.file).tolist()):
        where = f"{table.where}: column {columns.file!r} holds {printable(name, 100)!r} in "
        found = known.get(composed(name.removeprefix("./")), ())
        if len(found) != 1:
            why = f"there is no image of this name{hint}" if not found else (
                f"both {found[0].relative_to(root)} and {found[1].relative_to(root)} are called "
                "so: write the path"
            )  # fmt: skip
            raise DataError(f"{where}{table.at(row)}: {why}")
        if found[0] in seen:
            raise DataError(f"{where}{table.at(row)}, and so does {table.at(seen[found[0]])}")
        seen[found[0]] = row
        check_inside(found[0], root)
        images.append(found[0])
    return images


def _images_below(root: Path) -> Known:
    """Return the images below a directory by path, by name and by name without its ending."""
    found = defaultdict[str, list[Path]](list)
    for path in files_below(root):
        if is_image(path):
            for name in {path.relative_to(root).as_posix(), path.name, path.stem}:
                found[composed(name)].append(path)
    return found


def _order(
    table: TableRows, columns: Columns, client: np.ndarray, tasks: TasksBy | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of rows, by time or as they stand in the file, and what tells their tasks.

    That is (n,) in the order of the file: a month or the like, or a cell of the column ``task``.
    """
    task = texts_of(table, columns.task)
    if columns.time is None:
        return np.arange(len(table.frame)), task
    times = times_of(table, columns, (client,))
    if tasks is None or tasks == "session":
        return np.argsort(times.seconds, kind="stable"), task
    task, points = calendar(times, tasks, table, columns)
    return np.argsort(points, kind="stable"), task
