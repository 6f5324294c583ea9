"""Tasks that an operator wants set aside: they lie in a file of the run directory."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fedmodels.errors import RunFailed
from fedmodels.files import write_atomically

FILE = "set-aside.json"


class Wishes:
    """What was asked of one open run, a row for each wish; safe between threads.

    A wish is on the disk before it is answered. From its next growth on, the run keeps it.
    """

    def __init__(self, file: Path, what: str) -> None:
        """Read what was asked before a restart.

        Raises:
            RunFailed: the file is damaged.
        """
        self._file, self.lock = file, threading.RLock()
        """Held from the check of a wish until it is kept."""
        self.rows: Sequence[Sequence[Any]] = ()
        try:
            found = json.loads(file.read_text("ascii")) if file.exists() else []
            self.rows = [(int(first), *rest) for first, *rest in found]
        except (OSError, ValueError, TypeError) as error:
            raise RunFailed(
                f"{file} names {what}, and cannot be read ({error}); delete it, and say it again"
            ) from None

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        """Keep these wishes in mind, also after a crash from now on."""
        write_atomically(self._file, json.dumps(rows) + "\n", sync=True)
        self.rows = rows


class TasksAside(Wishes):
    """The tasks of one open run that are to be set aside."""

    def __init__(self, run: Path) -> None:
        """Read what was asked before a restart; raise RunFailed if the file is damaged."""
        super().__init__(run / FILE, "the tasks that are set aside")

    def read(self) -> Collection[tuple[int, int]]:
        """Return the clients and tasks that are to be set aside."""
        return {(client, int(task)) for client, task in self.rows}

    def add(self, tasks: Collection[tuple[int, int]]) -> None:
        """Keep further tasks of clients in mind, also after a crash from now on."""
        with self.lock:
            self.write(sorted({*self.read(), *tasks}))
