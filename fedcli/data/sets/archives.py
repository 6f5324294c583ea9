"""Published image archives: found in a root, unpacked or downloaded into the cache, read.

Nothing is ever written into a root the user named; archives that lie there are unpacked into the
cache. Checksums are torchvision's, which are those the publishers give.
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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import IntArray
from fedcli.data.sets.source import Source
from fedmodels.errors import DataError, reason_of
from fedmodels.files import replacing

log = logging.getLogger(__name__)

Examples = tuple[NDArray[np.uint8], IntArray]
TIMEOUT_S = 20.0
"""A download that stands still for so long has failed."""
EMNIST_FILES = tuple(
    (f"emnist-byclass-{part}-{kind}-ubyte.gz", "")
    for part in ("train", "test")
    for kind in ("images-idx3", "labels-idx1")
)


def torchvision_pair(source: Source, kind: str) -> tuple[Examples, Examples]:
    """Return training and test examples of a torchvision data set.

    Args:
        source: where to look, and where to unpack and download to.
        kind: torchvision's class, e.g. ``"FashionMNIST"``.

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
    x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x), np.asarray(made.targets, dtype=np.int64)


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
    """Turn an error of writing into the cache into one line.

    Raises:
        DataError: the cache cannot be written, or its disk is full.
    """
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
    """Return what a compressed file holds.

    Raises:
        DataError: it is damaged.
    """
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
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)
