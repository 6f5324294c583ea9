"""Examples that a user's files or code gave, and the data set that they make."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import IntArray, channel_moments, narrowed
from fedcli.data.sets.dataset import Dataset, Examples
from fedmodels.errors import DataError, suggestion
from fedmodels.facts.class_names import composed
from fedmodels.facts.data_description import SCALES

log = logging.getLogger(__name__)
SHOWN = 20
"""Names that an error line lists."""
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?")
"""A name that is a number."""


def dataset_of(
    name: str,
    train: Examples,
    test: Examples,
    class_names: Sequence[str],
    variant: str,
    group_names: Sequence[str] = (),
    *,
    overlapping: bool = False,
    columns: Sequence[str] = (),
    levels: Sequence[bool] = (),
    whole_names: Sequence[str] = (),
    may_lack_tests: bool = False,
) -> Dataset:
    """Make a data set; inputs are normalised per channel by the moments of the training part.

    Numbers of float64 are narrowed where nothing is lost.

    ``whole_names`` are those of groups. A further task ``may_lack_tests``, as all that is new of it
    may be for training.

    Raises:
        DataError: a part is empty, or its inputs differ in shape or type from the other's.
    """
    for part, examples in (("training", train), ("test", test)):
        if not len(examples.y) and not (may_lack_tests and examples is test):
            raise DataError(f"{name}: there is no {part} example")
    if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
        raise DataError(
            f"{name}: training inputs are {train.x.dtype} {train.x.shape[1:]}, "
            f"test inputs {test.x.dtype} {test.x.shape[1:]}"
        )
    shape = train.x.shape[1:]
    if len(shape) == 3 and shape[2] == 3 and shape[0] not in (1, 3):
        log.warning(
            "note: %s: inputs %s are read as (C, H, W), %d channels of %d x %d; pictures with "
            "channels last must be turned: x.permute(2, 0, 1)",
            name, tuple(shape), *shape,
        )  # fmt: skip
    x, test_x = narrowed(train.x, test.x)
    train, test = replace(train, x=x), replace(test, x=test_x)
    scale = SCALES[x.dtype.name]
    mean, std = channel_moments(train.first_inputs, scale, levels)
    return Dataset(
        name, train, test, tuple(class_names),
        scale=scale, mean=mean, std=std, group_names=tuple(group_names), variant=variant,
        has_own_parts=True, overlapping=overlapping, columns=tuple(columns),
        levels=tuple(levels), whole_names=tuple(whole_names),
    )  # fmt: skip


def coded(
    values: NDArray[Any], names: Sequence[str] | None, what: str
) -> tuple[IntArray, list[str]]:
    """Return the position of each value (n,) among the names, and the names.

    By default these are all that occur, numbers by size and others by letter.

    Raises:
        DataError: a value is none of the given names.
    """
    found, places = np.unique(values.astype(str), return_inverse=True)
    texts = [composed(value) for value in found.tolist()]  # accents and spaces in one way
    if names is None:
        size = {name: float(name) if _NUMBER.fullmatch(name) else math.inf for name in texts}
        names = sorted(size, key=lambda name: (size[name], name))
        _check_unlike(names, what)
    names = [composed(name) for name in names]
    unknown = [text for text in texts if text not in names]
    if unknown:
        known = ", ".join(names[:SHOWN])
        raise DataError(
            f"{what} holds the class {unknown[0]!r}, which [data.columns] classes does not list: "
            f"{known}.{suggestion(unknown[0], names)}"
        )
    order = np.array([names.index(text) for text in texts], dtype=np.int64)
    return order[places.reshape(-1)], names


def _check_unlike(names: Sequence[str], what: str) -> None:
    """Check that no two names are one number written in two ways, as 1 and 1.0."""
    seen = dict[float, str]()
    for name in names:
        if _NUMBER.fullmatch(name):
            like = seen.setdefault(float(name), name)
            if like != name and "." in like + name:
                raise DataError(f"{what} holds {like!r} and {name!r}: write equal numbers alike")
