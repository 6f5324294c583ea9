"""Files that only grow, line by line: logs, records and ledgers.

A disk that is full for a moment, a limit of a file's size or a signal may cut a write short. What
follows such a piece would be unreadable, or would be there twice. So each addition is whole or not
at all, and whoever appends next removes a piece that a killed process has left.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Self

from fedmodels.host.files import sync_path, used_without_lock, wait_for_lock

_BLOCK = 1 << 16
_BINARY = getattr(os, "O_BINARY", 0)


class LineFile:
    """A file that whole lines are added to, by one process at a time."""

    def __init__(self, path: Path, *, private: bool = True, waits: bool = False) -> None:
        """Open the file, or make it; a last line that is not whole goes.

        Args:
            path: the file.
            private: let nobody but the owner read a file that is made here.
            waits: wait while another process that waits as well has the file open.

        Raises:
            OSError: it cannot be opened or written.
        """
        self.path = path
        self._is_new = not path.exists()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY
        self._file = os.open(path, flags, 0o600 if private else 0o666)
        try:
            if waits:
                try:
                    wait_for_lock(self._file)
                except OSError as error:
                    used_without_lock(path, error)
            self.size = self._whole()
            self._trim()
        except OSError:
            os.close(self._file)
            raise

    def _whole(self) -> int:
        """Return the size of all whole lines."""
        end = os.lseek(self._file, 0, os.SEEK_END)
        while end:
            begin = max(0, end - _BLOCK)
            os.lseek(self._file, begin, os.SEEK_SET)
            found = os.read(self._file, end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    def _trim(self) -> None:
        """Remove what lies behind the lines that count."""
        if os.fstat(self._file).st_size > self.size:
            os.ftruncate(self._file, self.size)

    def append(self, lines: bytes, *, sync: bool = False) -> None:
        """Add whole lines, all of them or none.

        Args:
            lines: one or more, each with its end.
            sync: make them safe on the disk; the name of a file that was made here as well.

        Raises:
            OSError: the disk is full, or fails. The file is as before, or is so before the next
                lines are added.
        """
        self._trim()
        try:
            left = lines
            while left:
                left = left[os.write(self._file, left) :]
            if sync:
                self.sync()
        except OSError:
            with contextlib.suppress(OSError):  # the next addition tries again
                self._trim()
            raise
        self.size += len(lines)

    def sync(self) -> None:
        """Make all lines safe on the disk; OSError if the disk fails."""
        os.fsync(self._file)
        if self._is_new:
            sync_path(self.path.parent)
            self._is_new = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def append_lines(path: Path, lines: bytes, *, sync: bool = False, private: bool = True) -> None:
    """Add whole lines to a file as :meth:`LineFile.append` does, and close it.

    Several processes may do so at the same time; each waits for the others.

    Raises:
        OSError: the file cannot be written; it holds its old lines and nothing else.
    """
    with LineFile(path, private=private, waits=True) as file:
        file.append(lines, sync=sync)
