"""The part of its training examples that a client keeps for validation, and never trains on."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import IntArray, Labelled, check_examples, strata
from fedcli.data.store.client_data import GROUP, ClientData, save_arrays
from fedmodels.config.data import Data
from fedmodels.errors import DataError
from fedmodels.host.files import sync_path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Validation:
    """Which training examples a client keeps for validation: the last ones, as for testing."""

    share: float
    by_group: bool
    """Whether examples have groups, which stay whole."""
    gap: int = 0
    """Rows between what is trained on and these, as before test rows."""

    @classmethod
    def of(cls, data: Data | None) -> Validation | None:
        """Return what ``[data]`` says; None if clients train on all their training examples."""
        if data is None or data.validation_share is None:
            return None
        return cls(data.validation_share, data.has_groups, data.test_gap or 0)

    @property
    def folder(self) -> str:
        """Where a client of an open run stores them, beside the test data of their task."""
        return f"validation-{self.share:g}{'-groups' if self.by_group else ''}"

    def chosen(self, data: ClientData, task: int, y: IntArray) -> NDArray[np.bool_]:
        """Tell of each training example of a task whether it is kept for validation, (n,).

        Raises:
            DataError: examples should have groups, and have none.
        """
        from fedcli.data.cuts.held_out import last_of_each

        if not self.by_group:
            return last_of_each(strata(y), self.share)
        return self._kept_groups(data, task)

    def _kept_groups(self, data: ClientData, task: int) -> NDArray[np.bool_]:
        """Tell of each training example of a task whether its group is kept, (n,).

        Whoever was in the training part of an earlier task stays kept, or trained on.
        """
        wholes, table = self._wholes(data, task), data.people(task)
        if table is None:
            return _last(wholes, self.share)
        before, kept = self._before(data, task), np.zeros(len(wholes), dtype=bool)
        keys = dict(table[table[:, 1] == 0][:, [2, 0]].tolist())
        of_each = [before.get(keys.get(code)) for code in wholes.tolist()]
        new = np.array([one is None for one in of_each], dtype=bool)
        kept[~new] = [one for one in of_each if one is not None]
        kept[new] = _last(wholes[new], self.share)
        if kept.all():
            _tell(f"{data.directory}: all people of task {task} are kept for validation in earlier "
                  "tasks: some are trained on all the same")  # fmt: skip
            return _last(wholes, self.share)
        return kept

    def _before(self, data: ClientData, task: int) -> dict[int | None, bool]:
        """Return of each person in the training part of earlier tasks whether they are kept.

        Of training data that were deleted, it is what :meth:`store` stored.
        """
        known = data.kept_people.setdefault(self.folder, [{}])
        while len(known) <= task:
            number = len(known) - 1
            found, table = dict(known[-1]), data.people(number)
            if table is not None:
                keys = table[table[:, 1] == 0][:, [2, 0]].tolist()
                codes = self._kept_codes(data, number)
                for code, key in keys:
                    found.setdefault(key, code in codes)
            known.append(found)
        return known[task]

    def _kept_codes(self, data: ClientData, task: int) -> set[int]:
        """Return the numbers of the groups of a task that are kept."""
        stored = self._place(data, task) / f"{GROUP}.npy"
        if data.wholes(task) is None:
            return {*data.array(stored).tolist()} if stored.exists() else set()
        return {*self._wholes(data, task)[self._kept_groups(data, task)].tolist()}

    @staticmethod
    def _wholes(data: ClientData, task: int) -> IntArray:
        """Return the group (n,) of each training example; raise DataError if they have none."""
        wholes = data.wholes(task)
        if wholes is None:
            raise DataError(
                f"{data.directory}: task {task} does not say which group an example is of, as an "
                "earlier version cut it: cut the data anew"
            )
        return wholes

    def trains(self, data: ClientData, task: int, y: IntArray) -> NDArray[np.bool_]:
        """Tell of each training example of a task whether it is trained on, (n,).

        That is what is not kept, but for windows that share rows with a window that is: those are
        no further from one, in the order of their recording, than such windows can be.

        Raises:
            DataError: examples should have groups, and have none; or the transform of the files is
                malformed.
        """
        from fedcli.data.cuts.held_out import near_tests

        kept = self.chosen(data, task, y)
        hop, reach = _steps(data)
        reach += self.gap
        if self.by_group or reach <= hop:
            return ~kept
        wholes = data.wholes(task)
        of = np.zeros_like(kept, dtype=np.int64) if wholes is None else wholes
        if not self.gap:  # windows of two classes share none
            of = of * (int(strata(y).max(initial=0)) + 1) + strata(y)
        order = np.argsort(of, kind="stable")
        places = np.empty_like(of)
        places[order] = np.arange(len(of)) * hop
        trains = ~kept & ~near_tests(of, places, kept, reach)
        if not trains.any():
            _tell(f"{data.directory}: each window of task {task} shares rows with one that is kept "
                  "for validation: they are trained on all the same")  # fmt: skip
            return ~kept
        lost = np.setdiff1d(y[~kept], y[trains]).tolist() if y.ndim == 1 else []
        if lost:
            names = data.file.class_names
            named = ", ".join(names[k] if names else str(k) for k in lost)
            _tell(f"{data.directory}: no window of {named} in task {task} is trained on: each is "
                  "too near to one that is kept for validation")  # fmt: skip
        return trains

    def examples(self, data: ClientData, task: int) -> Labelled | None:
        """Return inputs (n, *input_shape) and labels (n,) of what is kept of a task.

        Of training data that were deleted, it is what :meth:`store` stored; None where nothing is.

        Raises:
            DataError: files are missing, or do not hold what they must.
        """
        if not data.is_gone(task, "train"):
            x, y = data.arrays(task, "train")
            chosen = self.chosen(data, task, y)
            return x[chosen], y[chosen]
        x_at, y_at = (self._place(data, task) / f"{name}.npy" for name in "xy")
        if not y_at.exists():
            return None
        x, y = data.array(x_at), data.array(y_at)
        check_examples(x_at, y_at, x, y, data.file)
        counts = np.bincount(strata(y), minlength=data.file.num_classes)
        if (counts > data.tasks[task].train).any():
            raise DataError(f"{y_at} holds more examples than client.json gives for task {task}")
        return x, data.labels(y, y_at)

    def store(self, data: ClientData, task: int) -> None:
        """Store what is kept of a task beside its test data, whole or not at all.

        The training data may be deleted later. Those of a store stay where they are: nothing of it
        can be deleted by itself.

        Raises:
            DataError: the training data are missing or damaged.
            OSError: the folder cannot be written.
        """
        place = self._place(data, task)
        if not place.parent.is_dir() or place.exists() or data.is_gone(task, "train"):
            return
        _, labels = data.arrays(task, "train")  # what is not as client.json says is not stored
        chosen = self.chosen(data, task, labels)
        x, y = data.raw(task, "train")
        written = place.with_name(f"{place.name}.part")
        shutil.rmtree(written, ignore_errors=True)  # a crash left it
        written.mkdir()
        stored = {"x": x[chosen], "y": y[chosen]}
        if self.by_group:
            stored[GROUP] = self._wholes(data, task)[chosen]
        save_arrays(written, stored)
        os.rename(written, place)
        sync_path(place.parent)

    def _place(self, data: ClientData, task: int) -> Path:
        return data.directory / f"task-{task}" / self.folder


def _last(wholes: IntArray, share: float) -> NDArray[np.bool_]:
    """Tell which of some examples are of the last groups (n,), about a share of them."""
    from fedcli.data.cuts.held_out import last_groups

    return last_groups(np.zeros_like(wholes), wholes, share)


@cache
def _tell(line: str) -> None:
    """Say a line, once in a process."""
    log.warning("note: %s", line)


def _steps(data: ClientData) -> tuple[int, int]:
    """Return the rows from a window to the next one, and to the first that shares none with it."""
    from fedcli.data.sets.registry import DATASETS  # only a run with a validation part asks
    from fedmodels.config.transforms import TableTransform, parse_transform

    how = parse_transform(data.file.transform, data.directory)
    if isinstance(how, TableTransform):
        window = how.columns.window or 1
        return how.columns.hop or window, window + (how.columns.horizon or 0)
    known = DATASETS.get(data.file.dataset)
    return (1, 2) if known is not None and known.overlaps else (1, 1)
