"""HDF5 files: what of them are tables, by h5py. No link is followed, and nothing is unpickled.

A table is a data set of records, a group of columns (data sets of one length, side by side), or a
data set of two axes, whose columns its attribute ``columns`` names. Else they are ``0``, ``1``, ….
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import check_memory
from fedcli.data.own.books import Part
from fedmodels.config.columns import Columns
from fedmodels.config.recipe import Recipe
from fedmodels.errors import DataError
from fedmodels.host.files import open_regular

NAMES = ("columns", "column_names", "names", "channels")
"""Attributes that may name the columns of a data set of two axes."""
MAX_COLUMNS = 10_000


@contextmanager
def opened(path: Path, columns: Columns, recipe: Recipe, since: Any) -> Iterator[list[Part]]:
    """Yield the tables of a file, by their path in it.

    Raises:
        DataError: a data set lies in another file.
    """
    h5py = importlib.import_module("h5py")
    with open_regular(path) as file, h5py.File(file, "r") as content:
        found: list[Any] = []
        content.visititems(lambda name, item: found.append(item))  # follows no soft or other link
        parts, sides = list[Part](), defaultdict[str, dict[str, Any]](dict)
        for item in found:
            if not isinstance(item, h5py.Dataset):
                continue
            if item.is_virtual or item.external:
                raise DataError(f"{path}: {item.name} is in another file, which is not followed")
            if item.dtype.names and item.ndim == 1:
                parts.append(_of_records(path, item))
            elif item.ndim == 1:
                sides[item.parent.name][item.name.rpartition("/")[2]] = item
            elif item.ndim == 2 and item.dtype.kind in "iuf" and item.shape[1] <= MAX_COLUMNS:
                parts.append(_of_matrix(path, item))
        for group, columns_of in sides.items():
            if len({len(item) for item in columns_of.values()}) == 1 and len(columns_of) > 1:
                parts.append(_of_columns(path, group, columns_of))
        yield sorted(parts, key=lambda part: part.name)


def _of_records(path: Path, item: Any) -> Part:
    names = [name for name in item.dtype.names if item.dtype[name].shape == ()]

    def read() -> tuple[Any, None]:
        _check(path, item)
        return _frame({name: _cells(path, item, name) for name in names}), None

    return Part(item.name.strip("/"), names, read)


def _of_columns(path: Path, group: str, columns: dict[str, Any]) -> Part:
    def read() -> tuple[Any, None]:
        for item in columns.values():
            _check(path, item)
        return _frame({name: _cells(path, item) for name, item in columns.items()}), None

    return Part(group.strip("/") or "/", list(columns), read)


def _of_matrix(path: Path, item: Any) -> Part:
    given = next((item.attrs[key] for key in NAMES if key in item.attrs), None)
    if given is not None and len(np.atleast_1d(given)) == item.shape[1]:
        names = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v)
                 for v in np.atleast_1d(given)]  # fmt: skip
    else:
        names = [str(at) for at in range(item.shape[1])]

    def read() -> tuple[Any, None]:
        _check(path, item)
        values = item[()]
        return _frame({name: values[:, at] for at, name in enumerate(names)}), None

    return Part(item.name.strip("/"), names, read)


def _check(path: Path, item: Any) -> None:
    """Check that a data set finds room in memory, however well it is packed."""
    size = float(item.size) * max(item.dtype.itemsize, 1)
    check_memory(3 * size, f"{path}: {item.name}", "export fewer rows")


def _cells(path: Path, item: Any, field: str | None = None) -> NDArray[Any]:
    """Return a column (n,) of numbers or of texts.

    Raises:
        DataError: it holds something else, such as pickled objects of Python.
    """
    h5py = importlib.import_module("h5py")
    kind = item.dtype if field is None else item.dtype[field]
    if kind.kind in "iufb":
        return np.asarray(item[()] if field is None else item[field])
    if h5py.check_string_dtype(kind) is None or h5py.check_ref_dtype(kind) is not None:
        raise DataError(
            f"{path}: {item.name}{'' if field is None else f', {field}'} holds {kind}, no numbers "
            "and no texts; objects of a program are not unpacked: export numbers and texts"
        )
    values = item[()] if field is None else item[field]
    return np.array(
        [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values],
        dtype=object,
    )


def _frame(columns: dict[str, NDArray[Any]]) -> Any:
    return importlib.import_module("pandas").DataFrame(columns)
