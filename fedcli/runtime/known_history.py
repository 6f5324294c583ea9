"""The newest head of a run's history that a client's process was shown, kept on its disk.

The coordinator proves with each answer that its history goes on from that head. A history that was
edited, or copied back, fails this proof.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from pathlib import Path

from fedmodels.host.files import replacing
from fedmodels.host.guarded import Guarded
from fedpb.v1 import coordinator_pb2 as rpc

HEAD = "head.json"
SIZE = 32
"""Bytes of a link and of a digest."""
_OTHER = (
    "the coordinator's history does not contain what it showed here before: its run directory was "
    "edited, copied back or recovered"
)
_LEFT_OUT = "the coordinator leaves its history out of its answers, and showed it here before"
log = logging.getLogger(__name__)


class KnownHistory:
    """What a process knows of a run's history; safe between threads."""

    _run_id: Guarded[str] = Guarded("_lock")
    _number: Guarded[int] = Guarded("_lock")
    _link: Guarded[bytes] = Guarded("_lock")
    _differs: Guarded[bool] = Guarded("_lock")

    def __init__(self, path: Path | None = None) -> None:
        """Read the head that is kept in a file; without a path none is kept."""
        self._path = path
        self._lock = threading.RLock()
        self._differs, known = False, ("", 0, b"")
        try:
            facts = json.loads(path.read_text("utf-8")) if path else {}
            link = bytes.fromhex(facts["link"])
            if len(link) == SIZE and int(facts["number"]) > 0:
                known = facts["run_id"], facts["number"], link
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # no file, or a damaged one: no head is known
        self._run_id, self._number, self._link = known

    @property
    def number(self) -> int:
        """Return how many statements are known, for a request; 0 for none."""
        with self._lock:
            return 0 if self._differs else self._number

    def take(self, run_id: str, known: int, history: rpc.History) -> None:
        """Take what a coordinator answered; warn once if it does not go on from what is known.

        ``run_id`` is empty for the run that was joined; ``known`` is the number of statements that
        the request said. A server that once showed a history must show it in each answer: one that
        leaves it out, or its link, differs as one with another history does.
        """
        head = history.head
        with self._lock:
            if self._differs:
                return
            is_same = run_id in ("", self._run_id)
            if is_same and known != self._number:
                return  # an answer to an earlier request
            if is_same and known and not self._continues(history):
                self._differs = True
                log.warning("%s", self._line(_OTHER if head.link else _LEFT_OUT))
                return
            if head.number <= 0 or not head.link or (is_same and head.number == known):
                return
            self._run_id = run_id or self._run_id
            self._number, self._link = head.number, head.link
            self._store()

    def _continues(self, history: rpc.History) -> bool:
        link, digests, behind = self._link, history.digests, history.head.number - self._number
        if not history.head.link or behind < 0 or len(digests) != behind * SIZE:
            return False
        for at in range(0, len(digests), SIZE):
            link = hashlib.sha256(link + digests[at : at + SIZE]).digest()
        return link == history.head.link

    def _line(self, what: str) -> str:
        return (
            f"{what}. Whoever runs it checks it with "
            f"fedsrv verify RUN --head {self._number}:{self._link.hex()}; delete {self._path} to "
            "take the new history for good"
        )

    def _store(self) -> None:
        facts = {"run_id": self._run_id, "number": self._number, "link": self._link.hex()}
        if self._path is not None:
            try:
                with replacing(self._path, private=True) as fresh:
                    fresh.write_text(json.dumps(facts), "utf-8")
            except OSError as error:
                log.debug("%s cannot be written: %s", self._path, error.strerror)
