"""Which rows a client has had in its tasks, by their content, and which sources it was given.

``DIR/<id>/rows.db`` keeps a hash of the inputs of each example, its task, and whether it is for
testing; and the digest of each source. So what comes is compared with hundreds of tasks at the cost
of its own rows, also where the data of earlier tasks were deleted since. The file follows from the
tasks: it is brought up to date when it is opened, after a crash too. What was deleted before that,
or before the file was lost, is not known, and a line says so.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import content_hashes
from fedcli.data.store.client_data import PARTS, SOURCE, ClientData
from fedcli.data.store.usual import take_in
from fedmodels.errors import ArchiveNotWritten, DataError
from fedmodels.host.files import no_locks

FILE = "rows.db"
AT_ONCE = 500
"""Rows that are looked up together."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS rows (hash INTEGER, task INTEGER, tested INTEGER, "
    "PRIMARY KEY (hash, task, tested)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS sources (sha256 TEXT, name TEXT, task INTEGER)",
    "CREATE INDEX IF NOT EXISTS by_content ON sources (sha256)",
)
log = logging.getLogger(__name__)
Told = NDArray[np.bool_]
"""Of each row (n,), whether it is so."""


@dataclass
class KnownRows:
    """What a client has had; the caller holds the lock under which tasks are added."""

    db: sqlite3.Connection
    held: ClientData

    def bring_up_to_date(self) -> None:
        """Take in the tasks that came since the last time; nothing of what was deleted or damaged.

        ``user_version`` counts the tasks that are in. A line names those that cannot be read.
        """
        (known,) = self.db.execute("PRAGMA user_version").fetchone()
        if known > self.held.num_tasks:  # somebody put earlier data back
            self.db.execute("DELETE FROM rows WHERE task >= ?", (self.held.num_tasks,))
            self.db.execute("DELETE FROM sources WHERE task >= ?", (self.held.num_tasks,))
        lost = [task for task in range(known, self.held.num_tasks) if not self._take(task)]
        if lost := [task for task in lost if self._counts(task)]:
            log.warning(
                "%s: data of %s cannot be read: which of their rows come again is not known",
                self.held.directory, named(lost),
            )  # fmt: skip
        if known != self.held.num_tasks:
            self.db.execute(f"PRAGMA user_version = {self.held.num_tasks}")
        take_in(self.db, self.held)
        self.db.commit()

    def _take(self, task: int) -> bool:
        """Take in a task; tell whether all its data are there."""
        is_whole = True
        for part in PARTS:
            try:
                hashes = content_hashes(self.held.arrays(task, part)[0])
                rows = ((h, task, part == "test") for h in hashes.view(np.int64).tolist())
                self.db.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?, ?)", rows)
            except DataError:
                is_whole = False
        with suppress(OSError, ValueError, KeyError, TypeError):
            made = json.loads((self.held.directory / f"task-{task}" / SOURCE).read_bytes())
            facts = str(made["sha256"]), str(made["name"]), task
            self.db.execute("INSERT INTO sources VALUES (?, ?, ?)", facts)
        return is_whole

    def source(self, sha256: str, name: str | None) -> int | None:
        """Return the task that was made of this content, under this name if one is given."""
        found = self.db.execute(
            "SELECT task FROM sources WHERE sha256 = ? AND (? IS NULL OR name = ?) "
            "ORDER BY task DESC", (sha256, name, name),
        )  # fmt: skip
        return next((task for (task,) in found if self._counts(task)), None)

    def among(self, hashes: NDArray[np.uint64]) -> tuple[Told, Told]:
        """Tell which rows (n,) earlier tasks have, and which of them are test examples there.

        Rows of tasks that are set aside are not known: nobody has learned them.
        """
        signed = np.unique(hashes).view(np.int64).tolist()
        had, tested = set[int](), set[int]()
        for begin in range(0, len(signed), AT_ONCE):
            some = signed[begin : begin + AT_ONCE]
            marks = ",".join("?" * len(some))
            lines = self.db.execute(f"SELECT * FROM rows WHERE hash IN ({marks})", some)
            for one, task, is_test in lines:
                if self._counts(task):
                    had.add(one)
                    tested |= {one} if is_test else set()
        of = hashes.view(np.int64)
        return tuple(np.isin(of, np.array([*some], dtype=np.int64)) for some in (had, tested))  # type: ignore[return-value]

    def _counts(self, task: int) -> bool:
        """Tell whether a task is there, and not set aside."""
        return task < self.held.num_tasks and not self.held.tasks[task].set_aside


@contextmanager
def known_rows(held: ClientData) -> Iterator[KnownRows]:
    """Open what a client has had, up to date.

    Raises:
        DataError: the file is damaged.
        ArchiveNotWritten: it cannot be written, or opened, for now.
    """
    place = held.directory / FILE
    try:
        with closing(_opened(place)) as db:
            found = KnownRows(db, held)
            found.bring_up_to_date()
            yield found
    except sqlite3.OperationalError as error:  # the disk is full, say
        raise ArchiveNotWritten(f"{place} cannot be used: {no_locks(error) or error}") from None
    except sqlite3.DatabaseError as error:
        raise DataError(
            f"{place} cannot be used ({error}): delete it to rebuild it from the tasks whose "
            "data are still there"
        ) from None


def named(tasks: list[int], most: int = 5) -> str:
    """Return tasks for a line: the first of them, and how many more there are."""
    more = f" and {len(tasks) - most} more" if len(tasks) > most else ""
    return f"task{'s' if len(tasks) > 1 else ''} {', '.join(map(str, tasks[:most]))}{more}"


def _opened(place: Path) -> Any:
    db = sqlite3.connect(place)
    for line in TABLES:
        db.execute(line)
    return db
