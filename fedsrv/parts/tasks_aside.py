"""Tasks that an operator wants set aside: they lie in a file of the run directory."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from pathlib import Path

from fedmodels.errors import RunFailed
from fedmodels.files import write_atomically

FILE = "set-aside.json"


class TasksAside:
    """The wishes of one open run; safe between threads.

    A wish is on the disk before it is answered. From its next growth on, the run keeps it.
    """

    def __init__(self, run: Path) -> None:
        """Read what was asked before a restart.

        Raises:
            RunFailed: the file is damaged.
        """
        self._file, self._lock = run / FILE, threading.Lock()
        self._asked = self._found()

    def read(self) -> Collection[tuple[int, int]]:
        """Return the clients and tasks that are to be set aside."""
        return self._asked

    def add(self, tasks: Collection[tuple[int, int]]) -> None:
        """Keep further tasks of clients in mind, also after a crash from now on."""
        with self._lock:
            asked = self._asked | {*tasks}
            write_atomically(self._file, json.dumps(sorted(asked)) + "\n", sync=True)
            self._asked = asked

    def _found(self) -> frozenset[tuple[int, int]]:
        if not self._file.exists():
            return frozenset()
        try:
            found = json.loads(self._file.read_text("ascii"))
            return frozenset((int(client), int(task)) for client, task in found)
        except (OSError, ValueError, TypeError) as error:
            raise RunFailed(
                f"{self._file} names the tasks that are set aside, and cannot be read ({error}); "
                "delete it, and set them aside again"
            ) from None
