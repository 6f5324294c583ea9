"""What a new task holds again of earlier ones: left out, refused or kept (``[data] repeats``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedcli.data.arrays import content_hashes
from fedcli.data.cuts.held_out import last_of_each
from fedcli.data.sets.dataset import Dataset, Examples, both
from fedcli.data.store.known_rows import KnownRows
from fedmodels.config.data import Repeats
from fedmodels.errors import DataError

ALIKE = 0.1
"""Share of the rows of a source that may be in it twice. Beyond it, as with a few columns of whole
numbers, equal rows are no sign that one was there before: nothing is left out."""


@dataclass(frozen=True)
class Compared:
    """What becomes of a source once it is compared with earlier tasks."""

    dataset: Dataset
    again: int = 0
    """How many of its examples earlier tasks have."""
    of_tests: int = 0
    """How many of these are test examples there."""
    keeps: bool = False
    """Whether they are kept."""
    why_kept: str = ""


def compared(
    dataset: Dataset, rows: KnownRows, rule: Repeats, source: Path, share: float | None
) -> Compared:
    """Compare a source with what its client has had, and do as the rule says.

    Where examples are left out, the part for testing is chosen anew among those that are left:
    the last ``share`` of each class. None leaves the parts as they are.

    Raises:
        DataError: the rule refuses what is there again, or nothing new is left.
    """
    sizes = len(dataset.train.y), len(dataset.test.y)
    hashes = np.concatenate([content_hashes(x) for x in (dataset.train.x, dataset.test.x)])
    had, tested = rows.among(hashes)
    again, of_tests = int(had.sum()), int(tested.sum())
    if not again:
        return Compared(dataset)
    twice = 1 - len(np.unique(hashes)) / len(hashes)
    if rule == "refuse":
        raise DataError(
            f"{source}: {again} of its {sum(sizes)} examples are in earlier tasks already: leave "
            'them out, or set [data] repeats = "skip"'
        )
    if rule == "keep":
        return Compared(dataset, again, of_tests, keeps=True)
    if twice > ALIKE:
        why = f": {twice:.0%} of its rows are there twice, so equal rows may be different ones"
        return Compared(dataset, again, of_tests, keeps=True, why_kept=why)
    new = ~had
    if not new[: sizes[0]].any() and (share is None or not new.any()):
        raise DataError(
            f"{source} holds nothing new to train on: {again} of its {sum(sizes)} examples are in "
            "earlier tasks already"
        )
    left = dataset.at(np.flatnonzero(new[: sizes[0]]), np.flatnonzero(new[sizes[0] :]))
    return Compared(left if share is None else split_anew(left, share), again, of_tests)


def split_anew(dataset: Dataset, share: float) -> Dataset:
    """Return a data set whose last examples of each class are for testing.

    Both parts stand in the order of time, and those for testing come last.
    """
    whole = Examples(
        np.concatenate([dataset.train.x, dataset.test.x]),
        np.concatenate([dataset.train.y, dataset.test.y]),
        transform=dataset.transform,
        wholes=both(dataset.train.wholes, dataset.test.wholes),  # sessions
    )
    held = last_of_each(whole.y, share)
    return replace(dataset, train=whole.at(~held), test=whole.at(held))
