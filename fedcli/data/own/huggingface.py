"""Data sets of the library ``datasets`` of Hugging Face, from a directory of ``save_to_disk``.

Nothing is downloaded: ``load_dataset("name").save_to_disk("DIR")`` once, where there is a network,
then ``[data] root = "DIR"``. ``[data.columns]`` names the label; one column of pictures or arrays
is the input, or several columns of numbers are. A table without test part is split as CSV files
are.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from fedcli.data.own.cells import check_columns
from fedcli.data.own.examples import Examples, coded, dataset_of
from fedcli.data.own.functions import as_array
from fedcli.data.own.table_files import Table, numbered_row
from fedcli.data.own.tables import PARTS, joined, made, windowed
from fedcli.data.sets.dataset import Dataset, Inputs, Source
from fedmodels.config.data import Columns
from fedmodels.errors import DataError

EXTRA = "install the extra: pip install 'fedtide[huggingface]'"


def huggingface(source: Source) -> Dataset:
    """Load the data set in ``[data] root`` as ``[data.columns]`` describes it."""
    if source.data.root is None:
        raise DataError("huggingface: say where save_to_disk wrote it, [data] root = 'DIR'")
    root, columns = source.roots[0], source.data.columns or Columns()
    parts = _read(root)
    for part, rows in parts.items():
        check_columns(rows.column_names, columns, f"{root} ({part})")
    inputs = _inputs_of(parts["train"], columns, root)
    if len(inputs) > 1 or _is_of_numbers(parts["train"], inputs[0]):
        return _of_numbers(parts, columns, root)
    if "test" not in parts:
        raise DataError(
            f"{root} has no split named test: make one with train_test_split before save_to_disk"
        )
    return _of_arrays(parts, columns, inputs[0], root)


def _read(root: Path) -> dict[str, Any]:
    """Read the splits that a directory holds; one table without splits is ``train``."""
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise DataError(f"{root} needs the library datasets; {EXTRA}") from None
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
    named = (columns.label, columns.client, columns.split)
    found = list(columns.features or [c for c in rows.column_names if c not in named])
    if not found:
        raise DataError(f"{root} has no column beside the label: there is no input")
    return found


def _is_of_numbers(rows: Any, column: str) -> bool:
    """Tell whether each cell of a column is one number, and no picture or array."""
    feature = rows.features[column]
    numbers = ("int", "uint", "float", "decimal", "bool")
    return type(feature).__name__ == "Value" and feature.dtype.startswith(numbers)


def _of_arrays(parts: dict[str, Any], columns: Columns, feature: str, root: Path) -> Dataset:
    """Make a data set whose inputs are one column of pictures or arrays."""
    if columns.window is not None:
        raise DataError(f"{root}: [data.columns] window is for columns of numbers, not {feature!r}")
    read = {part: _examples(rows, columns, feature, f"{root} ({part})")
            for part, rows in parts.items()}  # fmt: skip
    labels = {part: _labels(rows, columns) for part, rows in parts.items()}
    every = np.concatenate([labels[part] for part in PARTS])
    y, classes = coded(every, _names(parts["train"], columns), f"{root}: column {columns.label!r}")
    size, people = len(labels["train"]), list[str]()
    owners: list[Any] = [None, None]
    if columns.client is not None:
        clients = [np.array([str(v) for v in parts[part][columns.client]]) for part in PARTS]
        groups, people = coded(np.concatenate(clients), None, str(root))
        owners = [groups[:size], groups[size:]]
    train = Examples(read["train"], y[:size], owners[0])
    test = Examples(read["test"], y[size:], owners[1])
    variant = f"{len(train.y)} train and {len(test.y)} test examples"
    return dataset_of("huggingface", train, test, classes, variant, people)


def _of_numbers(parts: dict[str, Any], columns: Columns, root: Path) -> Dataset:
    """Make a data set of columns of numbers, by rows or by windows."""
    update: dict[str, Any] = {"classes": _names(parts["train"], columns)}
    if len(parts) > 1:
        update["split"] = "split"
    asked, tables = columns.model_copy(update=update), list[Table]()
    for part, rows in parts.items():
        frame = rows.to_pandas()
        frame[columns.label] = _labels(rows, columns)
        if len(parts) > 1:
            frame["split"] = part
        tables.append(Table(frame, f"{root} ({part})", numbered_row))
    rows, asked = joined(tables, asked)
    if columns.window is not None:
        rows = windowed(rows, columns.window, columns.hop or columns.window, root)
    return made(rows, asked, "huggingface", str(root), f"{len(rows.label)} examples")


def _examples(rows: Any, columns: Columns, feature: str, where: str) -> Inputs:
    """Return the inputs of a column (n, *input_shape)."""
    arrays = [as_array(v, f"{where}: row {i + 1}") for i, v in enumerate(rows[feature])]
    for index, array in enumerate(arrays):
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise DataError(
                f"{where}: row {index + 1} is {array.dtype} {array.shape}, the first one "
                f"{arrays[0].dtype} {arrays[0].shape}"
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
