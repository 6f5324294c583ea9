"""The data sets that are known by name: what loads each, and how to get its files.

``fedcli data`` prints this registry. Third parties add to it by an entry point of the group
``fedtide.data``: a function from a :class:`Source` to a :class:`Dataset`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedcli.data.sets.source import Earlier, Source, Whose
from fedmodels.config.data import OF_IMAGES, Data
from fedmodels.config.recipe import EMPTY, Recipe, recipe_beside
from fedmodels.errors import ConfigError, suggestion
from fedmodels.own.code_names import is_own
from fedmodels.own.own_code import load_entry_point, own, renew

if TYPE_CHECKING:
    from rich.table import Table

    from fedcli.data.sets.dataset import Dataset
    from fedmodels.console.rows import DataSetLine

GROUP = "fedtide.data"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownDataset:
    """A data set of the registry."""

    loader: str
    """``module:function``, imported only when it is used."""
    about: str
    files: tuple[str, ...]
    """Files or directories, any of which tells that a root holds the set. Empty where there is
    nothing to look for: a package brings the set along, or the config says where it lies."""
    advice: str
    """How to get it."""
    takes_long: bool = False
    """Reading it takes long, so the result is kept as one memory-mapped file."""
    overlaps: bool = False
    """Whether a window may share rows with the next one of its recording, and with no other."""


_FETCHED = "downloaded on first use"
_BY_HAND = "put the publisher's files in $FEDTIDE_DATA: "


def _at_hand(loader: str, about: str, advice: str) -> KnownDataset:
    """Return one of which nothing has to be looked for."""
    return KnownDataset(loader, about, (), advice)


def _image_set(loader: str, about: str, *files: str) -> KnownDataset:
    return KnownDataset(f"fedcli.data.sets.images:{loader}", about, files, _FETCHED)


def _sensor_set(loader: str, about: str, needed: str, *files: str) -> KnownDataset:
    of_har = f"fedcli.data.sets.har:{loader}"
    return KnownDataset(of_har, about, files, _BY_HAND + needed, overlaps=True)


def _windows_set(name: str, about: str) -> KnownDataset:
    """Return one that is a windows file."""
    return _sensor_set("windows", f"sensor windows of {about}, 6 activities", name, name)


DATASETS: dict[str, KnownDataset] = {
    "digits": _at_hand(
        "fedcli.data.sets.images:digits", "1797 digits of 8x8", "comes with scikit-learn"
    ),
    "digits-of-three": _at_hand(
        "fedcli.data.sets.images:digits_of_three",
        "digits of MNIST, EMNIST and scikit-learn at 28x28: three domains",
        "as mnist, emnist-byclass and digits",
    ),
    "mnist": _image_set("mnist", "70 000 digits of 28x28", "MNIST/raw"),
    "fashion-mnist": _image_set("fashion_mnist", "70 000 garments of 28x28", "FashionMNIST/raw"),
    "emnist-byclass": _image_set(
        "emnist_byclass", "814 255 characters of 28x28, 62 classes",
        "EMNIST/raw", "emnist_byclass_subset.npz",
    ),
    "cifar10": _image_set(
        "cifar10", "60 000 photographs of 32x32, 10 classes",
        "cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar10_subset.npz",
    ),
    "cifar100": _image_set(
        "cifar100", "60 000 photographs of 32x32, 100 classes",
        "cifar-100-python", "cifar-100-python.tar.gz", "cifar100_subset.npz",
    ),
    "uci-har": _windows_set("uci_har.npz", "a phone on the waist"),
    "motionsense": _windows_set("motionsense.npz", "a phone in the pocket"),
    "wisdm": _windows_set("wisdm.npz", "phones and watches"),
    "femnist": KnownDataset(
        "fedcli.data.sets.femnist:femnist", "characters of 28x28 by 3500 writers, 62 classes",
        ("femnist", "FEMNIST", "leaf/data/femnist"),
        f"{_BY_HAND}LEAF's femnist/data/train/*.json and test/*.json", takes_long=True,
    ),
    "tiny-imagenet": KnownDataset(
        "fedcli.data.sets.tiny_imagenet:tiny_imagenet", "110 000 photographs of 64x64, 200 classes",
        ("tiny-imagenet-200", "tiny-imagenet-200.zip"),
        f"{_BY_HAND}tiny-imagenet-200.zip", takes_long=True,
    ),
    "hhar": _sensor_set(
        "hhar", "sensor windows of four phone models, 6 activities",
        "Phones_accelerometer.csv and Phones_gyroscope.csv",
        "hhar.npz", "Phones_accelerometer.csv", "Activity recognition exp",
    ),
    "realworld": _sensor_set(
        "realworld", "sensor windows at seven body positions, 8 activities",
        "realworld2016_dataset/proband*/data/*.zip",
        "realworld.npz", "realworld2016_dataset", "realworld2016",
    ),
    "hhar+realworld": _sensor_set("hhar_realworld", "both, 9 activities", "those of both"),
    **{
        name: _at_hand("fedcli.data.sets.synthetic:synthetic", about, "drawn by this program")
        for name, about in (
            ("sine", "55 000 points below and above a sine, 2 classes"),
            ("circle", "55 000 points in and around a circle, 2 classes"),
            ("sea", "55 000 rows of three numbers, of which two count, 2 classes"),
        )
    },
    "directory": _at_hand(
        "fedcli.data.sets.directory:directory", "arrays or class folders of your own",
        "set [data] root",
    ),
    "table": _at_hand(
        "fedcli.data.own.tables:table", "CSV or parquet files of your own, by windows or by rows",
        "set [data] root and [data.columns]",
    ),
    "huggingface": _at_hand(
        "fedcli.data.own.huggingface:huggingface",
        "a data set of Hugging Face, as save_to_disk wrote it",
        "set [data] root and [data.columns]",
    ),
}  # fmt: skip
"""Every data set that comes with fedtide, by the name it has in a config."""
OWN = ("directory", "table", "huggingface")
"""Those of them that read a user's files."""
READ_BY_RECIPES = ("directory", "table")
"""Those of them whose files a site may describe by a recipe."""


def names() -> list[str]:
    """Return the names of all data sets, those of third parties included."""
    return sorted({*DATASETS, *(point.name for point in entry_points(group=GROUP))})


def cache_dir() -> Path:
    """Return the directory for what is unpacked or downloaded."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fedtide"


def is_published(root: Path) -> bool:
    """Tell whether a partition is of a data set that comes with fedtide, and of no user's files."""
    try:
        name = json.loads((root / "partition.json").read_bytes())["config"]["data"]["name"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return False
    return comes_along(name)


def comes_along(name: str) -> bool:
    """Tell whether a data set is one that fedtide lists, and none of a user's files."""
    return name in DATASETS and name not in OWN


def source_of(
    data: Data,
    tasks: Sequence[int] = (),
    whose: Whose = "natural",
    recipe: Recipe = EMPTY,
    since: float | int | str | None = None,
    earlier: Earlier | None = None,
) -> Source:
    """Return where to look for a config's data set: its root, ``$FEDTIDE_DATA``, the cache."""
    given = [data.root, os.environ.get("FEDTIDE_DATA")]
    roots = [Path(place).expanduser() for place in given if place]
    places = (*dict.fromkeys(roots), cache_dir())
    return Source(places, data, tuple(tasks), whose, recipe, since, earlier)


def load(
    data: Data,
    tasks: Sequence[int] = (),
    *,
    whose: Whose = "natural",
    recipe: Recipe | None = None,
    since: float | int | str | None = None,
    earlier: Earlier | None = None,
) -> Dataset:
    """Load the data set that ``[data]`` names.

    Args:
        data: the table.
        tasks: of natural clients, by number.
        whose: tasks the data are cut into, where they say it.
        recipe: how files say what ``[data]`` asks for; by default the one that lies with them.
        since: the last mark that was read of them; rows beyond it are new.
        earlier: what the client has had before, where the data are a further task of it.

    Raises:
        ConfigError: no such data set is known, or ``[data]`` has a key that is for another one.
        DataError: it is damaged, or missing and cannot be fetched.
    """
    if data.labels == "coarse" and data.name != "cifar100":
        raise ConfigError(f"[data] labels = 'coarse' belongs to cifar100, not to {data.name}")
    of_images = data.name == "directory"
    if data.columns is not None and of_images and data.columns.file is None:
        raise ConfigError("[data.columns] of a directory needs file, the column that names images")
    if data.columns is not None and not of_images and data.name not in ("table", "huggingface"):
        raise ConfigError(f"[data.columns] belongs to table and huggingface, not to {data.name}")
    if data.columns is not None and not of_images and data.columns.file is not None:
        raise ConfigError(f"[data.columns] file is for a directory of images, not for {data.name}")
    if data.name in DATASETS and data.name not in OWN:
        _check_unset(data, ("test_share", "test_seed", "classes", *OF_IMAGES), "custom data")
    if data.name not in OWN:
        _check_unset(data, ("bad",), "tables and images")
    if data.name == "table":
        _check_unset(data, OF_IMAGES, "images")
    if data.name != "directory":
        _check_unset(data, ("group",), "folders of images (columns have [data.columns] group)")
    columns = data.columns
    if data.cuts_tasks and not (data.name == "table" or (of_images and columns)):
        key = "[data] tasks" if data.tasks else "[data.columns] task"
        raise ConfigError(f"{key} is for tables, and images with a table, not for {data.name}")
    if columns is not None and columns.split is not None:
        _check_unset(data, ("test_seed",), "data without [data.columns] split")
    if columns is None or columns.split or columns.group or columns.file:
        _check_unset(data, ("test_gap",), "a table whose rows test_share splits")
    if recipe is None and data.name in READ_BY_RECIPES and data.root is not None:
        recipe = recipe_beside(Path(data.root).expanduser())
    if recipe and data.name not in READ_BY_RECIPES:
        raise ConfigError(f"a recipe is for tables and folders of images, not for {data.name}")
    if recipe:
        recipe, line = recipe.for_run(data.columns)
        if line:
            _tell(f"{data.root}: {line}")
        data = data if recipe.bad is None else with_bad(data, recipe.bad)
    return _with_moments(
        _loaded(source_of(data, tasks, whose, recipe or EMPTY, since, earlier)), data
    )


def with_bad(data: Data, bad: Literal["refuse", "skip"]) -> Data:
    """Return ``[data]`` by which a site sets its bad rows aside, or refuses them."""
    share = data.bad_share if bad == "skip" else None
    return data.model_copy(update={"bad": bad, "bad_share": share})


@cache
def _tell(line: str) -> None:
    """Say a line, once in a process."""
    log.warning("note: %s", line)


def _with_moments(dataset: Dataset, data: Data) -> Dataset:
    """Return a data set with the mean and deviation that ``[data]`` gives, if it gives them."""
    if data.mean is None or data.std is None:
        return dataset
    return replace(dataset, mean=data.mean, std=data.std, moments_given=True)


def _loaded(source: Source) -> Dataset:
    data, known = source.data, DATASETS.get(source.data.name)
    if known is not None and known.takes_long and source.find(*known.files) is not None:
        from fedcli.data.sets.prepared import prepared  # imports torch: only where it is needed

        return prepared(source, known.files, _loader(data.name))
    return _loader(data.name)(source)


def _check_unset(data: Data, keys: Iterable[str], whose: str) -> None:
    """Raise ConfigError if a key is given that is for other data: with the first such key."""
    for key in keys:
        if getattr(data, key) is not None:
            raise ConfigError(f"[data] {key} is for {whose}, not for {data.name}")


def _from_function(name: str, source: Source) -> Dataset:
    """Load the data set that a function in a user's own file returns."""
    adapter = importlib.import_module("fedcli.data.own.functions")
    renew(name)
    made: Dataset = adapter.from_function(name, own(name), source)
    return made


def _loader(name: str) -> Callable[[Source], Dataset]:
    """Return the function that loads a data set."""
    if name in DATASETS:
        module, _, function = DATASETS[name].loader.partition(":")
        loader: Callable[[Source], Dataset] = getattr(importlib.import_module(module), function)
        return loader
    for point in entry_points(group=GROUP, name=name):
        found: Callable[[Source], Dataset] = load_entry_point(point)
        return found
    if is_own(name):
        return partial(_from_function, name)
    raise ConfigError(
        f"[data] name = {name!r} is not known.{suggestion(name, names())} "
        f"Known are: {', '.join(names())}"
    )


def datasets_told() -> list[DataSetLine]:
    """Return which data sets are known, and where they lie or how to get them."""
    from fedmodels.console.rows import DataSetLine

    told = []
    for name in names():
        about, place, advice = "from another package", None, ""
        if (known := DATASETS.get(name)) is not None:
            place = source_of(Data(name=name)).find(*known.files) if known.files else None
            about, advice = known.about, "" if place else known.advice
        path = str(place) if place else None
        told.append(DataSetLine(name=name, about=about, path=path, advice=advice))
    return told


def datasets_table() -> Table:
    """Return the data sets as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "what", "where, or how to get it")
    for one in datasets_told():
        table.add_row(one.name, one.about, Text(one.path or one.advice, overflow="fold"))
    return table
