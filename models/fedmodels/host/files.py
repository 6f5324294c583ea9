"""Files that appear whole or not at all, files that are safe on the disk, and unusable paths."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib
import logging
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from io import BufferedReader
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError
from fedmodels.host.shortages import lack_of

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
_OF_PATHS = (
    errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR,
)  # fmt: skip
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BINARY = getattr(os, "O_BINARY", 0)
"""Windows changes the ends of lines without it."""
_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
"""What systems say where another process has a lock."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Errors of a lock on a file system without locks, such as a network mount made without them."""
_SQLITE_LOCKS = (15, 5130, 2058, 3850, 2314, 3594)
"""SQLITE_PROTOCOL, and SQLITE_IOERR with SHMLOCK, UNLOCK, LOCK, RDLOCK, CHECKRESERVEDLOCK."""
Stamp = tuple[int, int, int]
"""Inode, size and time of a file."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a link on a file system without hard links, such as that of a memory card."""
LEFTOVER = ".*.tmp"
"""Glob pattern of what a crash in the middle of :func:`replacing` leaves."""


def require_utf8(text: str | os.PathLike[str]) -> None:
    """Check that a word or a path is text, of UTF-8, as records and pages are; or ConfigError."""
    try:
        os.fspath(text).encode()
    except UnicodeEncodeError:
        shown = printable(os.fspath(text))
        raise ConfigError(
            f"{shown} is not written in UTF-8, as names of files have to be: rename it"
        ) from None


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; OSError for a pipe or a device, which is never waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY
    handle = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def lies_below(path: Path, root: Path) -> bool:
    """Tell whether a path lies below a directory, links followed.

    Where no step from the directory on is a link, nothing needs to be followed.
    """
    place, below = os.fspath(root), os.fspath(path)
    if os.name == "posix" and below.startswith(place + os.sep):
        steps = below[len(place) + 1 :].split(os.sep)
        places = accumulate(steps, os.path.join, initial=place)
        if ".." not in steps and not any(map(os.path.islink, islice(places, 1, None))):
            return True
    return path.resolve().is_relative_to(root.resolve())


def check_inside(path: Path, root: Path) -> None:
    """Raise DataError unless a file lies below a directory, links followed."""
    if not lies_below(path, root):
        raise DataError(f"{path} is a link out of {root}: put the file itself there")


def read_regular(path: Path, root: Path | None = None) -> bytes:
    """Return the content of a regular file below a root, if there is one; OSError of any other."""
    if root is not None and not lies_below(path, root):
        raise OSError(errno.EINVAL, f"it is outside {root}", str(path))
    with open_regular(path) as file:
        return file.read()


def stamp_of(path: Path) -> Stamp | None:
    """Return what changes when a file is written anew; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def linked(source: Path, target: Path) -> bool:
    """Make a path another name of a file, safely on the disk; False where that cannot be."""
    fresh = target.with_name(f".{target.name}.tmp")
    try:
        fresh.unlink(missing_ok=True)
        os.link(source, fresh)
        fresh.replace(target)
        fresh.unlink(missing_ok=True)  # it stays where both were names of one file before
        sync_path(target.parent)
    except OSError:
        return False
    return True


def sync_path(path: Path) -> None:
    """Fsync a file or a directory; OSError if it is gone, or the disk fails."""
    on_windows = sys.platform == "win32"
    if on_windows and path.is_dir():  # a directory cannot be opened there
        return
    handle = os.open(path, os.O_RDWR if on_windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file in hexadecimal digits; OSError of a device or a pipe."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = False, private: bool = False) -> Iterator[Path]:
    """Give a file new content; a reader sees the old content or the new, never a mixture.

    Several processes may replace one file at the same time; the last one wins. A link stays: the
    file that it stands for is replaced.

    Args:
        path: the file, which may be missing.
        sync: make content and name safe on the disk before the block ends.
        private: let nobody but the owner read the file.

    Yields:
        An empty file beside it to write to. An error in the block removes that file.

    Raises:
        OSError: the file cannot be written, or is a device or a pipe, which is never replaced.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if path.is_symlink():  # as /dev/stdout is
        path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(os.open(temporary, flags, 0o600 if private else 0o666))
    try:
        yield temporary
        if sync:
            sync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


def write_atomically(path: Path, text: str, *, sync: bool = False, private: bool = False) -> None:
    """Write a small text file whole or not at all, as :func:`replacing` says."""
    with replacing(path, sync=sync, private=private) as temporary:
        temporary.write_text(text, "utf-8")


def write_once(path: Path, content: bytes, *, private: bool = False) -> bool:
    """Write a file whole and safely on the disk, unless there is one; tell whether it was written.

    Of processes that do so at a time, one writes. Where the file system has no hard links, two at
    the same moment may both write.

    Raises:
        OSError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with replacing(fresh, sync=True, private=private) as temporary:
            temporary.write_bytes(content)
        try:
            os.link(fresh, path)
        except OSError as error:
            if path.exists():
                return False
            if error.errno not in NO_LINKS:
                raise
            os.replace(fresh, path)
        sync_path(path.parent)
    finally:
        fresh.unlink(missing_ok=True)
    return True


def write_new(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that has its mode from its first moment on; when that fails, there is none.

    Raises:
        FileExistsError: there is one already.
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def why_file_is_no_good(error: OSError) -> str:
    """Return a line when an error says that a path cannot be opened, or what a process lacks.

    It is an empty text for any other error. Where the system names no file, standard output may be
    meant.
    """
    if lack := lack_of(error):
        return lack if error.filename is None else f"{printable(str(error.filename))}: {lack}"
    if error.filename is not None and error.errno in (*_OF_PATHS, *_FULL):
        return f"{printable(str(error.filename))}: {error.strerror}"
    return f"cannot write output: {error.strerror}" if error.errno in _FULL else ""


def no_locks(error: Exception) -> str:
    """Return the line of an error of a system or SQLite that cannot lock; empty for any other."""
    code = getattr(error, "sqlite_errorcode", None)
    if code not in _SQLITE_LOCKS and getattr(error, "errno", None) not in NO_LOCKS:
        return ""
    said = error.strerror if isinstance(error, OSError) else error
    return (
        f"its file system has no locks ({said}): put it on a local disk, or mount this one with "
        "locks"
    )


def used_without_lock(path: Path, error: OSError) -> None:
    """Say once of a path that it is used although it could not be locked, and why."""
    _warn_once(path, no_locks(error) or error.strerror)


@functools.cache
def _warn_once(path: Path, why: str) -> None:
    log.warning("%s is used without a lock, so by one process at a time: %s", path, why)


def locked(handle: int, place: int | None = None) -> bool:
    """Lock an open file, or one byte of it, until it is closed; tell whether nobody else has it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        if fcntl is None:  # Windows
            msvcrt: Any = importlib.import_module("msvcrt")
            os.lseek(handle, place or 0, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        elif place is None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def wait_for_lock(handle: int) -> None:
    """Lock an open file until it is closed, once nobody else has it; on Windows nothing is locked.

    Raises:
        OSError: the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX)
