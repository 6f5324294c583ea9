"""CSV and parquet files: each row an example, or windows of rows as sensors give them.

    [data]                                  [data.columns]
    name = "table"                          label = "activity"
    root = "recordings"                     features = ["ax", "ay", "az"]
                                            client = "person"
                                            window = 128

``root`` is a file, or a directory whose files ``*.csv``, ``*.tsv`` and ``*.parquet`` are read in
the order of their names. A window never crosses the border of two files, sessions, clients, classes
or parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.archives import Archives, archives
from fedcli.data.arrays import IntArray, channel_moments
from fedcli.data.cuts.held_out import FEW, held_out, near_tests, tasks_by_value, tasks_in_order
from fedcli.data.folders import OF_TEXT, ending, note_left_out
from fedcli.data.own.bad_rows import refuse, set_rows_aside
from fedcli.data.own.cells import check_columns, features_of
from fedcli.data.own.examples import coded, dataset_of
from fedcli.data.own.recordings import PARTS, Mended, RecordingRows, joined, rows_of, told, windowed
from fedcli.data.own.table_files import (
    OTHER_TABLES,
    TableRows,
    files_of,
    read_tables,
    tell_styles,
)
from fedcli.data.set_aside import SetAside
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.source import Source
from fedmodels.config.columns import Columns, Decimal
from fedmodels.config.data import Data
from fedmodels.config.recipe import NAME, READING, Recipe
from fedmodels.config.transforms import TableTransform
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError

MANY = 20
"""Classes beyond which labels are looked at twice."""
MAX_LETTERS, MAX_LINE = 40, 600
"""Letters of a column's name in a note, and of a list of tasks, at most."""
SHOWN = 12
"""Clients whose tasks a note lists, and tasks of each."""
Names = dict[str, tuple[str, tuple[TableRows, int]]]
"""By a name without the spaces around it: the name as it was first met, and its file and row."""
log = logging.getLogger(__name__)


class NothingNew(DataError):
    """All rows of a source with a mark were read before."""


def table(source: Source) -> Dataset:
    """Load the tables in ``[data] root`` as ``[data.columns]`` describes them."""
    if source.data.root is None:
        raise DataError("table: say where the files lie, [data] root = 'recordings.csv'")
    root, columns = source.roots[0], source.recipe.over(columns_of(source.data))
    with archives() as packed:
        return _table(source, root, columns, packed)


def _table(source: Source, root: Path, columns: Columns, packed: Archives) -> Dataset:
    files = files_of(root, packed)
    if root.is_dir() and not any(ending(path) == ".sql" for path in files):
        note_left_out(root, [*map(packed.holding, files), root / NAME], OTHER_TABLES)
    for key in ("delimiter", "encoding"):
        if getattr(columns, key) and not any(ending(path) in OF_TEXT for path in files):
            raise ConfigError(f"[data.columns] {key} is for CSV, and {root} has none: leave it out")
    broken = SetAside.of(source.data, "files")
    marks, old = list[Any](), list[int]()
    read = _readable(source, files, columns, broken, packed, marks, old)
    try:
        rows, columns, decimal = read_rows(read, columns, root, source.data)
    except DataError:
        if source.since is None or marks or broken.count:
            raise
        raise NothingNew(f"{root}: nothing is beyond the last mark, {source.since}") from None
    if old:
        log.warning("note: %s: %d rows that are not beyond the last mark, %s, are left out", root,
                    sum(old), source.since)  # fmt: skip
    rows = windowed(rows, columns, root)
    mark = max(marks, default=source.since)
    return made(rows, columns, source, "table", f"{len(files)} files", decimal, mark)


def _readable(
    source: Source,
    files: Sequence[Path],
    columns: Columns,
    broken: SetAside,
    packed: Archives,
    marks: list[Any],
    old: list[int],
) -> Iterator[TableRows]:
    """Yield the tables of these files; those that cannot be read are refused, or set aside.

    The last mark of each goes to ``marks``, and the number of its rows that are not new to ``old``.
    """
    for path in files:
        broken.total += 1
        try:
            tables = read_tables(path, columns, source.recipe, since=source.since)
            for table in tables:
                if broken.skips and not table.frame.empty:  # a page called .csv lacks the columns
                    check_columns(table.names, columns, path, table.recipe, table.apart)
        except DataError as error:
            broken.add(str(error), error=error)
            continue
        for table in (table.within(packed) for table in tables):
            marks += [] if table.mark is None else [table.mark]
            old += [table.old] if table.old else []
            yield table
    broken.settle(source.roots[0])


def columns_of(data: Data) -> Columns:
    """Return what the columns are; keys of ``[data]`` go before those of the columns."""
    columns, keys = data.columns or Columns(), ("test_share", "classes")
    given = {key: getattr(data, key) for key in keys if getattr(data, key) is not None}
    return columns.model_copy(update=given)


def made(
    rows: RecordingRows,
    columns: Columns,
    source: Source,
    name: str,
    variant: str,
    decimal: Decimal | None = None,
    mark: float | int | str | None = None,
) -> Dataset:
    """Split rows into the training and the test part, and make a data set.

    Raises:
        DataError: a class is unknown, or a part is empty; says why, where that is known.
    """
    where = str(source.roots[0])
    if source.data.cuts_tasks:
        rows = rows.at(np.argsort(rows.date, kind="stable"))  # over all files
    if columns.targets:
        y, classes = np.zeros(len(rows.x), dtype=np.int64), list(columns.outputs)
    else:
        y, classes = coded(rows.label, columns.classes, f"{where}: column {columns.label!r}")
    owners, people = coded(rows.client, None, f"{where}: column {columns.client!r}")
    wholes: IntArray | None = None
    groups = list[str]()
    if columns.group is not None:
        wholes, groups = coded(rows.group, None, f"{where}: column {columns.group!r}")
    earlier, is_left = source.earlier, False
    if earlier is not None and earlier.fill is not None:
        rows = replace(rows, x=_filled_with(rows.x, earlier.fill, columns, where))
    if earlier is not None and columns.split is None:
        new = earlier.new(rows.x, wholes, groups)
        is_left = bool(groups) or not new.all()
        rows, y, owners = rows.at(new), y[new], owners[new]
        wholes = None if wholes is None else wholes[new]
    tasks = tasks_of(rows.task, owners, people, source, wholes)
    if columns.split is not None:
        train, test = (rows.part == part for part in PARTS)
    else:
        put = None if earlier is None else earlier.put(groups)
        test = held_out(owners, tasks, y, columns.test_share, wholes, source.data.test_seed, put)
        reach = (columns.window or 1) + (columns.horizon or 0) + (source.data.test_gap or 0)
        near = near_tests(owners, rows.place, test, reach) if wholes is None else False
        train = ~test & ~np.asarray(near)
    _check_parts(train, test, columns, len(classes), where, is_left=is_left)
    known = train if columns.split is not None else train & (tasks == 0)
    whose = " of first tasks, which missing = 'mean' looks at" if tasks.any() else ""
    x, fill = _filled(rows.x, known, columns, where, whose)
    fill = earlier.fill if earlier is not None and earlier.fill is not None else fill
    has_clients = bool(columns.client or columns.client_from)
    asked = columns_of(source.data)  # what the recipe says instead stays in the recipe
    of_run = columns.model_copy(update={key: getattr(asked, key) for key in READING})
    if columns.target and columns.target_mean is None:
        mean, std = channel_moments(rows.target[known], 1.0)
        of_run = of_run.model_copy(update={"target_mean": mean, "target_std": std})
    transform = TableTransform(
        columns=of_run, fill=fill, decimal=decimal, recipe=source.recipe, mark=mark
    ).facts()
    if wholes is None and columns.session is not None:  # for whoever asks what depends on what
        _, sessions = np.unique(rows.session, return_inverse=True)
        wholes = sessions.reshape(-1).astype(np.int64) + rows.recording * (int(sessions.max()) + 1)
    learned = rows.target if columns.targets else y
    parts = [
        Examples(
            x[chosen], learned[chosen], owners[chosen] if has_clients else None, transform,
            None if wholes is None else wholes[chosen],
            tasks[chosen] if columns.split is None else None,
        )
        for chosen in (train, test)
    ]  # fmt: skip
    return dataset_of(
        name, parts[0], parts[1], classes, variant, people if has_clients else (),
        overlapping=columns.window is not None and (columns.hop or columns.window) < columns.window,
        columns=columns.channels, levels=columns.are_levels, whole_names=groups,
        may_lack_tests=is_left,
    )  # fmt: skip


def tasks_of(
    values: NDArray[np.str_],
    owners: IntArray,
    people: Sequence[str],
    source: Source,
    wholes: IntArray | None,
) -> IntArray:
    """Return the task of each example (n,), which stand in the order of time.

    Say in a line what the tasks are, where the data say it.

    Args:
        values: (n,) what says it, such as the month of an example.
        owners: (n,) natural client of each.
        people: names of the natural clients.
        source: what a task is.
        wholes: (n,) groups that stay whole in tasks of equal size. Those that the data say, such
            as months, may have one group several times, which is in one part of all of them.
    """
    if not source.data.cuts_tasks:
        return tasks_in_order(owners, source.tasks, wholes)
    if source.whose == "task":
        return np.zeros_like(owners)
    whose = np.zeros_like(owners) if source.whose == "site" else owners
    tasks, named = tasks_by_value(whose, values)
    if wholes is not None:
        _tell_returning(whose, tasks, wholes, source)
    for owner, found in list(named.items())[:SHOWN]:
        first = "; ".join(f"{name}: {size}" for name, size in found[:SHOWN])
        if " and " in first:
            first += f"; parts with fewer than {FEW} examples are merged into a neighbour"
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        who = f" of {printable(people[owner], MAX_LETTERS)}" if len(named) > 1 else ""
        log.warning("note: %s: %d tasks%s, and their examples: %s%s", source.roots[0], len(found),
                    who, printable(first, MAX_LINE), more)  # fmt: skip
    if len({tuple(name for name, _ in found) for found in named.values()}) > 1:
        log.warning("note: %s: natural clients have tasks of other names; a client's first one is "
                    "its task 0, whatever others have", source.roots[0])  # fmt: skip
    return tasks


def _tell_returning(owners: IntArray, tasks: IntArray, wholes: IntArray, source: Source) -> None:
    """Say how many groups of natural clients come again in a later task."""
    pairs = np.unique(np.column_stack([owners, wholes, tasks]), axis=0)[:, :2]
    if count := int((np.unique(pairs, axis=0, return_counts=True)[1] > 1).sum()):
        log.warning(
            "note: %s: %d groups are in several tasks: each is for training in all of them, or "
            "for testing in all of them, as in its first one", source.roots[0], count,
        )  # fmt: skip


def _check_labels(labels: NDArray[np.str_], columns: Columns, where: object) -> None:
    """Check that a column of labels (n,) names classes: it is no number that varies, and no id.

    Raises:
        DataError: says what the column holds, and what to do.
    """
    found = np.unique(labels)
    if columns.targets or columns.classes is not None or len(found) <= MANY:
        return
    holds = f"{where}: column {columns.label!r} of labels holds {len(found)} different"
    if _are_fractions(found):
        raise DataError(
            f"{holds} numbers with decimals in {len(labels)} rows, which is a continuous target; "
            "classes are learnt here: put ranges of it in their place, such as low and high, or "
            "name another column in [data.columns] label"
        )
    if 2 * len(found) > len(labels):
        raise DataError(
            f"{holds} values in {len(labels)} rows, so most classes have one example: name the "
            "column of labels in [data.columns] label"
        )


def _are_fractions(names: NDArray[np.str_]) -> bool:
    """Tell whether names (n,) are finite numbers, some of which are no whole ones."""
    try:
        numbers = names.astype(np.float64)
    except ValueError:
        return False
    return bool(np.isfinite(numbers).all() and (numbers % 1 != 0).any())


def _filled(
    x: NDArray[np.float64], train: NDArray[np.bool_], columns: Columns, where: str, whose: str
) -> tuple[NDArray[np.float64], tuple[float, ...] | None]:
    """Return inputs whose empty cells hold the mean of some training rows, and these means.

    Those are the training rows (n,) of first tasks, as later ones are not there yet.

    Raises:
        DataError: a column has no number in these rows.
    """
    if columns.missing != "mean":
        return x, None
    axes = tuple(range(x.ndim - 1))
    known = ~np.isnan(x[train])
    counts = known.sum(axis=axes)
    if not counts.all():
        empty = columns.channels[int(counts.argmin())]
        raise DataError(
            f"{where}: column {empty!r} is empty in all training rows{whose}: leave it out of "
            "features"
        )
    means = np.nansum(x[train], axis=axes) / counts
    filled = int(np.isnan(x).sum())
    _tell_mended(where, Mended(filled=filled), columns)
    return np.where(np.isnan(x), means, x), tuple(means.tolist())


def _filled_with(
    x: NDArray[np.float64], fill: Sequence[float], columns: Columns, where: str
) -> NDArray[np.float64]:
    """Return inputs whose empty cells hold what those of the first task held."""
    empty = np.isnan(x)
    _tell_mended(where, Mended(filled=int(empty.sum())), columns)
    return np.where(empty, np.array(fill), x)


def _check_parts(
    train: NDArray[np.bool_],
    test: NDArray[np.bool_],
    columns: Columns,
    classes: int,
    where: str,
    *,
    is_left: bool,
) -> None:
    """Raise DataError unless both parts, as told of each example (n,), hold one; says why.

    What ``is_left`` of a further task, or is of groups that are put already, may have no test
    example.
    """
    if train.any() and (test.any() or is_left):
        return
    if is_left and columns.group is not None:
        raise DataError(
            f"{where} holds nothing new to train on: all {len(test)} new examples are of values of "
            f"column {columns.group!r} that are for testing in earlier tasks"
        )
    part = "training" if not train.any() else "test"
    if columns.split is not None:
        why = f"column {columns.split!r} must say {PARTS[part == 'test']} of some row"
    elif columns.group is not None:
        why = f"that takes a client with two values of column {columns.group!r}"
    elif part == "training":
        why = "all windows overlap with one for testing: give more rows, or a longer hop"
    elif columns.targets:
        why = "that takes a client with two examples: give more rows"
    elif classes == len(test):
        why = f"every class has one example: is {columns.label!r} the column of labels?"
    else:
        why = "that takes a client with two examples of a class: give more rows"
    raise DataError(f"{where}: there is no {part} example; {why}")


def read_rows(
    tables: Iterable[TableRows], columns: Columns, where: object, data: Data
) -> tuple[RecordingRows, Columns, Decimal | None]:
    """Put the rows of several files together; a stretch stays within its file.

    Also return the columns with the features that were found, and the decimal mark of the files,
    where they have one; say in a line which columns these are. Unless ``columns`` says which
    columns a net sees, the first file does. ``data`` says what a task of a client is, and
    what becomes of bad rows.

    Raises:
        DataError: no file has a row; files differ in their columns of numbers; names of classes or
            clients differ in spaces alone; or the labels are no classes.
    """
    found, asked, empty = list[RecordingRows](), columns, list[object]()
    seen, mended, read = (Names(), Names()), Mended(), list[TableRows]()
    left, count = dict[str, None](), 0
    aside = SetAside.of(data, "rows")
    for table in tables:
        if not len(table.frame):
            empty.append(table.where)
            continue
        check_columns(table.names, columns, table.where, table.recipe, table.apart)
        if not columns.features:
            try:
                features, others = features_of(table, columns, skips=aside.skips)
            except DataError as error:
                _refuse_without_features(table, columns, aside, error)
                continue
            if asked.features:
                _check_same(asked.features, features, table.where)
            else:
                asked = columns.model_copy(update={"features": features})
                _tell_columns(features, others, table.where)
        used = {*asked.named, *(asked.features or ())}
        left |= dict.fromkeys(name for name in table.names if name not in used)
        table, bad = set_rows_aside(table, asked, aside)
        if bad.all():
            empty.append(table.where)
            continue
        count += int((~bad).sum())
        try:
            each, done = rows_of(table, asked, data.tasks, bad if aside.skips else None)
        except DataError as error:
            refuse(table, asked, aside, error)
            continue
        for names, column, known in zip(
            (each.label, each.client), (columns.label, columns.client), seen, strict=True
        ):
            _check_spaces(names, each.first, column, table, known)
        found.append(each)
        mended.update(done)
        read.append(replace(table, frame=None))  # the rows may take much memory
    aside.settle(where)
    if not found:
        raise DataError(f"{[*empty, where][0]} holds no row below the names of its columns")
    if columns.features:
        _tell_asked(asked, read[0].recipe, left, f"{where}: {count} rows of {len(read)} files")
    rows = joined(found)
    _check_labels(rows.label, columns, where)
    tell_styles(read, where)
    _tell_mended(where, mended, columns)
    marks = {table.marks.decimal for table in read if not table.marks.unsure}
    return rows, asked, marks.pop() if len(marks) == 1 else None


def _refuse_without_features(
    table: TableRows, columns: Columns, aside: SetAside, error: DataError
) -> None:
    """Note the bad rows of a table whose columns of numbers the file itself has to tell.

    Raises:
        DataError: no row is bad: the error is of something else.
    """
    try:
        features, _ = features_of(table, columns, skips=True)
    except DataError:
        raise error from None
    refuse(table, columns.model_copy(update={"features": features}), aside, error)


def _tell_mended(where: object, mended: Mapping[str, int], columns: Columns) -> None:
    for line in told(mended, columns):
        log.warning("note: %s: %s", where, line)


def _tell_columns(features: Sequence[str], others: Mapping[str, str], where: object) -> None:
    """Say which columns a net sees, and why it sees no others."""
    used = ", ".join(printable(name, MAX_LETTERS) for name in features)
    left = ", ".join(f"{printable(name, MAX_LETTERS)} ({why})" for name, why in others.items())
    log.warning("note: %s: an example has the columns %s%s", where, used,
                f"; left out: {left}" if left else "")  # fmt: skip


def _tell_asked(columns: Columns, recipe: Recipe, left: Iterable[str], what: str) -> None:
    """Say which columns a net sees by the config, what the site calls them, and what is left."""
    used, out = (_listed_in(names, recipe) for names in (columns.features or (), left))
    log.info("%s: an example has the columns %s%s", what, used, f"; left out: {out}" if out else "")


def _listed_in(names: Iterable[str], recipe: Recipe) -> str:
    return ", ".join(
        printable(name, MAX_LETTERS)
        + (f" (here {own!r})" if (own := recipe.called(name)) != name else "")
        for name in names
    )


def _check_same(first: tuple[str, ...], found: tuple[str, ...], where: object) -> None:
    """Check that a file has the columns of numbers of the first one, in whatever order."""
    for name in (*first, *found):
        if name not in found or name not in first:
            has = "no" if name in first else "a"
            raise DataError(
                f"{where} has {has} column of numbers {name!r}, unlike the first file: name the "
                "columns in [data.columns] features"
            )


def _check_spaces(
    values: NDArray[np.str_],
    places: NDArray[np.int64],
    column: str | None,
    table: TableRows,
    seen: Names,
) -> None:
    """Check that no two names of a column differ in the spaces around them alone.

    ``values`` (n,) stand in these rows of the file; ``seen`` has those of earlier files, and gets
    these.
    """
    found, first = np.unique(values, return_index=True)
    for at, name in sorted(zip(places[first].tolist(), found.tolist(), strict=True)):
        like, place = seen.setdefault(name.strip(), (name, (table, at)))
        if like != name:
            before = f"{place[0].at(place[1])} of {place[0].where}"
            raise DataError(
                f"{table.where}: column {column!r} holds {name!r} in {table.at(at)} and {like!r} "
                f"in {before}, which differ in spaces alone: write equal names alike"
            )
