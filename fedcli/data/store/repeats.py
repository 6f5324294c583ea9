"""What comes of a client's earlier tasks again: rows that are known, people that were put before.

Rows that earlier tasks have are left out, refused or kept (``[data] repeats``) before a part is
chosen for testing; each person stays in the part of their first task.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import Inputs, IntArray, content_hashes
from fedcli.data.cuts.held_out import Put
from fedcli.data.sets.dataset import Dataset
from fedcli.data.store.known_rows import KnownRows, named
from fedcli.data.store.people import keys_of, put_before, salt_of
from fedmodels.config.data import Repeats
from fedmodels.errors import DataError

ALIKE = 0.1
"""Share of the rows of a source that may be in it twice. Beyond it, as with a few columns of whole
numbers, equal rows are no sign that one was there before: nothing is left out."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compared:
    """What became of a source once it was compared with earlier tasks."""

    again: int = 0
    """How many of its examples earlier tasks have."""
    of_tests: int = 0
    """How many of these are test examples there."""
    keeps: bool = False
    """Whether they are kept."""
    why_kept: str = ""


@dataclass
class Before:
    """What a client has had before a source comes (:class:`fedcli.data.sets.source.Earlier`)."""

    rows: KnownRows
    rule: Repeats
    source: Path
    fill: tuple[float, ...] | None = None
    found: Compared | None = None
    """What the comparison gave, once the source was compared."""
    by_rows: dict[str, bool] = field(default_factory=dict)
    """Of people whose rows earlier tasks have, whether these are for testing there."""

    @property
    def classes(self) -> Sequence[str]:
        """The client's classes by now."""
        return self.rows.held.file.classes

    def new(
        self, x: Inputs, wholes: IntArray | None = None, names: Sequence[str] = ()
    ) -> NDArray[np.bool_]:
        """Tell which examples (n, *input_shape) stay in the source, (n,).

        Raises:
            DataError: the rule refuses what is there again, or nothing new is left.
        """
        hashes = content_hashes(x)
        had, tested = self.rows.among(hashes)
        if wholes is not None and names:
            for code in np.unique(wholes[had]).tolist():
                self.by_rows[names[code]] = bool(tested[had & (wholes == code)].all())
        every = np.ones(len(x), dtype=bool)
        again, of_tests = int(had.sum()), int(tested.sum())
        self.found = Compared(again, of_tests, keeps=bool(again))
        if not again or self.rule == "keep":
            return every
        if self.rule == "refuse":
            raise DataError(
                f"{self.source}: {again} of its {len(x)} examples are in earlier tasks already: "
                'leave them out, or set [data] repeats = "skip"'
            )
        twice = 1 - len(np.unique(hashes)) / len(hashes)
        if twice > ALIKE:
            why = f": {twice:.0%} of its rows are there twice, so equal rows may be different ones"
            self.found = Compared(again, of_tests, keeps=True, why_kept=why)
            return every
        self.found = Compared(again, of_tests)
        if had.all():
            raise self.nothing_new(len(x))
        return ~had

    def nothing_new(self, count: int) -> DataError:
        """Return the error of a source of so many examples, none of which can be trained on."""
        assert self.found is not None
        return DataError(
            f"{self.source} holds nothing new to train on: {self.found.again} of its {count} "
            "examples are in earlier tasks already"
        )

    @cached_property
    def _people(self) -> tuple[bytes | None, dict[int, bool], list[int]]:
        held = self.rows.held
        return salt_of(held), *put_before(held)

    def put(self, names: Sequence[str]) -> Put | None:
        """Return in which part people of these names are already; None if they have no names."""
        if not names:
            return None
        salt, known, unknown = self._people
        keys = [] if salt is None else keys_of(names, salt).tolist()
        parts = np.full(len(names), -1, dtype=np.int64)
        for code, key in enumerate(keys):
            parts[code] = known.get(key, -1)
        if unknown:
            for code in np.flatnonzero(parts < 0).tolist():
                parts[code] = self.by_rows.get(names[code], -1)
            log.warning(
                "note: %s: %s of the client do not say whose their examples are, as an earlier "
                "version made them: who comes again is known where a row of theirs does",
                self.source, named(unknown),
            )  # fmt: skip
        return Put(parts, len(known), sum(known.values()))


def compared(dataset: Dataset, before: Before) -> Dataset:
    """Return a source that has a test part of its own without what its client has had.

    Raises:
        DataError: the rule refuses what is there again, or nothing new is left to train on.
    """
    size, names = len(dataset.train.y), dataset.whole_names
    new = before.new(np.concatenate([dataset.train.x, dataset.test.x]), dataset.whose, names)
    if not new[:size].any():
        raise before.nothing_new(len(new))
    left = dataset.at(np.flatnonzero(new[:size]), np.flatnonzero(new[size:]))
    if (put := before.put(names)) is not None:
        _tell_moved(left, put, before.source)
    return left


def _tell_moved(dataset: Dataset, put: Put, source: Path) -> None:
    """Say how many people a source trains on whom earlier tasks test, and the other way round."""
    for part, other, does in (
        (dataset.train, 1, "trained on here, and tested"),
        (dataset.test, 0, "tested here, and trained on"),
    ):
        if part.wholes is not None and (
            count := int((put.parts[np.unique(part.wholes)] == other).sum())
        ):
            log.warning(
                "note: %s: %d people are %s in earlier tasks, as the source says its test part "
                "itself: what is measured of them is flattered", source, count, does,
            )  # fmt: skip
