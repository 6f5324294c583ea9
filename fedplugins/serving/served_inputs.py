"""Whether what a served model is asked is like the data that its client learned from.

Served inputs have no labels, so both sides take the class that the live model names: those of a
window of served inputs, and those of the test parts of the client's last tasks, which no model has
trained on. They are compared as tasks are (:mod:`fedmodels.numerics.data_drift`). The inputs of one
request are a session: those of one recording resemble each other.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcli.data.store.client_data import ClientData
from fedcli.predicting.live_model import Loaded
from fedmodels.config.transforms import channels_in
from fedmodels.errors import DataError
from fedmodels.facts.data_description import Normaliser
from fedmodels.host.guarded import Guarded
from fedmodels.nets.trained import TrainedModel
from fedmodels.numerics.alarm_levels import Alarms, Levels
from fedmodels.numerics.data_drift import MAX_EXAMPLES, Summary, Watched, moved
from fedmodels.numerics.data_drift_numbers import Numbers, Words
from fedplugins.serving.label_store import LabelStore

WINDOW = 200
"""Served inputs that are tested together."""
REFERENCE = 3
"""The last tasks whose test parts they are compared with."""
MEMORY = 100
"""Tests after which levels forget."""
PART, ALARMS = "input", "alarms"
Array = NDArray[Any]


@dataclass(frozen=True)
class Drift:
    """What the last window of served inputs showed."""

    amount: float
    """How far the number lies that moved most surely, from 0 to 1."""
    p: float
    line: str
    """What moved, in words."""
    alarm: bool
    """Whether an alarm is on."""

    def shown(self) -> Mapping[str, Any]:
        """Return it for a page."""
        return {"amount": round(self.amount, 4), "p": self.p, "line": self.line,
                "alarm": self.alarm}  # fmt: skip


class InputWatch:
    """The served inputs of one client's model; safe between threads."""

    _held: Guarded[list[Array]] = Guarded("_lock")

    def __init__(self, data: ClientData, store: LabelStore | None) -> None:
        """Begin with no inputs; alarms are those that the store kept."""
        self._data, self._store = data, store
        self._lock, self._held = threading.RLock(), []
        self._reference: tuple[object, list[Summary]] = (None, [])
        self._alarms = Alarms(Levels(MEMORY))
        if store is not None:
            self._alarms = store.kept(ALARMS, self._alarms, _alarms_of)
        self.last: Drift | None = None
        self.windows = 0
        """Windows that were tested."""

    def see(self, x: Array) -> list[Array] | None:
        """Take in the inputs of a request; return a window, by requests, if it is full."""
        with self._lock:
            self._held.append(x[:MAX_EXAMPLES])
            if sum(map(len, self._held)) < WINDOW:
                return None
            found, self._held = self._held, []
            return found

    def test(self, window: list[Array], now: Loaded) -> str:
        """Compare a window with the reference; return a line if people are to be told of it.

        Raises:
            ArchiveNotWritten: the alarms cannot be kept.
        """
        model = now.model
        served = np.concatenate(window)
        sessions = np.repeat(np.arange(len(window)), [*map(len, window)])
        try:
            reference = self._summaries(now)
            found = moved(reference, None, _summary(len(reference), model, served, sessions))
        except DataError:  # such as values beyond the model
            return ""
        self.windows += 1
        if found is None:
            return ""
        facts, names = model.facts, model.class_names
        words = Words(
            PART, tuple(facts.input_shape), _classes(model), channels_in(facts.transform), names
        )
        line = words.line(found.number, found.amount, found.p)
        is_told = self._alarms.tells(PART, found.p, found.amount)
        self.last = Drift(found.amount, found.p, line, PART in self._alarms.lasting)
        if self._store is not None:
            levels = self._alarms.levels
            kept = {"tests": levels.tests, "found": levels.found, "lasting": self._alarms.lasting}
            self._store.keep({ALARMS: kept})
        return line if is_told else ""

    def _summaries(self, now: Loaded) -> list[Summary]:
        """Return the summaries of the client's last tasks, with the classes that this model names.

        They are made anew for another model, and once the client has another task.
        """
        with suppress(DataError):
            if self._data.is_stale:
                self._data.refresh()
        key = now.sha256, self._data.num_tasks
        if self._reference[0] != key:
            found = list[Summary]()
            for task in reversed(range(self._data.num_tasks)):
                if len(found) == REFERENCE:
                    break
                if self._data.tasks[task].set_aside or not sum(self._data.tasks[task].test):
                    continue
                with suppress(DataError):  # test data may be deleted
                    x, _ = self._data.raw(task, "test")
                    found.append(_summary(task, now.model, _spread(x), None))
            self._reference = key, found[::-1]
        return self._reference[1]


def _spread(x: Array) -> Array:
    """Return at most ``MAX_EXAMPLES`` examples, in their order, from all parts of them."""
    if len(x) <= MAX_EXAMPLES:
        return np.asarray(x)
    return np.asarray(x[np.linspace(0, len(x) - 1, MAX_EXAMPLES).astype(np.int64)])


def _classes(model: TrainedModel) -> int:
    return 1 if model.targets is not None else len(model.class_names)


def _summary(task: int, model: TrainedModel, x: Array, sessions: Array | None) -> Summary:
    """Return the summary of raw inputs, by the classes that a model names."""
    facts = model.facts
    numbers = Numbers(tuple(facts.input_shape))
    values = numbers.of(torch.from_numpy(Normaliser.of(facts)(x)))  # type: ignore[arg-type]
    named = (
        torch.zeros(len(x), dtype=torch.int64)
        if model.targets is not None
        else torch.from_numpy(model.probabilities(x).argmax(1))
    )
    of = None if sessions is None else torch.from_numpy(sessions)
    return Summary.of(task, Watched(values, numbers.spreads, named, named, _classes(model), of))


def _alarms_of(kept: Any) -> Alarms:
    """Return alarms as a store has kept them."""
    lasting = {PART: float(kept["lasting"][PART])} if kept["lasting"] else {}
    return Alarms(Levels(MEMORY, int(kept["tests"]), tuple(map(int, kept["found"]))), lasting)
