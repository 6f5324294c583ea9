"""What a server writes down of each call, and what it shows callers of the run's history."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from fedmodels.tensors.bundle import ClientId
from fedpb.failures import failed_by
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.guard import Guard
from fedsrv.state.audit import Audit
from fedsrv.state.chain import Chain
from fedsrv.state.store import Store

if TYPE_CHECKING:
    from fedmodels.numerics.secrecy import Secret

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

    @classmethod
    def of(cls, store: Store) -> Self:
        """Return the journal of a run."""
        return cls(store.evidence.audit, store.evidence.chain, store.secret)

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
            bytes=wire, sha256=sha256, summed=header.summed,
            failure=failed_by(header.reason, header.failure),
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
        safe = self._chain.safe
        return rpc.Head(number=safe.number, link=safe.link)
