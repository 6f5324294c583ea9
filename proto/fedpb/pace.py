"""How fast a link is, and how much is sent over it at once.

What is on its way over a slow link keeps everything else waiting, pings as well. So over such a
link little is on its way at a time, and what has come is kept: an upload travels in calls of some
seconds each, and the frames of an order are cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from fedmodels.errors import LinkError
from fedmodels.times import SLOW_S
from fedpb.told import Passed, Pushed
from fedpb.v1 import coordinator_pb2 as rpc

PART_BYTES = 64 << 10
"""The first part of an upload over a link that was not measured yet."""
PIECE_BYTES = 32 << 10
"""The first pieces of an order."""
UNSEEN_BYTES = 256 << 10
"""So much is taken by buffers on the way, and tells nothing of a link."""
LEAST_BYTES = 16 << 10
"""The least of a part or a piece."""


class Pace:
    """The rate of one way of a link; of one thread."""

    def __init__(self, first: int, seconds: float, unseen: int = 0) -> None:
        """Know nothing yet.

        Args:
            first: how many bytes are sent at once until something was measured.
            seconds: for how long is sent at once then.
            unseen: bytes of a transfer, at its beginning, that tell nothing.
        """
        self._first, self._at_once_s, self._unseen = first, seconds, unseen
        self.rate = 0.0
        """Bytes a second; 0 before anything was measured."""
        self._before, self._bytes, self._seconds = 0, 0, 0.0
        self._cap = first if unseen else 1 << 62
        """Of the next piece: while buffers fill, any link looks fast."""

    def begin(self) -> None:
        """Begin a transfer; what was measured before holds until it says more."""
        if not self.rate:  # transfers so small that they tell nothing have fewer pieces each time
            self._first = min(2 * self._first, max(self._first, self._unseen))
        self._before, self._bytes, self._seconds = 0, 0, 0.0

    def took(self, num_bytes: int, seconds: float) -> None:
        """Note how long some bytes took."""
        self._before += num_bytes
        if self._before > self._unseen:
            self._bytes, self._seconds = self._bytes + num_bytes, self._seconds + seconds
            self.rate = self._bytes / max(self._seconds, 1e-6)
            self._cap *= 2

    def most(self) -> int:
        """Return how many bytes to send at once."""
        if not self.rate:
            return self._first
        return max(LEAST_BYTES, min(self._cap, int(self.rate * self._at_once_s)))


class Parts:
    """An upload on its way: in one call, or in as many as its link needs.

    Whoever receives it keeps what has come, so that a call that breaks costs its own part at most.
    """

    def __init__(
        self,
        pushed: Pushed,
        pace: Pace,
        *,
        zstd: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing; ``pace`` is that of the link, upwards."""
        self._pushed, self._pace, self._zstd, self._clock = pushed, pace, zstd, clock
        self._begun = clock()
        self.at, self.size = 0, pushed.header.bundle.payload_bytes

    @property
    def num_bytes(self) -> int:
        """Return how many bytes the next call brings."""
        return min(self.size - self.at, self._pace.most())

    def send(self, call: Callable[[Iterator[Passed]], rpc.PushResponse]) -> rpc.PushResponse:
        """Make the next call, and measure it."""
        begun, num_bytes = self._clock(), self.num_bytes
        stop = self.at + num_bytes
        reply = call(self._pushed.messages(zstd=self._zstd, start=self.at, stop=stop))
        if num_bytes >= LEAST_BYTES:
            self._pace.begin()
            self._pace.took(num_bytes, self._clock() - begun)
        return reply

    def is_over(self, reply: rpc.PushResponse) -> bool:
        """Tell by the answer to a call whether the upload was taken; else the next one goes on.

        Raises:
            LinkError: the answer names bytes that there are not.
        """
        if not reply.HasField("received"):
            return True
        if reply.received >= max(self.size, 1):
            raise LinkError("the server holds more of an upload than there is, and wants the rest")
        self.at = reply.received
        return False

    @property
    def slow(self) -> str:
        """Return what is to be said of a link on which this takes long; empty of any other."""
        rate, left = self._pace.rate, self.size - self.at
        if not rate or self._clock() - self._begun + left / rate < SLOW_S:
            return ""
        return slow_text(self.at, self.size, self._clock() - self._begun)


def slow_text(done: int, size: int, seconds: float) -> str:
    """Return how far a transfer over a slow link is."""
    return f"slow link: {done / 1e6:.1f} of {size / 1e6:.1f} MB in {seconds:.0f} s"
