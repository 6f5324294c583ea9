"""A data set that a function of a user's file returns: ``[data] name = "my_data.py:load"``.

The function takes nothing, or the :class:`~fedcli.data.sets.dataset.Source` with the places to look
in. It returns a training and a test set, each a ``torch.utils.data.Dataset`` of pairs of an input
and a label, or a finished :class:`~fedcli.data.sets.dataset.Dataset`. A torch data set may have
``classes``, the names of the classes, and ``groups``, the natural client of each example, a number
or a name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcli.data.arrays import DAMAGED, Inputs, as_numbers
from fedcli.data.image_files import PLAIN, first_set, pixels_of, stated
from fedcli.data.own.examples import SHOWN, coded, dataset_of
from fedcli.data.sets.dataset import Dataset, Examples, named_classes
from fedcli.data.sets.source import Source
from fedmodels.config.transforms import ImageTransform, image_transform
from fedmodels.errors import ConfigError, DataError, reason_of
from fedmodels.facts.data_description import MAX_CLASSES
from fedmodels.own.own_code import told


def from_function(name: str, load: Callable[..., Any], source: Source) -> Dataset:
    """Call a user's function, with ``source`` if it takes one; make a data set of the result.

    Raises:
        DataError: it fails, or returns something else; begins with its name, ``file.py:function``.
    """
    if not callable(load):
        raise DataError(f"{name} is no function: it is {type(load).__name__}")
    with told(name):
        found = load(source) if inspect.signature(load).parameters else load()
    share, how = source.data.test_share, image_transform(source.data)
    if isinstance(found, Dataset):
        given = [k for k in ("test_share", "test_seed") if getattr(source.data, k) is not None]
        if given or how != PLAIN:
            key = given[0] if given else first_set(how)
            raise ConfigError(f"[data] {key}: {name} returns a finished data set; leave it out")
        return replace(found, has_own_parts=True)
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    for key in ("test_share", "test_seed"):
        if is_pair and getattr(source.data, key) is not None:
            raise ConfigError(f"[data] {key}: {name} returns a test set of its own; leave it out")
    if share is None and not is_pair:
        raise DataError(
            f"{name} returned {type(found).__name__}; it must return two torch data sets, the one "
            "for training and the one for testing, or one with [data] test_share"
        )
    found = found if is_pair else (found,)
    people = _names_of_groups(found, name)
    read = [
        examples_of(part, f"{name}: the {which} set", how, people)
        for part, which in zip(found, ("training", "test"), strict=False)
    ]
    how_drawn = source.data.test_seed, source.tasks
    if source.earlier is not None and not is_pair:
        read = [read[0].at(source.earlier.new(read[0].x))]
    train, test = read if is_pair else read[0].split(share or 0.0, *how_drawn)
    with told(f"{name}: the names of classes"):
        stated = [list(getattr(part, "classes", None) or ()) for part in found]
    if all(stated) and stated[0] != stated[-1]:
        raise DataError(
            f"{name}: the training set has the classes {stated[0][:SHOWN]}, the test set "
            f"{stated[-1][:SHOWN]}: labels would not stand for the same; give both the same"
        )
    highest = max(int(examples.y.max(initial=-1)) for examples in (train, test))
    given = [str(c) for c in stated[0]]
    if source.data.classes is not None and given not in ([], [*source.data.classes]):
        raise ConfigError(f"[data] classes differs from those of {name}: {', '.join(given)}")
    names = named_classes(given or source.data.classes or (), highest, name)
    if (train.groups is None) != (test.groups is None):
        raise DataError(f"{name}: only one of the two sets has groups; give them to both")
    variant = f"{len(train.y)} train and {len(test.y)} test examples"
    return dataset_of(name.rpartition("/")[2], train, test, names, variant, people,
                      may_lack_tests=source.earlier is not None)  # fmt: skip


def _names_of_groups(sets: Sequence[Any], name: str) -> list[str]:
    """Return the names of natural clients in their order; none where they are numbers."""
    given = []
    for one, which in zip(sets, ("training", "test"), strict=False):
        with told(f"{name}: the {which} set: groups"):
            if (groups := getattr(one, "groups", None)) is not None:
                given.append(np.asarray(groups))
    if not given or any(groups.dtype.kind != "U" for groups in given):
        return []
    return coded(np.concatenate(given), None, f"{name}: groups")[1]


def examples_of(
    dataset: Any, what: str, how: ImageTransform = PLAIN, people: Sequence[str] = ()
) -> Examples:
    """Read every example of a torch data set: a pair of input and label at each index.

    ``people`` are the names of natural clients, where groups are names.

    Raises:
        DataError: it is no torch data set, inputs differ in shape, or a label is no class.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{what} is {type(dataset).__name__}; it needs __len__ and __getitem__, as a "
            "torch.utils.data.Dataset has them (an IterableDataset does not)"
        )
    inputs: list[NDArray[Any]] = []
    labels: list[int] = []
    pictures = 0
    with told(f"{what}: its length"):
        size = len(dataset)
    for index in range(size):
        with told(f"{what}: example {index}"):
            pair = dataset[index]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"{what}: example {index} is no pair of input and label")
        inputs.append(as_array(pair[0], f"{what}: example {index}", how))
        pictures += isinstance(pair[0], Image.Image)
        labels.append(_label(pair[1], f"{what}: example {index}"))
        if inputs[-1].shape != inputs[0].shape or inputs[-1].dtype != inputs[0].dtype:
            raise DataError(
                f"{what}: example {index} is {inputs[-1].dtype} {inputs[-1].shape}, the first one "
                f"{inputs[0].dtype} {inputs[0].shape}"
            )
    x: Inputs = np.stack(inputs) if inputs else np.empty((0,), dtype=np.float32)
    with told(f"{what}: groups"):
        found = getattr(dataset, "groups", None)
        groups = None if found is None else np.asarray(found)
    if groups is not None:
        if people and groups.shape == (len(labels),) and groups.dtype.kind == "U":
            groups = coded(groups, people, f"{what}: groups")[0]
        if groups.shape != (len(labels),) or groups.dtype.kind not in "iu":
            raise DataError(f"{what}: groups must hold {len(labels)} integers, or names")
        groups = groups.astype(np.int64)
    transform = stated(how, x) if pictures and pictures == len(inputs) else None
    return Examples(x, np.array(labels, dtype=np.int64), groups, transform)


def as_array(value: Any, what: str, how: ImageTransform = PLAIN) -> NDArray[Any]:
    """Return one input as an array; a picture of Pillow is read as one in a file is.

    Raises:
        DataError: it is text or a table of objects, or holds NaN or infinity; or it is an array,
            and ``how`` is for pictures.
    """
    try:
        if isinstance(value, Image.Image):
            return pixels_of(value, how)
        if how != PLAIN:
            raise DataError(f"{what} is no picture of Pillow, for which [data] {first_set(how)} is")
        array = np.asarray(value)
    except (*DAMAGED, RuntimeError) as error:
        raise DataError(f"{what} cannot be read: {reason_of(error)}") from None
    if array.dtype.kind not in "iufb" or not array.ndim:
        raise DataError(f"{what} is {array.dtype} {array.shape}, not an array of numbers")
    with np.errstate(over="ignore"):
        if not np.isfinite(array.astype(np.float32)).all():
            raise DataError(f"{what} holds NaN or infinity: mend it, or leave it out")
    return np.ascontiguousarray(as_numbers(array))


def _label(value: Any, what: str) -> int:
    """Return a label, a non-negative integer."""
    number = np.asarray(value)
    fits = number.size == 1 and number.dtype.kind in "iu"
    if not fits or not 0 <= int(number.reshape(())) < MAX_CLASSES:
        raise DataError(
            f"{what} has the label {value!r}; a label is an integer from 0 to {MAX_CLASSES - 1}"
        )
    return int(number.reshape(()))
