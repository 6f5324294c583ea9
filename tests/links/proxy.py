"""A TCP proxy that treats each connection as badly as it is told, and remembers what it did.

What happens to a connection depends on its number and a seed alone, never on the time of day.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

CHUNK_BYTES = 16 << 10
PREFACE_BYTES = 24
"""What a client of HTTP/2 sends before its first frame."""
Way = Literal["up", "down"]
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


@dataclass(frozen=True)
class Fate:
    """What happens to one connection; the default is a good link."""

    delay_s: float = 0.0
    """Each piece waits up to so long, longer or shorter by the seed."""
    bytes_per_s: float = float("inf")
    cut: tuple[Way, int] | None = None
    """The connection breaks in the middle of this DATA frame, from 1, of what goes this way."""
    doubled: bool = False
    """The server gets what the client sends over a second connection, too."""
    late_s: float = 0.0
    """The connection reaches the server only after the next one has, if that comes in this time."""


Fates = Callable[[int], Fate]


def storm(seed: int, bad: int = 12) -> Fates:
    """Return the fates of a run: the first ``bad`` connections suffer anything there is."""

    def fate(number: int) -> Fate:
        draw = random.Random(f"{seed}-{number}")
        if number >= bad:
            return Fate()
        way: Way = draw.choice(("up", "down"))
        return Fate(
            delay_s=draw.choice((0.0, 0.01)),
            bytes_per_s=draw.choice((1e6, float("inf"))),
            cut=(way, draw.randint(1, 12)) if draw.random() < 0.75 else None,
            doubled=draw.random() < 0.25,
            late_s=float(draw.random() < 0.25),
        )

    return fate


class Middle:
    """Finds the middle of one DATA frame in a stream of HTTP/2."""

    HEAD_BYTES = 9

    def __init__(self, wanted: int, preface: int) -> None:
        self._wanted, self._skip = wanted, preface
        self._head = bytearray()
        self._until_cut: int | None = None

    def passing(self, data: bytes) -> int:
        """Return how many of the next bytes of the stream come before the cut."""
        at = 0
        while self._until_cut is None and at < len(data):
            step = min(self._skip, len(data) - at)
            self._skip -= step
            at += step
            part = data[at : at + self.HEAD_BYTES - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) == self.HEAD_BYTES:
                self._skip = int.from_bytes(self._head[:3], "big")
                self._wanted -= self._head[3] == 0
                if not self._wanted:
                    self._until_cut = at + self._skip // 2
                self._head.clear()
        if self._until_cut is None:
            return len(data)
        passed = min(self._until_cut, len(data))
        self._until_cut -= passed
        return passed


class Proxy:
    """Listens on a port of its own and passes on to another, in a thread of its own."""

    def __init__(self, port: int, fates: Fates, seed: int = 0) -> None:
        self.target, self.fates, self.seed = port, fates, seed
        self.done: Counter[str] = Counter()
        """How many connections came, were cut, doubled, let another pass, and so on."""
        self.silent = threading.Event()
        """Once set, nothing passes any more, and nobody is told."""
        self.port = 0
        self._passed: dict[int, asyncio.Event] = {}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Break every connection and end."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _accept(self, client: Reader, answers: Writer) -> None:
        """Pass one connection on, as its fate is."""
        number = self.done["connections"]
        self.done["connections"] += 1
        fate, opened, twins = self.fates(number), [answers], list[Writer]()
        ways: list[Coroutine[Any, Any, None]] = []
        try:
            await self._let_pass(number, fate)
            server, requests = await asyncio.open_connection("127.0.0.1", self.target)
            opened.append(requests)
            if fate.doubled:
                self.done["doubled"] += 1
                unheard, twin = await asyncio.open_connection("127.0.0.1", self.target)
                opened.append(twin)
                twins.append(twin)
                ways.append(_drop(unheard))
            ways.append(self._pump("up", number, client, requests, twins))
            ways.append(self._pump("down", number, server, answers, []))
            await _first_of(ways)
        except OSError:
            self.done["refused"] += 1
        except asyncio.CancelledError:
            self.done["open at the end"] += 1
        finally:
            for writer in opened:
                writer.transport.abort()

    async def _let_pass(self, number: int, fate: Fate) -> None:
        """Wait for the next connection, where this one is late; then tell the one before."""
        own = self._passed.setdefault(number, asyncio.Event())
        if fate.late_s:
            following = self._passed.setdefault(number + 1, asyncio.Event())
            try:
                await asyncio.wait_for(following.wait(), fate.late_s)
                self.done["late"] += 1
            except TimeoutError:
                self.done["late for nobody"] += 1
        own.set()

    async def _pump(
        self, way: Way, number: int, source: Reader, target: Writer, twins: list[Writer]
    ) -> None:
        """Pass on what goes one way, until it ends or is cut."""
        fate, draw = self.fates(number), random.Random(f"{self.seed}-{number}-{way}")
        middle = None
        if fate.cut and fate.cut[0] == way:
            middle = Middle(fate.cut[1], PREFACE_BYTES if way == "up" else 0)
        while data := await source.read(CHUNK_BYTES):
            if self.silent.is_set():
                continue
            await asyncio.sleep(fate.delay_s * draw.random() + len(data) / fate.bytes_per_s)
            passing = middle.passing(data) if middle else len(data)
            self.done[f"bytes {way}"] += passing
            for writer in (target, *twins):
                if not writer.transport.is_closing():
                    writer.write(data[:passing])
            await target.drain()
            if passing < len(data):
                self.done["cut"] += 1
                return


async def _drop(source: Reader) -> None:
    """Read what nobody hears; never end, as a twin's end is nobody's business."""
    with suppress(OSError):
        while await source.read(CHUNK_BYTES):
            pass
    await asyncio.Event().wait()


async def _first_of(ways: list[Coroutine[Any, Any, None]]) -> None:
    """Wait until one way has ended, then end the others."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
