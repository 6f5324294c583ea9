"""Who may call: the seam between a server's calls and the certificates that callers show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fedmodels.facts.client_ids import ClientId


class NotYours(Exception):
    """The caller's certificate does not allow the call, or does not cover this client id."""


@dataclass(frozen=True)
class Peer:
    """The verified certificate of a caller, as far as it matters."""

    uri: str | None
    """Its identity; None where it names none, or several."""
    serial: int
    until: datetime


class Guard:
    """Lets everybody pass, as without mutual TLS; see ``certificate_guard.py``."""

    requires_identity = False

    def peer(self, context: Any) -> Peer | None:
        """Return who calls; None where nobody shows a certificate."""

    @contextlib.contextmanager
    def admitted(self, call: str, context: Any) -> Iterator[None]:
        """Check that the caller may make a call, whose name is given; watch it until it ends.

        Raises:
            NotYours: its certificate was revoked, or is of another role.
        """
        yield

    def why_ended(self, peer: Peer) -> str:
        """Return when a certificate was revoked or expired, in words; empty if it holds."""
        return ""

    def check_covers(self, client: ClientId, context: Any) -> None:
        """Check that the caller may speak for a client; raise NotYours."""

    def check_joins_itself(self, context: Any) -> None:
        """Check that a caller who joins itself does not pass on others' calls; raise NotYours."""

    def look(self) -> None:
        """End the calls whose certificates have expired or been revoked since they began."""

    def warnings(self) -> list[str]:
        """Return a line for each certificate that ends soon, each of them once a day."""
        return []
