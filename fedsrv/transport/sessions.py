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
    """The run has ended, and its end is committed: nothing more is to come."""


class Superseded(Exception):
    """The order a result answers is no longer wanted."""


class NotReady(Exception):
    """The server cannot say yet; the caller is to try again in a moment."""


@dataclass
class Member:
    """A client that has joined."""

    token: bytes
    client_json: str
    versions: tuple[int, ...]
    """Private states it holds, or held and may have pruned below the watermark."""
    seen: float
    """When it was last heard of, on the monotonic clock."""
    waiting: int = 0
    """Pulls that wait for it at this moment."""
    durable: int = -1
    issue: int = 0
    """Issue of the last order it was sent, or says it got."""
    trained: int = -1
    """Last interaction it brought an upload for."""
    start_over: bool = False
    """Whether it would rather go on from its initial private state than not at all."""
    told: float = -math.inf
    """When its last beat became an event."""
    caller: Caller | None = None
    """The last Pull that waits for it; one before that gets nothing more."""

    def is_news(self, now: float) -> bool:
        """Tell whether it is time for another event of how far it is."""
        due = now - self.told >= NEWS_EVERY_S
        self.told = now if due else self.told
        return due


@dataclass(eq=False)
class Caller:
    """A Pull, and how it alone is told to look again."""

    clients: Mapping[ClientId, Member]
    told: threading.Condition
    is_full: bool = False
    """Whether it has as many orders as it may have ahead, and waits for one of them to be done."""


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
