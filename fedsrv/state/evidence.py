"""What shows afterwards that nobody changed a run: its chain of statements, and its log of calls.

The run directory tells both what happens, and asks them what a statement names. ``fedsrv audit``
and ``fedsrv verify`` read them (:mod:`fedsrv.state.audit`, :mod:`fedsrv.state.verification`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsrv.state.audit import AUDIT, Audit, last_audited
from fedsrv.state.ledger import Ledger, written_last
from fedsrv.state.record import Record


class Evidence:
    """The evidence of a run that is written; used by the engine's thread, and told from any."""

    def __init__(self, run: Path, ledger: Ledger, resume: bool) -> None:
        """Go on with what is there; raise ArchiveError if the log of calls cannot be used."""
        self._ledger = ledger
        self.chain, self.audit = ledger.chain, Audit(run / AUDIT, last_audited(ledger.db))
        self.differences = [*_wrong_in(run), *self.audit.differences] if resume else []
        """What did not fit in ``run.db``, ``rounds.jsonl`` and ``audit.jsonl``, a line each."""

    def tell(self, what: str, **facts: Any) -> None:
        """Put down that something happened; it is written with the next commit."""
        self.audit.tell(what, **facts)

    def written_last(self, name: str) -> str:
        """Return the sha256 of a file as it was stated last; an empty text before that."""
        return written_last(self._ledger.db, name)

    def committing(self, record: Record) -> Mapping[str, Any]:
        """Write down that an interaction is committed; return what its statement names besides."""
        for client, reason in record.get("failed", {}).items():
            self.audit.tell("failed", client=client, reason=reason)
        self.audit.tell("committed", interaction=record["interaction"])
        self.audit.write()
        return {"audit": self.audit.safe} if self.audit.safe.lines else {}

    def name_last_line(self) -> None:
        """State which line of the log is the last one, once it is safe."""
        before = self.audit.safe
        self.audit.write()
        self.audit.sync()
        if self.audit.safe != before:
            after = self._ledger.committed
            with self._ledger.stating(paused_after=after, audit=self.audit.safe):
                pass

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Sync the log, then what the block syncs; callers are told of the head before both."""
        head = self.chain.head
        self.audit.sync()
        yield
        self.chain.safe = head

    def close(self) -> None:
        """Write what is left of the log, and close it."""
        self.audit.close()


def _wrong_in(run: Path) -> list[str]:
    """Return what does not fit in the records of a run that goes on, a line each."""
    from fedsrv.state.verification import differences

    return differences(run)
