"""Lines about calls: those of the audit log, and of bad calls one a minute in the program's log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedmodels.numerics.secrecy import Secret
from fedmodels.printable import printable
from fedmodels.tensors.bundle import ClientId
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.guard import Guard
from fedsrv.state.audit import Audit
from fedsrv.state.ledger import Chain

log = logging.getLogger(__name__)


class Journal:
    """The journal of one server; without an audit log it writes no line."""

    def __init__(
        self, audit: Audit | None = None, chain: Chain | None = None, secret: Secret | None = None
    ) -> None:
        """Write lines; with a ``secret`` the digests of uploads are keyed by it.

        The server then adds noise that hides clients, and a digest of an upload without noise would
        let a guess at it be checked.
        """
        self._audit, self._chain, self._secret = audit, chain, secret
        self.guard = Guard()
        """Says who calls."""
        self._has_failed = False

    def tell(self, what: str, context: Any, client: ClientId | None = None, **facts: Any) -> None:
        """Add a line about a call: what it was, whose certificate it showed, and from where."""
        if self._audit is None:
            return
        peer = self.guard.peer(context)
        whom = {} if client is None else {"client": client}
        by = {"by": peer.uri or "nobody"} if peer else {}
        told = {key: value for key, value in facts.items() if value or type(value) is int}
        self._audit.tell(what, **whom, **by, at=context.peer(), **told)

    def warn(self, line: str) -> None:
        """Add a line about what somebody should see to, for reports to show."""
        if self._audit is not None:
            self._audit.tell("warned", line=line)

    def sent(
        self,
        context: Any,
        clients: Sequence[ClientId],
        header: rpc.PushHeader,
        wire: int,
        digest: bytes,
    ) -> None:
        """Add a line about a result that was taken, or what several clients brought together."""
        sha256 = digest.hex() if self._secret is None else self._secret.keyed(digest.hex())
        whose: dict[str, Any] = {"clients": list(clients)} if header.members else {}
        self.tell(
            "sent", context, None if whose else clients[0], **whose,
            interaction=header.interaction, kind=rpc.OrderKind.Name(header.kind)[11:].lower(),
            bytes=wire, sha256=sha256, failure=header.failure, summed=header.summed,
        )  # fmt: skip

    def write(self) -> None:
        """Write the lines that were told since the last time."""
        if self._audit is None:
            return
        try:
            self._audit.write()
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.error("%s cannot be written: %s", self._audit.path, error.strerror)
            self._has_failed = True

    def history(self, known: int) -> rpc.History | None:
        """Return what a caller does not know of the run's history."""
        if self._chain is None:
            return None
        head, digests = self._chain.since(known)
        return rpc.History(head=rpc.Head(number=head.number, link=head.link), digests=digests)

    def head(self) -> rpc.Head | None:
        """Return the newest head that is safe on the disk."""
        if self._chain is None:
            return None
        return rpc.Head(number=self._chain.safe.number, link=self._chain.safe.link)


EVERY_S = 60.0
_GRPC = ("grpc._common", "grpc._server")
"""Loggers of gRPC that write a traceback for each call that goes wrong."""


@dataclass
class _Kind:
    """Complaints of one kind since the last line about it."""

    logged_at: float
    unlogged: int = 0


class RejectionLog(logging.Filter):
    """Logs the first complaint of a kind and counts the others, a line a minute for each kind.

    It is also a filter of gRPC's loggers. A request that cannot be parsed is its sender's fault,
    so its line has no traceback. An exception of our own keeps its traceback, the first time in a
    minute.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._log, self._clock = log, clock
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()

    def tell(self, kind: str, line: str) -> None:
        """Complain about one call; ``kind`` is one of a few words, such as a status code."""
        unlogged = self._due(kind)
        if unlogged is not None:
            more = f" (and {unlogged} more such calls since the last line)" if unlogged else ""
            self._log.warning("%s: %s%s", kind, printable(line), more)

    def _due(self, kind: str) -> int | None:
        """Return the number of unlogged complaints of this kind, if it is time for a line.

        ``None`` means that the last line is less than a minute old; the complaint is counted.
        """
        now = self._clock()
        with self._lock:
            known = self._kinds.get(kind)
            if known is not None and now - known.logged_at < EVERY_S:
                known.unlogged += 1
                return None
            self._kinds[kind] = _Kind(now)
            return known.unlogged if known else 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Handle a record of gRPC's loggers; tell whether it may pass unchanged."""
        if not record.exc_info:
            return True
        error = record.exc_info[1]
        if record.name == "grpc._common":
            self.tell("UNPARSABLE", f"a message cannot be parsed: {error}")
            return False
        return self._due(f"{record.name} {type(error).__name__}") is not None

    def open(self) -> None:
        """Start filtering gRPC's loggers."""
        for name in _GRPC:
            logging.getLogger(name).addFilter(self)

    def close(self) -> None:
        """Stop filtering gRPC's loggers, and log the complaints counted since the last line."""
        for name in _GRPC:
            logging.getLogger(name).removeFilter(self)
        with self._lock:
            unlogged = {
                kind: found.unlogged for kind, found in self._kinds.items() if found.unlogged
            }
            self._kinds.clear()
        for kind, count in unlogged.items():
            self._log.warning("%s: %d more such calls", kind, count)
