"""What happens in a run, told to whoever listens: the log, the launcher, a watcher."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fedmodels.console.printable import json_text
from fedmodels.host.guarded import Guarded

HAS_FAILED = "the run has failed: "
"""How the line begins that clients are told of a failed run, and end with."""
DONE = "finished"
"""Why a client leaves, in its own word, when the server told it that the run is over."""
Hear = Callable[["Event"], object]
"""Takes in an event, such as ``take`` of a display."""
Ending = Callable[[], None]
"""Ends what follows a run's events, once it has taken in all that was told."""


@dataclass(frozen=True)
class Event:
    """One thing that happened."""

    kind: str
    client: str = ""
    interaction: int = -1
    round: int = -1
    detail: dict[str, Any] = field(default_factory=dict)
    unix_time: float = 0.0

    def to_json(self) -> str:
        """Return the event as one line of JSON; a number that is not finite is null there."""
        return json_text(self.__dict__)

    @classmethod
    def from_json(cls, line: str) -> Event:
        """Return the event that :meth:`to_json` made a line of."""
        return cls(**json.loads(line))


class EventQueue:
    """A bounded queue of one listener's events; when full, it drops beats, then the oldest."""

    _events: Guarded[deque[Event | None]] = Guarded("_changed")
    _missed: Guarded[int] = Guarded("_changed")

    MAX, MAX_WITH_BEATS = 10_000, 1000

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events, self._missed = deque(), 0

    def put(self, event: Event | None) -> None:
        """Add an event, or None for the end."""
        with self._changed:
            if event is not None and event.kind == "beat":
                if len(self._events) >= self.MAX_WITH_BEATS:
                    self._missed += 1
                    return
            elif len(self._events) >= self.MAX:
                self._events.popleft()
                self._missed += 1
            self._events.append(event)
            self._changed.notify()

    def get(self) -> Event | None:
        """Wait for the next event; one that says how many were missed comes before those behind."""
        with self._changed:
            self._changed.wait_for(lambda: self._events)
            if self._missed:
                missed, self._missed = self._missed, 0
                return Event("missed", detail={"events": missed}, unix_time=time.time())
            return self._events.popleft()


class EventLog:
    """Remembers the last events and hands new ones to every listener; safe between threads."""

    _kept: Guarded[deque[Event]] = Guarded("_lock")
    _listeners: Guarded[set[EventQueue]] = Guarded("_lock")
    _closed: Guarded[bool] = Guarded("_lock")

    KEPT = 1000

    def __init__(self, hear: Hear | None = None) -> None:
        """Remember nothing yet; ``hear`` is called with each event before :meth:`tell` returns."""
        self._hear = hear
        self._lock = threading.RLock()
        self._kept, self._listeners, self._closed = deque(maxlen=self.KEPT), set(), False

    def tell(self, kind: str, client: object = "", **facts: Any) -> None:
        """Tell that something happened; ``interaction`` and ``round`` are fields of their own."""
        place = {key: facts.pop(key) for key in ("interaction", "round") if key in facts}
        event = Event(kind, str(client), detail=facts, unix_time=time.time(), **place)
        with self._lock:
            self._kept.append(event)
            for listener in self._listeners:
                listener.put(event)
        if self._hear is not None:
            self._hear(event)

    def listen(self, from_start: bool = False) -> Iterator[Event]:
        """Yield events as they come, until the log is closed."""
        box = EventQueue()
        with self._lock:
            for kept in self._kept if from_start else ():
                box.put(kept)
            if self._closed:
                box.put(None)
            self._listeners.add(box)
        try:
            while (event := box.get()) is not None:
                yield event
        finally:
            with self._lock:
                self._listeners.discard(box)

    def follow(self, take: Callable[[Event], None], name: str) -> Ending:
        """Hand every event to ``take``, in a thread of this name; return what ends that."""

        def work() -> None:
            for event in self.listen(from_start=True):
                take(event)

        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()

        def end() -> None:
            self.close()
            thread.join()

        return end

    def close(self) -> None:
        """End every listener's iteration."""
        with self._lock:
            self._closed = True
            for listener in self._listeners:
                listener.put(None)
