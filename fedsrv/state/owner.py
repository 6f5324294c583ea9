"""One thread that owns what others may not touch, and does in order what they ask of it.

What a lock would guard, an owner does alone. Whoever wants something done hands it over with
:meth:`Owner.run`, and waits, or with :meth:`Owner.queue`, and goes on. A class names its owner in
``self.owner``, marks its methods by :func:`owned`, and the values that belong to that thread by
:class:`Owned`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Owner:
    """A thread that does one thing after the other; safe between threads."""

    def __init__(self, name: str) -> None:
        """Start the thread; ``name`` is what debuggers call it."""
        self._calls = ThreadPoolExecutor(1, name)
        self._thread = self._calls.submit(threading.get_ident).result()

    @property
    def is_here(self) -> bool:
        """Whether this is the owner's thread."""
        return threading.get_ident() == self._thread

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something on the owner's thread; return its result, or raise its error."""
        if self.is_here:
            return call(*args, **kwargs)
        return self.queue(call, *args, **kwargs).result()

    def queue(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Let something be done on the owner's thread after what was asked for before."""
        return self._calls.submit(call, *args, **kwargs)

    def close(self) -> None:
        """End the thread, after everything that was asked for."""
        self._calls.shutdown()


def owned(method: F) -> F:
    """Let a method run on the thread of its object's ``owner``, whoever calls it."""

    @functools.wraps(method)
    def on_its_thread(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner: Owner = self.owner
        return owner.run(method, self, *args, **kwargs)

    return cast(F, on_its_thread)


class Owned(Generic[T]):
    """A value of an object that the thread of its ``owner`` alone may touch.

    Another thread that touches it fails an assertion; ``python -O`` leaves that out.
    """

    def __set_name__(self, kind: type, name: str) -> None:
        """Learn the attribute's name."""
        self._name = name

    def __get__(self, one: Any, kind: type | None = None) -> T:
        """Return the value."""
        assert one.owner.is_here, f"{self._name} belongs to another thread"
        found: T = one.__dict__[self._name]
        return found

    def __set__(self, one: Any, value: T) -> None:
        """Take another value."""
        assert one.owner.is_here, f"{self._name} belongs to another thread"
        one.__dict__[self._name] = value
