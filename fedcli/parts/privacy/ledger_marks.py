"""How far a client's ledgers had come, in its state directory: none begins anew unnoticed.

A ledger only grows. A row is on the disk before the mark that counts it, so a crash leaves a mark
that is behind its ledger, and never one that is ahead. A ledger that is gone, or was copied back,
lacks rows that the mark has. Other clients and runs may have added more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedmodels.errors import ArchiveError
from fedmodels.host.files import write_atomically
from fedmodels.privacy.ledger_file import LedgerFile

MARKS = "ledgers.json"


class LedgerMark:
    """The mark of one ledger of one client; used by the thread that trains."""

    def __init__(self, states: Path, ledger: str, table: str) -> None:
        """Read nothing yet.

        Args:
            states: the client's state directory.
            ledger: what the ledger is called in the mark.
            table: the table whose rows are counted.
        """
        self.path, self._ledger, self._table = states / MARKS, ledger, table
        self._known: tuple[int, str] | None = None
        """Rows, and their digest, by the mark; None before it was read."""

    def exists(self) -> bool:
        """Tell whether there is a mark; ArchiveError if it cannot be read."""
        return self._ledger in self._read()

    def check(self, file: LedgerFile) -> None:
        """Check that a ledger has all that it had when the mark was set.

        Raises:
            ArchiveError: it has not, or one of the two cannot be read.
        """
        if self._known is not None:
            return
        known = self._in(self._read())
        rows, held = known[0], file.head(self._table, known[0])
        if held != known:
            lacks = f"holds {held[0]} rows" if held[0] < rows else "holds other rows"
            raise ArchiveError(
                f"{file.path} {lacks}, and held {rows} by {self.path}: it was deleted, or an older "
                "copy was put back, so what was spent before cannot be told; put the newest copy "
                f"back, or delete {self.path} to count from here on"
            )
        self._known = known

    def set(self, file: LedgerFile) -> None:
        """Set the mark to what a ledger holds; call it once a row is on the disk.

        Raises:
            ArchiveError: it cannot be written.
        """
        self.check(file)
        now = file.head(self._table)
        if now == self._known:
            return
        marks = {**self._read(), self._ledger: {"rows": now[0], "sha256": now[1]}}
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(marks) + "\n", sync=True, private=True)
        except OSError as error:
            raise ArchiveError(f"cannot write {self.path}: {error.strerror}") from None
        self._known = now

    def _in(self, marks: dict[str, Any]) -> tuple[int, str]:
        try:
            mark = marks.get(self._ledger, {"rows": 0, "sha256": ""})
            return int(mark["rows"]), str(mark["sha256"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._damaged() from None

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ArchiveError(f"cannot read {self.path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise self._damaged() from None
        if not isinstance(found, dict):
            raise self._damaged()
        return found

    def _damaged(self) -> ArchiveError:
        return ArchiveError(
            f"{self.path} is damaged, so nobody can tell whether the ledger was put back; delete "
            "it to count from what the ledger holds"
        )
