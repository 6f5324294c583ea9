"""A scenario of a user's file: ``[scenario] kind = "my_scenario.py:deal"``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedcli.data.arrays import IntArray
from fedcli.data.cuts.cut_input import CutInput, Partition
from fedmodels.config.scenario import OwnScenario
from fedmodels.errors import ConfigError
from fedmodels.own.own_code import own, renew, told


def own_cut(scenario: OwnScenario, given: CutInput) -> Partition:
    """Return the partition that a user's function makes of a :class:`CutInput`.

    It returns a sequence for each client with an item for each of its tasks: indices (n,) of
    training examples, whose classes then say who gets which test examples, or a pair of those and
    indices (m,) of test examples.

    Raises:
        ConfigError: the function takes other keys than the config has, or deals out what is not
            there; begins with its name.
        DataError: it fails.
    """
    renew(scenario.kind)
    name, deal = f"[scenario] {scenario.kind}", own(scenario.kind)
    if not callable(deal):
        raise ConfigError(f"{name} is no function: it is {type(deal).__name__}")
    try:
        inspect.signature(deal).bind(given, **scenario.options())
    except TypeError as error:
        keys = ", ".join(scenario.options()) or "no further key"
        raise ConfigError(f"{name} is called with a CutInput and {keys}: {error}") from None
    for labels in (given.train, given.test):
        labels.flags.writeable = False  # who gets which test examples goes by them
    with told(name):
        made = [list(tasks) for tasks in deal(given, **scenario.options())]
    if [len(tasks) for tasks in made] != given.tasks:
        raise ConfigError(
            f"{name} returned {[len(tasks) for tasks in made]} tasks of its clients; [schedule] "
            f"clients and [scenario] tasks ask for {given.tasks}"
        )
    pairs = [
        (f"{name}: client {client}, task {task}", part)
        for client, tasks in enumerate(made)
        for task, part in enumerate(tasks)
    ]
    has_tests = {isinstance(part, tuple) for _, part in pairs}
    if has_tests == {False}:
        return given.with_held_tests(
            [_indices(part, len(given.train), f"{where}, training") for where, part in pairs]
        )
    if has_tests != {True} or any(len(part) != 2 for _, part in pairs):
        raise ConfigError(f"{name}: each task is indices, or each a pair (training, test) of them")
    return given.by_client(
        [_indices(part[0], len(given.train), f"{where}, training") for where, part in pairs],
        [_indices(part[1], len(given.test), f"{where}, test") for where, part in pairs],
    )


def _indices(found: Iterable[int], size: int, where: str) -> IntArray:
    """Return indices (n,) of different examples among ``size``; raise ConfigError for others."""
    with told(where):
        array: np.ndarray[Any, Any] = np.asarray(found)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"{where}: {array.dtype} {array.shape} are no indices of examples")
    indices = array.astype(np.int64)
    if indices.size and not (indices.min() >= 0 and indices.max() < size):
        wrong = indices[(indices < 0) | (indices >= size)][0]
        raise ConfigError(f"{where}: there is no example {wrong}; indices go from 0 to {size - 1}")
    if len(np.unique(indices)) < len(indices):
        raise ConfigError(f"{where}: an example is there twice")
    return indices
