"""One's own data set: arrays, or a folder of images for each class.

root/*.csv and images below root                       a table says what each image is:
[data.columns] file, see fedcli.data.own.image_table
root/train_x.npy train_y.npy test_x.npy test_y.npy     inputs of bytes or numbers, labels int64
root/train/<class>/*.png   root/test/<class>/*.png     images; without a test part, also
root/<class>/*.png
root/dataset.json                                      optional: any of the keys scale, mean,
std, class_names
root/groups_train.npy groups_test.npy                  optional: natural clients (n,) int64
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.archives import archives, is_archive
from fedcli.data.arrays import (
    IntArray,
    as_numbers,
    channel_moments,
    narrowed,
    read_array,
    strata,
)
from fedcli.data.class_folders import (
    Listed,
    called,
    class_folders,
    images_in,
    images_of,
    read_images,
)
from fedcli.data.cuts.held_out import SHARE, held_out
from fedcli.data.folders import note_left_out, shown
from fedcli.data.image_files import OTHERS, PLAIN, first_set, stated
from fedcli.data.set_aside import SetAside
from fedcli.data.sets.dataset import Dataset, Examples, check_finite, named_classes
from fedcli.data.sets.source import Source
from fedmodels.config.data import Data
from fedmodels.config.recipe import NAME, Recipe
from fedmodels.config.transforms import image_transform
from fedmodels.errors import ConfigError, DataError, reason_of, suggestion
from fedmodels.facts.class_names import composed
from fedmodels.facts.data_description import SCALES
from fedmodels.host.files import check_inside, open_regular

KEYS = ("scale", "mean", "std", "class_names")
ABOUT = "dataset.json"
PARTS = ("train", "test")
log = logging.getLogger(__name__)


def directory(source: Source) -> Dataset:
    """Load the data set that lies in ``[data] root``."""
    if source.data.root is None:
        raise DataError("directory: say where the data lie, [data] root = 'DIR'")
    if not is_archive(source.roots[0]):
        return _directory(source)
    with archives() as packed:
        roots = (packed.unpacked(source.roots[0]), *source.roots[1:])
        return _directory(replace(source, roots=roots))


def _directory(source: Source) -> Dataset:
    root = source.roots[0]
    if source.data.columns is not None:
        if source.data.group is not None:
            raise ConfigError("[data] group is for folders of classes: set [data.columns] group")
        table = importlib.import_module("fedcli.data.own.image_table")
        made: Dataset = table.image_table(source)
        return made
    _check_root(root)
    _check_recipe(source.recipe, root)
    about = _read_json(root / ABOUT, root) if (root / ABOUT).exists() else {}
    for key in about:
        if key not in KEYS:
            raise DataError(f"{root / ABOUT}: unknown key {key!r}.{suggestion(key, KEYS)}")
    names = [composed(name) for name in source.data.classes or ()]
    names = names or _class_names(root, about)
    if holds_arrays(root):
        train, test = _arrays_of(root, source)
        return _made(root, train, test, names, about)
    folder = _training_folder(root)
    for place in class_folders(folder, root):
        if not images_in(place, root, nested=source.data.group is not None):
            raise DataError(f"{place} is empty: a class needs images to train on")
    own = (source.recipe.class_of(called(place)) for place in class_folders(folder, root))
    names = names or [*dict.fromkeys(own)]
    how = image_transform(source.data).model_copy(update={"recipe": source.recipe})
    listed, held = _listed(root, names, source)
    (x, y, files), (tested, z, held_files) = (
        read_images(part, how, SetAside.of(source.data, "images")) for part in (listed, held)
    )
    train = Examples(x, y, _read_groups(root, "train", len(y)), stated(how, x))
    test = Examples(tested, z, _read_groups(root, "test", len(z)))
    if source.data.group is None:
        return _made(root, train, test, names, about)
    held_folder = root / "test" if (root / "test").is_dir() else folder
    named = sorted(_groups_in(listed, folder)), sorted(_groups_in(held, held_folder))
    groups = [*dict.fromkeys(named[0] + named[1])]
    train = replace(train, wholes=_wholes(listed, folder, groups)[files])
    test = replace(test, wholes=_wholes(held, held_folder, groups)[held_files])
    return _made(root, train, test, names, about, groups)


def _check_root(root: Path) -> None:
    """Raise DataError unless a directory holds images or arrays to train on; says what to do."""
    if not root.is_dir():
        what = "no directory" if root.exists() else "not there"
        raise DataError(f"{root} is {what}: [data] root must name the directory of the data")
    if (root / "test").is_dir() and not (root / "train").is_dir():
        raise DataError(f"{root / 'train'} is missing: {root / 'test'} beside it is for testing")
    if not holds_arrays(root) and not class_folders(_training_folder(root), root):
        raise DataError(
            f"{root} holds no data: put images into {root / 'CLASS' / '*.png'}, or into "
            f"{root / 'train' / 'CLASS' / '*.png'} and {root / 'test' / 'CLASS' / '*.png'}, or "
            "arrays into train_x.npy, train_y.npy, test_x.npy and test_y.npy"
        )


def _check_recipe(recipe: Recipe, root: Path) -> None:
    """Raise ConfigError if a site's recipe is for tables, and these are images or arrays."""
    if recipe and holds_arrays(root):
        raise ConfigError(f"a recipe is for tables and folders of images, and {root} holds arrays")
    if keys := sorted(recipe.facts().keys() - {"classes", "bad"}):
        raise ConfigError(f"the recipe has {keys[0]}, which is for tables; {root} holds images")


def holds_arrays(root: Path) -> bool:
    """Tell whether a directory holds arrays, and no folders of images."""
    return not (root / "train").is_dir() and any(root.glob("*_[xy].npy"))


def _training_folder(root: Path) -> Path:
    """Return the folder that has one of images for each class."""
    return root / "train" if (root / "train").is_dir() else root


def _share_of(data: Data, root: Path, *, has_test_part: bool) -> float:
    """Return the part of each class that is held out for testing; none where a test part is.

    Raises:
        ConfigError: a share is given, and there is a test part.
    """
    if has_test_part:
        for key in ("test_share", "test_seed"):
            if getattr(data, key) is not None:
                raise ConfigError(f"[data] {key}: {root} has a test part of its own; leave it out")
        return 0.0
    share = data.test_share or SHARE
    which = "the last" if data.test_seed is None else "drawn"
    of = "each class, by name," if data.group is None else "the folders in those of classes"
    log.warning(
        "note: %s has no test part: %s %g %% of %s are for testing; [data] test_share sets how "
        "many", shown(root), which, 100 * share, of,
    )  # fmt: skip
    return share


def _listed(root: Path, names: list[str], source: Source) -> tuple[Listed, Listed]:
    """Return the images for training and those for testing; say which files are neither."""
    folder, data = _training_folder(root), source.data
    nested, recipe = data.group is not None, source.recipe
    listed = images_of(folder, names, root, nested=nested, recipe=recipe)
    has_test_part = (root / "test").is_dir()
    held = (
        images_of(root / "test", names, root, nested=nested, recipe=recipe) if has_test_part else []
    )
    beside = [root / ABOUT, root / NAME, *(_groups_file(root, part) for part in PARTS)]
    note_left_out(root, {*beside, *(path for path, _ in listed + held)}, OTHERS)
    if share := _share_of(data, root, has_test_part=has_test_part):
        groups = sorted({*_groups_in(listed, folder)}) if nested else []
        put = None
        if source.earlier is not None:
            listed = _new_among(listed, folder, groups, source)
            put = source.earlier.put(groups)
        wholes = _wholes(listed, folder, groups) if nested else None
        labels = np.array([label for _, label in listed], dtype=np.int64)
        alike = np.zeros_like(labels)
        test = held_out(alike, alike, labels, share, wholes, data.test_seed, put)
        held = [one for one, is_held in zip(listed, test, strict=True) if is_held]
        listed = [one for one, is_held in zip(listed, test, strict=True) if not is_held]
        _tell_kinds(root, listed, held)
    return listed, held


def _new_among(listed: Listed, folder: Path, groups: Sequence[str], source: Source) -> Listed:
    """Return the images that are new to a client, of which those that cannot be read are none."""
    assert source.earlier is not None
    how = image_transform(source.data)
    x, _, places = read_images(listed, how, SetAside.of(source.data, "images"))
    wholes = _wholes(listed, folder, groups)[places] if groups else None
    new = source.earlier.new(x, wholes, groups)
    return [listed[place] for place in np.unique(places[new])]


def _groups_in(listed: Listed, folder: Path) -> list[str]:
    """Return the group of each image: its folder below that of its class, by name.

    An image that lies in the folder of its class itself is a group of its own.
    """
    return [path.relative_to(folder).parts[1] for path, _ in listed]


def _wholes(listed: Listed, folder: Path, groups: Sequence[str]) -> IntArray:
    """Return the number (n,) of the group of each image."""
    numbers = {name: number for number, name in enumerate(groups)}
    return np.array([numbers[name] for name in _groups_in(listed, folder)], dtype=np.int64)


def _tell_kinds(root: Path, listed: Listed, held: Listed) -> None:
    """Say which kinds of files are for testing alone: their names may tell where they come from."""
    trained, tested = ({path.suffix.lower() for path, _ in part} for part in (listed, held))
    if only := sorted(tested - trained):
        log.warning(
            "note: %s: all files *%s are for testing, and none is trained on: rename files so that "
            "each kind is in both parts, or choose by hand what lies in test/",
            shown(root), ", *".join(only),
        )  # fmt: skip


def _arrays_of(root: Path, source: Source) -> tuple[Examples, Examples]:
    """Return the arrays of both parts; raise ConfigError if ``[data]`` has a key for images."""
    data = source.data
    if data.group is not None:
        raise ConfigError(f"[data] group is for folders of images, and {root} holds arrays")
    if data.bad is not None:
        raise ConfigError(f"[data] bad is for tables and images, and {root} holds arrays")
    if image_transform(data) != PLAIN:
        raise ConfigError(
            f"[data] {first_set(image_transform(data))} is for images, and {root} holds arrays"
        )
    has_test_part = any((root / f"test_{name}.npy").exists() for name in "xy")
    takes_targets = source.earlier is not None  # of labels that came back
    train = _read_arrays(root, "train", takes_targets=takes_targets)
    if share := _share_of(data, root, has_test_part=has_test_part):
        if source.earlier is not None:
            train = train.at(source.earlier.new(train.x))
        train, test = train.split(share, data.test_seed, source.tasks)
    else:
        test = _read_arrays(root, "test", takes_targets=takes_targets)
    x, tested = narrowed(train.x, test.x)
    return replace(train, x=x), replace(test, x=tested)


def _made(
    root: Path,
    train: Examples,
    test: Examples,
    names: list[str],
    about: dict[str, Any],
    groups: Sequence[str] = (),
) -> Dataset:
    """Put the parts together; what ``dataset.json`` leaves out is derived."""
    if not len(train.y):
        raise DataError(f"{root} holds no example for training")
    (scale,) = _numbers(root, about, "scale", (SCALES[train.x.dtype.name],))
    if not len(test.y):
        test = replace(test, x=np.empty((0, *train.x.shape[1:]), dtype=train.x.dtype))
    labels = [strata(part.y) for part in (train, test) if len(part.y)]
    highest = max((int(y.max()) for y in labels), default=-1)
    classes = named_classes(names, highest, root)
    mean, std = channel_moments(train.first_inputs, scale)
    return Dataset(
        "directory", train, test, classes, scale=scale,
        mean=_numbers(root, about, "mean", mean), std=_numbers(root, about, "std", std),
        variant=f"{len(train.y)} train and {len(test.y)} test examples", has_own_parts=True,
        whole_names=tuple(groups),
    )  # fmt: skip


def _numbers(
    root: Path, about: dict[str, Any], key: str, default: tuple[float, ...]
) -> tuple[float, ...]:
    """Return one number, or as many as the default has, that ``dataset.json`` gives for a key."""
    if key not in about:
        return default
    given = about[key]
    values = given if isinstance(given, list | tuple) else [given]
    fits = len(values) in (1, len(default)) and all(
        isinstance(v, int | float) and np.isfinite(v) and (v > 0 or key == "mean") for v in values
    )
    if not fits:
        raise DataError(f"{root / ABOUT}: {key} must hold 1 or {len(default)} numbers")
    return tuple(float(v) for v in values)


def _class_names(root: Path, about: dict[str, Any]) -> list[str]:
    """Return the names that ``dataset.json`` gives to classes; none unless it does."""
    names = about.get("class_names", [])
    if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
        raise DataError(f"{root / ABOUT}: class_names must be a list of names")
    return [composed(str(name)) for name in names]


def _read_json(path: Path, root: Path) -> dict[str, Any]:
    check_inside(path, root)
    try:
        with open_regular(path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold an object")
    return content


def _read_inside(path: Path, root: Path) -> NDArray[Any]:
    """Read an array that lies in the root itself."""
    check_inside(path, root)
    return read_array(path)


def _read_arrays(root: Path, part: str, *, takes_targets: bool) -> Examples:
    """Read ``PART_x.npy`` and ``PART_y.npy``, and the natural clients where these are given.

    Numbers (n, T) may stand in place of labels in what comes to a client that may learn such.
    """
    files = [root / f"{part}_{name}.npy" for name in "xy"]
    x, y = (_read_inside(path, root) for path in files)
    if x.dtype.kind not in "iuf" or x.ndim < 2:
        raise DataError(
            f"{files[0]} is {x.dtype} {list(x.shape)}; expected bytes or numbers, one input after "
            "the other: (n, C, H, W) for images, (n, 1) for single numbers"
        )
    check_finite(files[0], x)
    if takes_targets and y.ndim == 2 and y.dtype == np.float64 and len(y) == len(x):
        return Examples(as_numbers(x), y, _read_groups(root, part, len(y)))
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) != len(x):
        raise DataError(f"{files[1]} must hold {len(x)} integer labels")
    if len(y) and y.min() < 0:
        raise DataError(f"{files[1]} holds a negative label")
    return Examples(as_numbers(x), y.astype(np.int64), _read_groups(root, part, len(y)))


def _groups_file(root: Path, part: str) -> Path:
    return root / f"groups_{part}.npy"


def _read_groups(root: Path, part: str, num_examples: int) -> IntArray | None:
    """Read the natural client of each example of a part, if given."""
    path = _groups_file(root, part)
    if not path.exists():
        return None
    groups = _read_inside(path, root)
    if groups.shape != (num_examples,) or groups.dtype.kind not in "iu":
        raise DataError(f"{path} must hold {num_examples} integers")
    return groups.astype(np.int64)
