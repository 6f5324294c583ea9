"""Data sets of the library ``datasets`` of Hugging Face, from a directory of ``save_to_disk``.

Nothing is downloaded: ``load_dataset("name").save_to_disk("DIR")`` once, where there is a network,
then ``[data] root = "DIR"``. ``[data.columns]`` names the label; one column of pictures or arrays
is the input, or several columns of numbers are. A table without test part is split as CSV files
are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import AT_ONCE, check_memory
from fedcli.data.image_files import PLAIN, first_set, stated
from fedcli.data.own.cells import check_columns
from fedcli.data.own.examples import coded, dataset_of
from fedcli.data.own.functions import as_array
from fedcli.data.own.recordings import PARTS, windowed
from fedcli.data.own.table_files import TableRows
from fedcli.data.own.tables import columns_of, made, read_rows
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.source import Source
from fedmodels.config.columns import Columns
from fedmodels.config.transforms import ImageTransform, image_transform
from fedmodels.errors import ConfigError, DataError, pip_line


def huggingface(source: Source) -> Dataset:
    """Load the data set in ``[data] root`` as ``[data.columns]`` describes it."""
    if source.data.root is None:
        raise DataError("huggingface: say where save_to_disk wrote it, [data] root = 'DIR'")
    root, columns = source.roots[0], columns_of(source.data)
    for key in ("client_from", "label_from"):
        if getattr(columns, key):
            raise ConfigError(f"[data.columns] {key} is for tables: name a column of {root}")
    parts = _read(root)
    for key in ("test_seed", "test_gap"):
        if "test" in parts and getattr(source.data, key) is not None:
            raise ConfigError(f"[data] {key}: {root} has a test part of its own; leave it out")
    for part, rows in parts.items():
        check_columns(rows.column_names, columns, f"{root} ({part})")
    inputs = _inputs_of(parts["train"], columns, root)
    if len(inputs) > 1 or _is_of_numbers(parts["train"], inputs[0]):
        if image_transform(source.data) != PLAIN:
            key = first_set(image_transform(source.data))
            raise ConfigError(f"[data] {key} is for pictures, and {root} has columns of numbers")
        return _of_numbers(parts, columns, source)
    return _of_arrays(parts, columns, inputs[0], source)


def _read(root: Path) -> dict[str, Any]:
    """Read the splits that a directory holds; one table without splits is ``train``."""
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise DataError(f"{root} needs the library datasets: {pip_line('huggingface')}") from None
    try:
        found = library.load_from_disk(str(root))
    except (OSError, ValueError) as error:
        raise DataError(f"{root} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict):
        return {"train": found}
    if "train" not in found:
        raise DataError(f"{root} has no split named train; it has: {', '.join(found)}")
    return {part: found[part] for part in PARTS if part in found}


def _inputs_of(rows: Any, columns: Columns, root: Path) -> list[str]:
    """Return the columns that make an input."""
    others = [name for name in rows.column_names if name not in columns.named]
    found = list(columns.features or others)
    if not found:
        raise DataError(f"{root} has no column besides the label: there is no input")
    return found


def _is_of_numbers(rows: Any, column: str) -> bool:
    """Tell whether each cell of a column is one number, and no picture or array."""
    feature = rows.features[column]
    numbers = ("int", "uint", "float", "decimal", "bool")
    return type(feature).__name__ == "Value" and feature.dtype.startswith(numbers)


def _of_arrays(parts: dict[str, Any], columns: Columns, feature: str, source: Source) -> Dataset:
    """Make a data set whose inputs are one column of pictures or arrays."""
    root, read = source.roots[0], parts.values()
    for key in ("window", "group", "session", "time"):
        if getattr(columns, key) is not None:
            why = f"is for columns of numbers, not {feature!r}"
            raise DataError(f"{root}: [data.columns] {key} {why}")
    for key in ("test_gap", "bad"):
        if getattr(source.data, key) is not None:
            raise ConfigError(f"[data] {key} is for columns of numbers, not {feature!r}")
    how = image_transform(source.data)
    x = _inputs((value for rows in read for value in rows[feature]), str(root), how)
    labels = np.concatenate([_labels(rows, columns) for rows in read])
    y, classes = coded(labels, _names(parts["train"], columns), f"{root}: column {columns.label!r}")
    owners, people = np.zeros(len(y), dtype=np.int64), list[str]()
    if columns.client is not None:
        clients = [str(value) for rows in read for value in rows[columns.client]]
        owners, people = coded(np.array(clients), None, str(root))
    groups = owners if columns.client else None
    is_picture = type(parts["train"].features[feature]).__name__ == "Image"
    every = Examples(x, y, groups, stated(how, x) if is_picture else None)
    if "test" in parts:
        test = np.arange(len(y)) >= len(parts["train"])
        train, held = every.at(~test), every.at(test)
    else:
        if source.earlier is not None:
            every = every.at(source.earlier.new(every.x))
        train, held = every.split(columns.test_share, source.data.test_seed, source.tasks)
    variant = f"{len(train.y)} train and {len(held.y)} test examples"
    return dataset_of("huggingface", train, held, classes, variant, people,
                      may_lack_tests=source.earlier is not None)  # fmt: skip


def _of_numbers(parts: dict[str, Any], columns: Columns, source: Source) -> Dataset:
    """Make a data set of columns of numbers, by rows or by windows."""
    root = source.roots[0]
    update: dict[str, Any] = {"classes": _names(parts["train"], columns)}
    if len(parts) > 1:
        update["split"] = "split"
    asked, tables = columns.model_copy(update=update), list[TableRows]()
    for part, rows in parts.items():
        frame = rows.to_pandas()
        frame[columns.label] = _labels(rows, columns)
        if len(parts) > 1:
            frame["split"] = part
        tables.append(TableRows.of_frame(frame, f"{root} ({part})", asked))
    rows, asked, _ = read_rows(tables, asked, root, source.data)
    rows = windowed(rows, asked, root)
    return made(rows, asked, source, "huggingface", f"{len(rows.label)} examples")


def _inputs(values: Iterable[Any], where: str, how: ImageTransform) -> NDArray[Any]:
    """Return the cells of a column as inputs (n, *input_shape)."""
    arrays = list[NDArray[Any]]()
    for index, value in enumerate(values):
        array = as_array(value, f"{where}: row {index + 1}", how)
        if index % AT_ONCE == 0:
            check_memory(
                (2 + index) * float(array.nbytes), f"{where}: inputs {array.shape}",
                "set resize to a smaller size",
            )  # fmt: skip
        arrays.append(array)
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise DataError(
                f"{where}: row {index + 1} is {array.dtype} {array.shape}, the first one "
                f"{arrays[0].dtype} {arrays[0].shape}; for pictures, [data] resize and channels "
                "make all alike"
            )
    return np.stack(arrays) if arrays else np.empty((0,), dtype=np.float32)


def _labels(rows: Any, columns: Columns) -> Any:
    """Return labels as texts (n,), by their names where the column knows them."""
    kind = rows.features[columns.label]
    values = rows[columns.label]
    if hasattr(kind, "int2str"):
        return np.array([kind.int2str(value) for value in values])
    return np.array([str(value) for value in values])


def _names(rows: Any, columns: Columns) -> tuple[str, ...] | None:
    """Return the classes that the config or the column names, in label order."""
    own: tuple[str, ...] | None = columns.classes
    names = getattr(rows.features[columns.label], "names", None)
    return own if own is not None or names is None else tuple(names)
