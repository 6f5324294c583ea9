"""The classes of an open run: those that came, and the names that they got since.

A class keeps its label under another name. All names that it ever had stand for it as long as the
run lasts: sites go on calling it as they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self


class ClassChange(NamedTuple):
    """One change of the classes that a run has."""

    old: str
    """The name of a class."""
    now: str
    """The name that it has from now on."""


@dataclass(frozen=True)
class RunClasses:
    """The classes of a run at one moment."""

    first: tuple[str, ...]
    """Names of those that it began with, in label order, as they were then."""
    came: tuple[str, ...] = ()
    """Names of those that came since, as they were then."""
    changes: tuple[tuple[int, ClassChange], ...] = ()
    """Each with how many classes had come before."""

    def grown(self, came: Iterable[str], changes: Iterable[ClassChange] = ()) -> Self:
        """Return them after some changes, and with the classes that come then."""
        further = [(len(self.came), ClassChange(*one)) for one in changes]
        return type(self)(self.first, (*self.came, *came), (*self.changes, *further))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the present classes, in label order."""
        return tuple(self._found[0])

    @cached_property
    def labels(self) -> dict[str, int]:
        """Return the label of each name that a class has or had."""
        names, earlier = self._found
        places = {name: label for label, name in enumerate(names)}
        return places | {old: places[now] for old, now in earlier.items()}

    @property
    def earlier(self) -> Sequence[str]:
        """Return the names that classes had and have no more."""
        return [*self._found[1]]

    def called(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the present names of classes; names that the run does not know stay as they are.

        Two of a site's classes may be one class of the run.
        """
        known = self.labels
        return tuple(self.names[known[name]] if name in known else name for name in names)

    @cached_property
    def _found(self) -> tuple[list[str], dict[str, str]]:
        """The present names in label order, and the present name by each one of earlier."""
        names, earlier, changes = list(self.first), dict[str, str](), list(self.changes)
        for number in range(len(self.came) + 1):
            while changes and changes[0][0] == number:
                _, one = changes.pop(0)
                names[names.index(one.old)] = one.now
                earlier = {k: one.now if to == one.old else to for k, to in earlier.items()}
                earlier[one.old] = one.now
                earlier.pop(one.now, None)
            names += self.came[number : number + 1]
        if changes or len({*names}) < len(names):
            raise ValueError(
                "changes of classes that are not in their order, or names that come twice"
            )
        return names, earlier
