"""What callers of a served model asked, and the labels that came for it later, safely on the disk.

    DIR/<id>/served.db    beside the client's data; nothing of it leaves the site but as a task

A row is one prediction of a request with its label: it is known by where it came from, the request
and its position there, and never by its content, which other people's rows may equal. A row counts
once its commit is on the disk: a call that was answered loses none to ``kill -9`` or a loss of
power, and one that is sent again adds none. The file does not grow beyond its bound: the oldest
inputs that were asked go, as do the keys of old rows that became tasks, and labels that find no
room are refused.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedmodels.errors import ArchiveNotWritten, DataError
from fedmodels.host.files import no_locks
from fedmodels.host.guarded import Guarded
from fedmodels.times import FEEDBACK_KEPT_S

FILE = "served.db"
MAX_BYTES = 256 << 20
"""Size of the file; inputs that were asked take half of it at most."""
KEPT_ROWS = 250_000
"""Of so many of the last rows the file knows that they became part of a task."""
PAGE, BESIDE = 4096, 200
"""Bytes of a page of the file, and of a request beside its inputs."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS asked (id TEXT PRIMARY KEY, at REAL, size INTEGER, x BLOB, "
    "about TEXT)",
    "CREATE INDEX IF NOT EXISTS by_age ON asked (at)",
    "CREATE TABLE IF NOT EXISTS rows (seq INTEGER PRIMARY KEY, key BLOB UNIQUE, x BLOB, "
    "class TEXT, call INTEGER, batch INTEGER)",
    "CREATE INDEX IF NOT EXISTS by_batch ON rows (batch)",
    "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT)",
)
Array = NDArray[Any]


class Asked(NamedTuple):
    """The inputs of an answered request."""

    x: Array  # (n, *input_shape), raw
    places: Sequence[int]
    """Which of the predictions of the answer each input has."""
    answers: int
    """Predictions of the answer; those of rows without an input are among them."""


class Batch(NamedTuple):
    """Rows that become one task."""

    number: int
    x: Array
    classes: Sequence[str]
    calls: Sequence[int]
    """Which rows came together."""


class LabelStore:
    """The file of one client; safe between threads, and one process uses it at a time."""

    _held: Guarded[int] = Guarded("_lock")

    def __init__(self, directory: Path, shape: Sequence[int]) -> None:
        """Open the file in a client's directory, for inputs of a shape.

        Raises:
            DataError: it is damaged.
            ArchiveNotWritten: it cannot be written.
        """
        self.place, self._shape = directory / FILE, tuple(shape)
        self._lock = threading.RLock()
        with self._told():
            directory.mkdir(exist_ok=True)
            self._db = sqlite3.connect(self.place, timeout=10, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA max_page_count = {MAX_BYTES // PAGE}")
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            with self._db:
                for line in TABLES:
                    self._db.execute(line)
                self._db.execute("DELETE FROM asked WHERE at < ?", (time.time() - FEEDBACK_KEPT_S,))
            found = self._db.execute("SELECT coalesce(sum(size), 0) FROM asked")
            self._held = int(found.fetchone()[0])  # bytes of what was asked

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in a line what is wrong with the file."""
        try:
            yield
        except (OSError, sqlite3.OperationalError, sqlite3.ProgrammingError) as error:
            # full, of another process, or closed
            whose = "another server has it" if "locked" in str(error) else no_locks(error) or error
            raise ArchiveNotWritten(f"{self.place} cannot be used: {whose}") from None
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{self.place} is damaged ({error}): move it away; labels that wait in it are lost"
            ) from None

    @contextmanager
    def _changing(self, *, safely: bool) -> Iterator[sqlite3.Connection]:
        """Change the file; ``safely``: a loss of power takes nothing back."""
        with self._lock, self._told():
            self._db.execute(f"PRAGMA synchronous = {'FULL' if safely else 'NORMAL'}")
            with self._db:
                yield self._db

    # --- what was asked ---------------------------------------------------------------------------

    def ask(self, request: str, asked: Asked) -> None:
        """Keep the inputs of a request that was answered; the oldest ones go for it, or by age.

        Raises:
            ArchiveNotWritten: they are too many, or the file cannot be written.
        """
        x = np.ascontiguousarray(asked.x)
        about = json.dumps(
            {"kind": x.dtype.str, "places": [*asked.places], "answers": asked.answers}
        )
        size = x.nbytes + len(about) + BESIDE
        if size > MAX_BYTES // 2:
            raise ArchiveNotWritten(f"{self.place} keeps no request of {size} bytes")
        with self._changing(safely=False) as db:
            now, held = time.time(), self._held + size
            oldest = "SELECT id, size, at FROM asked ORDER BY at LIMIT 1"
            while (old := db.execute(oldest).fetchone()) is not None:
                if held <= MAX_BYTES // 2 and old[2] >= now - FEEDBACK_KEPT_S:
                    break
                db.execute("DELETE FROM asked WHERE id = ?", (old[0],))
                held -= old[1]
            row = request, now, size, x.tobytes(), about
            db.execute("INSERT INTO asked VALUES (?, ?, ?, ?, ?)", row)
            self._held = held

    def asked(self, request: str) -> Asked | None:
        """Return the inputs of a request that was answered; None if they are not kept."""
        with self._lock, self._told():
            found = self._db.execute("SELECT x, about FROM asked WHERE id = ?", (request,))
            row = found.fetchone()
        if row is None:
            return None
        about = json.loads(row[1])
        x = np.frombuffer(row[0], about["kind"]).reshape(-1, *self._shape)
        return Asked(x, about["places"], about["answers"])

    # --- labels -----------------------------------------------------------------------------------

    def label(
        self,
        origin: str,
        places: Sequence[int],
        x: Array,
        classes: Sequence[str],
    ) -> Counter[str]:
        """Keep rows (n, *input_shape) with their classes; return how many were what.

        A row is named by its ``origin``, which only those know who may label it, and by its place
        there. ``taken`` are new, ``known`` were there, ``corrected`` had another class, and
        ``late`` ones had another class and are part of a task already: they change nothing.
        """
        told = Counter[str]()
        with self._changing(safely=True) as db:
            (call,) = db.execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()
            for place, one, name in zip(places, x, classes, strict=True):
                key = sha256(f"{origin} {place}".encode()).digest()
                before = db.execute("SELECT class, batch FROM rows WHERE key = ?", (key,))
                had = before.fetchone()
                if had is None:
                    row = key, np.ascontiguousarray(one).tobytes(), name, call
                    db.execute("INSERT INTO rows (key, x, class, call) VALUES (?, ?, ?, ?)", row)
                    told["taken"] += 1
                elif had[0] == name:
                    told["known"] += 1
                elif had[1] is None:
                    db.execute("UPDATE rows SET class = ? WHERE key = ?", (name, key))
                    told["corrected"] += 1
                else:
                    told["late"] += 1
        return told

    @property
    def waiting(self) -> int:
        """Return how many rows are part of no task yet."""
        with self._lock, self._told():
            found = self._db.execute("SELECT count(*) FROM rows WHERE batch IS NULL")
            return int(found.fetchone()[0])

    def gather(self, taken: Sequence[int], facts: Mapping[str, Any]) -> None:
        """Let all rows that wait be of the next batch, whose number is beyond those ``taken``.

        Facts are kept in the same step.
        """
        with self._changing(safely=True) as db:
            (last,) = db.execute("SELECT coalesce(max(batch), -1) FROM rows").fetchone()
            number = max(last, *taken, -1) + 1
            db.execute("UPDATE rows SET batch = ? WHERE batch IS NULL", (number,))
            _keep(db, facts)

    def batches(self, kind: np.dtype[Any]) -> list[Batch]:
        """Return the batches that were gathered and are no task yet, in their order."""
        with self._lock, self._told():
            found = self._db.execute(
                "SELECT batch, x, class, call FROM rows WHERE batch IS NOT NULL AND x IS NOT NULL "
                "ORDER BY batch, seq"
            ).fetchall()
        by_number = dict[int, list[tuple[bytes, str, int]]]()
        for number, *row in found:
            by_number.setdefault(number, []).append(tuple(row))
        return [
            Batch(
                number,
                np.frombuffer(b"".join(x for x, _, _ in rows), kind).reshape(-1, *self._shape),
                [name for _, name, _ in rows],
                [call for _, _, call in rows],
            )
            for number, rows in by_number.items()
        ]

    def done(self, batch: int, facts: Mapping[str, Any]) -> None:
        """Keep no longer what became a task, nor the oldest keys; keep facts in the same step."""
        with self._changing(safely=True) as db:
            db.execute("UPDATE rows SET x = NULL WHERE batch = ?", (batch,))
            (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()
            old = "DELETE FROM rows WHERE seq <= ? AND x IS NULL"
            db.execute(old, (last - KEPT_ROWS,))
            _keep(db, facts)

    # --- facts ------------------------------------------------------------------------------------

    def keep(self, facts: Mapping[str, Any]) -> None:
        """Keep facts by name."""
        with self._changing(safely=True) as db:
            _keep(db, facts)

    def kept(self, name: str, otherwise: Any, check: Callable[[Any], Any]) -> Any:
        """Return a fact as it is checked; what stands for one that is missing or malformed."""
        with self._lock, self._told():
            row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        try:
            return otherwise if row is None else check(json.loads(row[0]))
        except (ValueError, TypeError, KeyError, AttributeError):
            return otherwise

    def close(self) -> None:
        """Let another process have the file."""
        with self._lock:
            self._db.close()


def _keep(db: sqlite3.Connection, facts: Mapping[str, Any]) -> None:
    rows = [(name, json.dumps(value)) for name, value in facts.items()]
    db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)
