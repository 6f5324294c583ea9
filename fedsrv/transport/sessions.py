"""Sessions of clients, and the Pulls that wait for them."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from fedmodels.errors import PayloadError
from fedmodels.printable import printable
from fedmodels.tensors.bundle import EVALUATOR, ClientId

NEWS_EVERY_S = 1.0


class AlreadyConnected(Exception):
    """The id is connected, and the caller's token is not its session's."""


class UnknownSession(Exception):
    """There is no session with this id and token."""


class RunOver(Exception):
    """The run has ended, and its end is committed."""


class RunHasFailed(Exception):
    """The run cannot go on; whoever takes part is told why, and leaves."""


class Superseded(Exception):
    """The order a result answers is no longer wanted."""


class NotReady(Exception):
    """The server cannot answer yet; the caller should try again in a moment."""


@dataclass
class ClientSession:
    """A client that has joined."""

    token: bytes
    client_json: str
    versions: tuple[int, ...]
    """Private states that the client holds; it may have pruned some below the watermark."""
    seen: float
    """Time of the client's last call, on the monotonic clock."""
    waiting: int = 0
    """Number of Pulls that wait for the client's orders now."""
    durable: int = -1
    issue: int = 0
    """Issue of the last order that the client got."""
    trained: int = -1
    """Interaction of the client's last upload."""
    start_over: bool = False
    """Whether the client agrees to go on from its initial private state."""
    last_news: float = -math.inf
    """Time of the last beat that became an event."""
    caller: Caller | None = None
    """The newest Pull that waits for the client; earlier ones get no more orders."""

    def is_news(self, now: float) -> bool:
        """Tell whether it is time for another progress event."""
        due = now - self.last_news >= NEWS_EVERY_S
        self.last_news = now if due else self.last_news
        return due

    def add_version(self, interaction: int) -> None:
        """Note that the client has trained in an interaction, and holds its private state."""
        self.trained = interaction
        self.versions = (*self.versions, interaction)


Sessions = Mapping[ClientId, ClientSession]
"""The sessions of some clients."""


@dataclass(eq=False)
class Caller:
    """A Pull, and the condition that wakes this Pull alone."""

    clients: Sessions
    changed: threading.Condition
    is_full: bool = False
    """Whether the caller has as many unanswered orders as it may have."""


def client_id_of(text: str, num_clients: int) -> ClientId:
    """Read a client id off the wire.

    Raises:
        PayloadError: it is neither the evaluator nor one of the run's clients.
    """
    if text == EVALUATOR:
        return EVALUATOR
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) and int(text) < num_clients:
        return int(text)
    said = printable(text, 60)
    raise PayloadError(f"client id {said!r} is none of this run's: 0 to {num_clients - 1}")
