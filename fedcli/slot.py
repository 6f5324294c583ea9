"""A place for one thing on its way from one thread to another."""

from __future__ import annotations

import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """As ``queue.Queue(1)``, which is written in Python and costs more than a small order does."""

    def __init__(self) -> None:
        """Begin with the place free."""
        self._things: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._room.put(None)

    def put(self, thing: T) -> None:
        """Put a thing there, as soon as the place is free."""
        self._room.get()
        self._things.put(thing)

    def get(self) -> T:
        """Take what is there, as soon as something is."""
        thing = self._things.get()
        self._room.put(None)
        return thing
