"""Image data sets: digits, MNIST and its kin, CIFAR.

Means and deviations are those of the training set, the values usual in the literature. Published
archives are found in a root, or downloaded into the cache. Nothing is ever written into a root that
the user named: archives that lie there are unpacked into the cache. Checksums are torchvision's,
which are those the publishers give.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import logging
import os
import socket
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import read_npz
from fedcli.data.cuts.held_out import stratified_folds
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.source import Source
from fedmodels.errors import DataError, reason_of
from fedmodels.host.files import replacing
from fedmodels.times import DOWNLOAD_S

DIGITS_FILE = "data/digits.csv.gz"
"""Where scikit-learn has the digits, below its data sets."""
EMNIST_FILES = tuple(
    (f"emnist-byclass-{part}-{kind}-ubyte.gz", "")
    for part in ("train", "test")
    for kind in ("images-idx3", "labels-idx1")
)
log = logging.getLogger(__name__)

# --- classes in label order -----------------------------------------------------------------------

DIGITS = tuple("0123456789")
LETTERS = (*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"abcdefghijklmnopqrstuvwxyz")
FASHION_MNIST = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CIFAR100_TREE = {
    "aquatic mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit and vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household electrical devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large man-made outdoor things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large natural outdoor scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large omnivores and herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium-sized mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles 1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles 2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}
"""CIFAR-100: the fine classes of each coarse one; coarse classes are in label order."""
CIFAR100_COARSE = tuple(CIFAR100_TREE)
"""CIFAR-100: the coarse classes, in label order."""
CIFAR100_COARSE_OF = {
    fine: coarse for coarse, names in enumerate(CIFAR100_TREE.values()) for fine in names
}
"""CIFAR-100: the coarse label of each fine class."""
CIFAR100 = tuple(sorted(CIFAR100_COARSE_OF))
"""CIFAR-100: the fine classes, in label order, which is alphabetical."""


def digits(source: Source) -> Dataset:
    """Load scikit-learn's digits: (1, 8, 8), 0 … 16; the last fifth of a class is for test."""
    table = _table_of_digits()  # (1797, 65): 64 pixels and the label
    x, y = table[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    test = stratified_folds(y, 5) == 4
    train, held = (Examples(x[chosen], y[chosen]) for chosen in (~test, test))
    return Dataset("digits", train, held, DIGITS, scale=16.0, mean=(0.3053,), std=(0.3754,))


def _table_of_digits() -> NDArray[np.float64]:
    """Read scikit-learn's file without importing scikit-learn, which takes two seconds."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).with_name("datasets") / DIGITS_FILE, delimiter=",")


def digits_of_three(source: Source) -> Dataset:
    """Load the digits of MNIST, EMNIST and scikit-learn as (1, 28, 28), each a domain.

    Those of scikit-learn are enlarged from 8 x 8 between pixels.
    """
    from scipy.ndimage import zoom

    parts: list[list[Examples]] = [[], []]
    small = digits(source)
    for made in (mnist(source), emnist_byclass(source)):
        for part, one in zip(parts, (made.train, made.test), strict=True):
            part.append(one.at(one.y < len(DIGITS)))
    for part, one in zip(parts, (small.train, small.test), strict=True):
        large = zoom(
            one.x * (255 / small.scale), (1, 1, 3.5, 3.5), order=1, grid_mode=True, mode="nearest"
        )
        part.append(Examples(np.rint(large).astype(np.uint8), one.y))
    train, test = (
        Examples(
            np.concatenate([one.x for one in part]),
            np.concatenate([one.y for one in part]),
            domains=np.repeat(np.arange(3), [len(one.y) for one in part]),
        )
        for part in parts
    )
    return Dataset(
        "digits-of-three", train, test, DIGITS, scale=255.0, mean=(0.1307,), std=(0.3081,),
        domain_names=("mnist", "emnist", "scikit-learn"),
        variant=", ".join(str(len(one.y)) for one in parts[0]) + " train examples",
    )  # fmt: skip


def mnist(source: Source) -> Dataset:
    """Load MNIST (LeCun and Cortes)."""
    return _published(source, "MNIST", DIGITS, (0.1307,), (0.3081,))


def fashion_mnist(source: Source) -> Dataset:
    """Load Fashion-MNIST (Xiao et al., 2017)."""
    return _published(source, "FashionMNIST", FASHION_MNIST, (0.2860,), (0.3530,))


def emnist_byclass(source: Source) -> Dataset:
    """Load EMNIST-ByClass (Cohen et al., 2017), upright: 0-9, A-Z, a-z."""
    names, full = (*DIGITS, *LETTERS), ("EMNIST/raw", "EMNIST/gzip.zip")
    subset = _subset(source, "emnist_byclass_subset.npz", full)
    return _published(source, "EMNIST", names, (0.1736,), (0.3317,), subset)


def cifar10(source: Source) -> Dataset:
    """Load CIFAR-10 (Krizhevsky, 2009)."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    full = ("cifar-10-batches-py", "cifar-10-python.tar.gz")
    subset = _subset(source, "cifar10_subset.npz", full)
    return _published(source, "CIFAR10", CIFAR10, mean, std, subset)


def cifar100(source: Source) -> Dataset:
    """Load CIFAR-100 (Krizhevsky, 2009) with its 100 fine or 20 coarse classes."""
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    full = ("cifar-100-python", "cifar-100-python.tar.gz")
    subset = _subset(source, "cifar100_subset.npz", full)
    fine = _published(source, "CIFAR100", CIFAR100, mean, std, subset)
    coarse = np.array([CIFAR100_COARSE_OF[name] for name in CIFAR100], dtype=np.int64)
    if source.data.labels == "fine":
        return replace(fine, coarse=coarse)
    return fine.relabelled(coarse, CIFAR100_COARSE)


def _published(
    source: Source,
    kind: str,
    class_names: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    subset: Path | None = None,
) -> Dataset:
    """Load a data set whole through torchvision, or a file that holds a part of it.

    ``kind`` is torchvision's class. A subset has ``x_train`` (n, H, W[, C]) uint8, ``y_train``
    (n,), ``x_test`` and ``y_test``.
    """
    variant = "full"
    if subset is None:
        train, test = torchvision_pair(source, kind)
    else:
        train, test = _read_npz(subset, "train"), _read_npz(subset, "test")
        variant = f"subset, {len(train.y)} train and {len(test.y)} test examples"
        log.warning(
            "%s: the full set is absent; %s is used (%s)", source.data.name, subset.name, variant
        )
    return Dataset(
        source.data.name, train, test, class_names, scale=255.0, mean=mean, std=std, variant=variant
    )


def _subset(source: Source, file: str, full: tuple[str, ...]) -> Path | None:
    """Return the file of a subset where nothing is there of the full set."""
    return None if source.find(*full) is not None else source.find(file)


def _read_npz(path: Path, part: str) -> Examples:
    """Read images (n, C, H, W) uint8 and labels (n,) of one part of a subset."""
    arrays = read_npz(path)
    if not {f"x_{part}", f"y_{part}"} <= set(arrays):
        raise DataError(f"{path} holds no x_{part} and y_{part}")
    x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or y.dtype.kind not in "iu":
        raise DataError(
            f"{path}: x_{part} must hold images (n, H, W) or (n, H, W, C) uint8, and y_{part} "
            "whole numbers"
        )
    return Examples(_channels_first(x), y.astype(np.int64))


def _channels_first(x: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images (n, H, W) or (n, H, W, C) as (n, C, H, W)."""
    return np.ascontiguousarray(x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2))


# --- published archives ---------------------------------------------------------------------------


def torchvision_pair(source: Source, kind: str) -> tuple[Examples, Examples]:
    """Return training and test examples of a torchvision class, e.g. ``"FashionMNIST"``.

    Raises:
        DataError: the set is missing and cannot be downloaded, or an archive is damaged.
    """
    for root in source.roots:
        pair = _pair(kind, root)
        if pair is not None:
            return pair
    if _unpack(source, kind):
        pair = _pair(kind, source.cache)
        if pair is not None:
            return pair
    _download(source, kind)
    pair = _pair(kind, source.cache)
    if pair is None:
        raise source.missing(f"a usable {kind}", f"delete what is left of it in {source.cache}")
    return pair


def _made(kind: str, root: Path, train: bool, download: bool = False) -> Any:
    """Return the torchvision data set."""
    import torchvision.datasets

    extra = {"split": "byclass"} if kind == "EMNIST" else {}
    cls = getattr(torchvision.datasets, kind)
    return cls(str(root), train=train, download=download, **extra)


def _pair(kind: str, root: Path) -> tuple[Examples, Examples] | None:
    """Return training and test examples if ``root`` holds them unpacked."""
    try:
        return _examples(_made(kind, root, True)), _examples(_made(kind, root, False))
    except RuntimeError:  # torchvision's "Dataset not found"
        return None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{kind} in {root} cannot be read: {reason_of(error)}") from None


def _examples(made: Any) -> Examples:
    """Return images (n, C, H, W) uint8 and labels (n,) of a torchvision data set."""
    x = np.asarray(made.data, dtype=np.uint8)
    if type(made).__name__ == "EMNIST":
        x = x.transpose(0, 2, 1)  # its files hold every image transposed
    return Examples(_channels_first(x), np.asarray(made.targets, dtype=np.int64))


def _unpack(source: Source, kind: str) -> bool:
    """Unpack the compressed originals that a root holds into the cache; tell whether it did."""
    import torchvision.datasets

    cls = getattr(torchvision.datasets, kind)
    if kind.startswith("CIFAR"):
        archive = source.find(cls.filename)
        if archive is None:
            return False
        _check_md5(archive.read_bytes(), cls.tgz_md5, archive)
        with _filling(source):
            _unpack_tar(archive, source.cache, cls.base_folder)
        return True
    files = EMNIST_FILES if kind == "EMNIST" else tuple(cls.resources)
    found = [(source.find(f"{kind}/raw/{name}", name), md5) for name, md5 in files]
    if any(path is None for path, _ in found):
        return False
    for path, md5 in found:
        if path is not None:
            content, name = _unpacked(path, md5), path.name.removesuffix(".gz")
            with _filling(source):
                _keep(content, source.cache / kind / "raw" / name)
            log.info("%s unpacked into %s", path, source.cache / kind / "raw")
    return True


@contextlib.contextmanager
def _filling(source: Source) -> Iterator[None]:
    """Turn an error of writing into the cache, such as a full disk, into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{source.data.name} cannot be unpacked into {source.cache}: {reason_of(error)}; make "
            "room there, or name another directory in XDG_CACHE_HOME"
        ) from None


def _check_md5(content: bytes, md5: str, path: Path) -> None:
    """Check a published checksum, where there is one."""
    if md5 and hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise DataError(f"{path} is damaged: its MD5 is not {md5}; fetch it again")


def _unpacked(path: Path, md5: str) -> bytes:
    """Return what a compressed file holds; raise DataError if it is damaged."""
    packed = path.read_bytes()
    _check_md5(packed, md5, path)
    try:
        return gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {reason_of(error)}; fetch it again") from None


def _keep(content: bytes, target: Path) -> None:
    """Write one file; several processes may do so at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_bytes(content)


def _unpack_tar(path: Path, cache: Path, folder: str) -> None:
    """Unpack one folder of an archive, which has no folders in it.

    Several processes may do so at once, and one may read what another has unpacked: each file is
    replaced by its equal, and none is ever away.
    """
    target = cache / folder
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as place:
        with tarfile.open(path) as archive:
            archive.extractall(place, filter="data")
        for file in (Path(place) / folder).iterdir():
            os.replace(file, target / file.name)
    log.info("%s unpacked into %s", path, cache)


def _download(source: Source, kind: str) -> None:
    """Download a data set into the cache, quietly."""
    log.info("%s: downloading into %s", source.data.name, source.cache)
    try:
        source.cache.mkdir(parents=True, exist_ok=True)
        with _quiet():
            _made(kind, source.cache, True, download=True)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no network"
        raise source.missing(
            f"{kind}", f"downloading failed ({reason}): set FEDTIDE_DATA to a directory with it"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars, and give connections a timeout."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)
