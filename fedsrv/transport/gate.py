"""What every call passes first, so that no caller holds a thread of the server for too long.

A synchronous server gives each call a thread before the first message arrives. So a call has some
seconds for its first message, and few calls may wait for theirs at a time. When one more comes, the
gate ends the oldest: an honest caller speaks at once. Longer calls have bounds of their own, by
session, by number, or by time. Of bad calls the program's log gets one line a minute of each kind.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from fedmodels.console.printable import printable
from fedmodels.host.guarded import Guarded
from fedmodels.times import (
    CALLS_LOOK_S,
    FIRST_MESSAGE_S,
    FIRST_UPLOAD_S,
    REFUSALS_EVERY_S,
    REPLACED_S,
    STREAM_S,
)

MAX_STRANGERS = 32
"""Number of calls that may wait for their first message, beside one for each client."""
MAX_OF = {
    "/grpc.health.v1.Health/Watch": 4,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": 4,
}
"""Limit of streams without a session, for each kind."""
Context: TypeAlias = grpc.ServicerContext
Admitted: TypeAlias = Callable[[str, Context], contextlib.AbstractContextManager[None]]


class Gate(grpc.ServerInterceptor):  # type: ignore[misc]
    """Admits calls, and ends calls that last too long."""

    _until: Guarded[dict[Context, float]] = Guarded("_lock")
    """Deadline of each call; the gate ends calls that pass it."""
    _opening: Guarded[dict[Context, str]] = Guarded("_lock")
    """Calls that wait for their first message, oldest first, with their peers."""
    _streams: Guarded[Counter[str]] = Guarded("_lock")
    _holders: Guarded[dict[Hashable, list[Context]]] = Guarded("_lock")
    _replaced: Guarded[set[Context]] = Guarded("_lock")
    """Calls whose place another one took."""

    def __init__(
        self,
        clients: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        admitted: Admitted = lambda method, context: contextlib.nullcontext(),
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Let nobody wait yet.

        Args:
            clients: how many there may be.
            clock: the monotonic clock.
            admitted: makes a context of each call's name and gRPC context, which lasts as long as
                the call; entering it raises where the call is refused.
            look: called every half second.
        """
        self._clock, self._admitted, self._look = clock, admitted, look
        self._most_opening = clients + MAX_STRANGERS
        self._lock = threading.RLock()
        self._until, self._opening, self._streams, self._holders = {}, {}, Counter(), {}
        self._replaced = set()
        self._closed = threading.Event()
        self._watching: threading.Thread | None = None
        """Of whoever starts and closes the gate."""

    @property
    def threads(self) -> int:
        """Return the number of threads for calls without a session, with some for short calls."""
        return self._most_opening + sum(MAX_OF.values()) + 16

    def start(self) -> None:
        """Start the thread that ends calls past their deadline."""
        self._watching = threading.Thread(target=self._watch, name="gate", daemon=True)
        self._watching.start()

    def close(self) -> None:
        """Stop the thread that :meth:`start` started, and wait for its last look."""
        self._closed.set()
        if self._watching is not None:
            self._watching.join()

    def _watch(self) -> None:
        while not self._closed.wait(CALLS_LOOK_S):
            self.end_overdue()
            self._look()

    def end_overdue(self) -> None:
        """End the calls that are past their deadline by now."""
        now = self._clock()
        with self._lock:
            overdue = [context for context, until in self._until.items() if until <= now]
        for context in overdue:
            context.cancel()

    # --- what calls pass --------------------------------------------------------------------------

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Wait for a call's first message, and count calls of its kind, before its handler runs."""
        handler = continuation(details)
        return None if handler is None else self._guarded(details.method, handler)

    def _guarded(self, method: str, handler: Any) -> grpc.RpcMethodHandler:
        """Return a handler that takes its request as a stream; the wire is the same."""
        call = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        parse = handler.request_deserializer or (lambda data: data)

        def request(first: bytes, rest: Iterator[bytes], context: Context) -> Any:
            if handler.request_streaming:
                return map(parse, itertools.chain([first], rest))
            try:
                return parse(first)
            except DecodeError:
                return context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no request")

        def unary(stream: Iterator[bytes], context: Context) -> Any:
            with self._admitted(method, context):
                first = self._first(method, stream, context)
                with self._counted(method, context):
                    return call(request(first, stream, context), context)

        def streaming(stream: Iterator[bytes], context: Context) -> Iterator[Any]:
            with self._admitted(method, context):
                first = self._first(method, stream, context)
                with self._counted(method, context):
                    yield from call(request(first, stream, context), context)

        if handler.response_streaming:
            made = grpc.stream_stream_rpc_method_handler(
                streaming, None, handler.response_serializer
            )
        else:
            made = grpc.stream_unary_rpc_method_handler(unary, None, handler.response_serializer)
        return made

    def _first(self, method: str, stream: Iterator[bytes], context: Context) -> bytes:
        """Return a call's first message; end the call if it is late or its place is needed."""
        uploads = method.endswith(("/Push", "/PushSeveral"))
        seconds = FIRST_UPLOAD_S if uploads else FIRST_MESSAGE_S
        with self.within(context, seconds):
            with self._lock:
                crowd = [*self._opening] if len(self._opening) >= self._most_opening else []
                if crowd:
                    worst = Counter(self._opening.values()).most_common(1)[0][0]
                    oldest = next(c for c in crowd if self._opening[c] == worst)
                    del self._opening[oldest]
                    oldest.cancel()
                self._opening[context] = context.peer()
            try:
                first = next(stream, None)
            finally:
                with self._lock:
                    self._opening.pop(context, None)
        if first is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a message")
        assert first is not None
        return first

    @contextlib.contextmanager
    def _counted(self, method: str, context: Context) -> Iterator[None]:
        """Refuse a stream beyond the limit of its kind; give each stream its deadline."""
        most = MAX_OF.get(method)
        if most is None:
            yield
            return
        with self._lock:
            has_place = self._streams[method] < most
            self._streams[method] += has_place
        if not has_place:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {most} of these already")
        try:
            with self.within(context, STREAM_S):
                yield
        finally:
            with self._lock:
                self._streams[method] -= 1

    # --- for calls with a session -----------------------------------------------------------------

    @contextlib.contextmanager
    def within(self, context: Context, seconds: float) -> Iterator[None]:
        """End a call that stays in this block for too long."""
        with self._lock:
            before = self._until.get(context)
            self._until[context] = self._clock() + seconds
        try:
            yield
        finally:
            with self._lock:
                del self._until[context]
                if before is not None:
                    self._until[context] = before

    def renew(self, context: Context, seconds: float) -> None:
        """Give a call in :meth:`within` so long from now on, unless another took its place."""
        with self._lock:
            if context in self._until and context not in self._replaced:
                self._until[context] = self._clock() + seconds

    @contextlib.contextmanager
    def alone(self, keys: list[Hashable], context: Context) -> Iterator[None]:
        """Let one call at a time hold a key; the call before has a moment to end by itself."""
        ended = set[Context]()
        with self._lock:
            for key in keys:
                holders = self._holders.setdefault(key, [])
                ended.update(holders[:-1])
                self._replaced.update(holders)
                for last in holders[-1:]:
                    until = self._clock() + REPLACED_S
                    self._until[last] = min(until, self._until.get(last, until))
                holders.append(context)
        for old in ended:
            old.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._until.pop(context, None)
                self._replaced.discard(context)
                for key in keys:
                    self._holders[key].remove(context)
                    if not self._holders[key]:
                        del self._holders[key]


log = logging.getLogger(__name__)


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

    _kinds: Guarded[dict[str, _Kind]] = Guarded("_lock")

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._log, self._clock = log, clock
        self._kinds, self._lock = {}, threading.RLock()

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
            if known is not None and now - known.logged_at < REFUSALS_EVERY_S:
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
