"""Values that threads share under a lock, which is named where the value is."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar

T = TypeVar("T")
VARIABLE = "FEDTIDE_GUARDED"
"""Of the environment; tests set it, and what they start inherits it."""
checked = bool(os.environ.get(VARIABLE))
"""Whether each access is checked."""


class Guarded(Generic[T]):
    """An attribute of an object: whoever touches it holds the lock that the object keeps.

    ``call: Guarded[Call | None] = Guarded("lock")`` names the attribute ``lock``, an RLock or a
    Condition over one. Who made the object may set a first value without it.
    """

    def __init__(self, lock: str) -> None:
        self._lock = lock

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        if checked:
            self._check(instance)
        found: T = instance.__dict__[self._name]
        return found

    def __set__(self, instance: Any, value: T) -> None:
        if checked and self._name in instance.__dict__:
            self._check(instance)
        instance.__dict__[self._name] = value

    def _check(self, instance: Any) -> None:
        what = f"{type(instance).__name__}.{self._name}"
        assert getattr(instance, self._lock)._is_owned(), f"{what} without {self._lock}"
