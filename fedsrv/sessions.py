"""Sessions of clients, and the Pulls that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from fedmodels.types import ClientId


class AlreadyConnected(Exception):
    """The id is connected, and the caller's token is not its session's."""


class UnknownSession(Exception):
    """There is no session with this id and token."""


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
    caller: Caller | None = None
    """The last Pull that waits for it; one before that gets nothing more."""


@dataclass(eq=False)
class Caller:
    """A Pull, and how it alone is told to look again."""

    clients: Mapping[ClientId, Member]
    told: threading.Condition
    is_full: bool = False
    """Whether it has as many orders as it may have ahead, and waits for one of them to be done."""
