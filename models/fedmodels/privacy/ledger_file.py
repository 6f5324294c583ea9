"""A ledger's file: a database whose rows are on the disk before what they stand for leaves."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedmodels.errors import ArchiveError, ArchiveNotWritten
from fedmodels.host.files import no_locks
from fedmodels.times import LEDGER_WAIT_S


class LedgerFile:
    """An open file; used by one thread. Several processes may share it."""

    def __init__(self, path: Path, tables: Mapping[str, str]) -> None:
        """Open a file, or make it, for its owner alone; ``tables`` are columns by name.

        Raises:
            ArchiveError: it is damaged or cannot be used.
        """
        self.path = path
        self._heads: dict[str, list[str]] = {}
        """By table: the digest of the first n rows at n."""
        self._last: dict[str, int] = {}
        """By table: the last row that counts in these."""
        with self._told():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, isolation_level=None, timeout=LEDGER_WAIT_S)
            self._db.execute("PRAGMA synchronous=FULL")
            with self._writing():
                for name, columns in tables.items():
                    self._db.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Say in one line what is wrong with the file."""
        try:
            yield
        except sqlite3.OperationalError as error:
            is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            kind = ArchiveNotWritten if is_full else ArchiveError
            full = OSError(errno.ENOSPC, str(error)) if is_full else None
            raise kind(f"{self.path} cannot be used: {no_locks(error) or error}") from full
        except OSError as error:
            kind = (
                ArchiveNotWritten if error.errno in (errno.ENOSPC, errno.EDQUOT) else ArchiveError
            )
            raise kind(f"{self.path} cannot be used: {error.strerror}") from None
        except (sqlite3.DatabaseError, KeyError, ValueError, TypeError) as error:
            raise ArchiveError(
                f"{self.path} is damaged ({error}): what was spent of privacy cannot be told; put "
                "a copy of it back"
            ) from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Write all or nothing; it is on the disk afterwards. Other processes wait."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def head(self, table: str, rows: int | None = None) -> tuple[int, str]:
        """Return how many rows a table has, and a digest of them; rows are only added.

        With ``rows``, of so many of the first ones, or of all where there are fewer.

        Raises:
            ArchiveError: the file is damaged.
        """
        with self._told():
            heads = self._heads.setdefault(table, [""])
            query = f"SELECT rowid, * FROM {table} WHERE rowid > ? ORDER BY rowid"
            for number, *row in self._db.execute(query, (self._last.get(table, 0),)):
                text = repr([heads[-1], *row]).encode()
                heads.append(hashlib.sha256(text).hexdigest())
                self._last[table] = number
        at = len(heads) - 1 if rows is None else min(rows, len(heads) - 1)
        return at, heads[at]

    def adds(self, table: str, row: tuple[str | int, ...], most: int) -> bool:
        """Add a row unless it is there, by its first column; False if there are ``most`` others.

        Raises:
            ArchiveError: the file cannot be used.
        """
        marks = ", ".join("?" * len(row))
        with self._told(), self._writing():
            if self._db.execute(f"SELECT 1 FROM {table} WHERE name = ?", row[:1]).fetchone():
                return True
            (known,) = self._db.execute(f"SELECT count(*) FROM {table}").fetchone()
            if known >= most:
                return False
            self._db.execute(f"INSERT INTO {table} VALUES ({marks})", row)
            return True
