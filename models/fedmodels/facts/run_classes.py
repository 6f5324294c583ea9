"""The classes of an open run: those that came, the names that they got, and which became one.

A class keeps its label under another name. All names that it ever had stand for it as long as the
run lasts: sites go on calling it as they did. A class that becomes part of another one keeps its
label as well, for what is stored and for the rows of heads. No example has that label any more, and
what is taken for it is taken for the other class.
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
    """The name that it has from now on. Where another class has it, both are that one class."""


class _Found(NamedTuple):
    names: tuple[str, ...]
    rows: dict[str, int]
    merged: dict[int, int]


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

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes in label order; one that is part of another keeps its own."""
        return self._found.names

    @property
    def rows(self) -> dict[str, int]:
        """Return the label that each name had when it came: one for each class there ever was."""
        return self._found.rows

    @property
    def merged(self) -> dict[int, int]:
        """Return the label of the class that each label became part of."""
        return self._found.merged

    @cached_property
    def labels(self) -> dict[str, int]:
        """Return the label of each name that a class has or had."""
        return {name: self.merged.get(row, row) for name, row in self.rows.items()}

    @property
    def earlier(self) -> Sequence[str]:
        """Return the names that classes had and have no more."""
        return [name for name, label in self.labels.items() if self.names[label] != name]

    def merges(self, change: ClassChange) -> bool:
        """Tell whether one of the changes made a class part of another one."""
        row = self.rows[change.old]
        return row in self.merged and self.names[row] == change.old

    def called(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the present names of classes; names that the run does not know stay as they are.

        Two of a site's classes may be one class of the run.
        """
        known = self.labels
        return tuple(self.names[known[name]] if name in known else name for name in names)

    @cached_property
    def _found(self) -> _Found:
        """What became of the classes, one change after the other."""
        names, rows, merged = list[str](), dict[str, int](), dict[int, int]()
        changes = list(self.changes)
        for number, came in enumerate([self.first, *((name,) for name in self.came)]):
            rows |= {name: row for row, name in enumerate(came, len(names))}
            names += came
            while changes and changes[0][0] == number:
                _, one = changes.pop(0)
                row = names.index(one.old)
                into = names.index(one.now) if one.now in names else None
                if into == row or {row, into} & merged.keys():
                    raise ValueError("a change of a class that is part of another one")
                if into is None:
                    names[row], rows[one.now] = one.now, row
                else:
                    merged |= {part: into for part, to in merged.items() if to == row}
                    merged[row] = into
        if changes or len({*names}) < len(names):
            raise ValueError(
                "changes of classes that are not in their order, or names that come twice"
            )
        return _Found(tuple(names), rows, merged)
