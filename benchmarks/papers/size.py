"""How long a run is: optimiser steps and examples of a client, computed from its config.

No data set is opened. A partition is dealt from labels alone, and labels follow from the classes'
sizes. Windows of sensors are dealt from as many clients with equal classes; how many windows a
client really has is not known without the data, so such a run has passes over the data alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import fmean

import numpy as np
from pydantic import TypeAdapter

from fedcli.data.arrays import IntArray
from fedcli.data.cuts.cut_input import Partition
from fedcli.data.cuts.partition import partition
from fedcli.data.sets.registry import load
from fedmodels.config.data import Data
from fedmodels.config.experiment import Experiment, MethodTable, NetTable
from fedmodels.config.origin import data_and_scenario
from fedmodels.config.scenario import Natural, Scenario
from fedmodels.methods import make
from fedmodels.nets import make_net
from fedmodels.nets.cost import multiply_adds
from fedmodels.tensors.bundle import Problem
from fedmodels.training.run import RunFacts


@dataclass(frozen=True)
class Shape:
    """A data set without its examples."""

    input_shape: tuple[int, ...]
    train: tuple[int, ...]
    """Training examples of each class."""
    test: tuple[int, ...]
    groups: int = 0
    """Natural clients; none unless it is of sensors."""


def _even(shape: tuple[int, ...], classes: int, train: int, test: int, groups: int = 0) -> Shape:
    return Shape(shape, (train,) * classes, (test,) * classes, groups)


MNIST = Shape(
    (1, 28, 28),
    (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
)
SHAPES = {
    "mnist": MNIST,
    "fashion-mnist": _even((1, 28, 28), 10, 6000, 1000),
    "femnist": _even((1, 28, 28), 62, 600, 100),
    "emnist-byclass": _even((1, 28, 28), 62, 1896, 270),  # the rarest class
    "cifar10": _even((3, 32, 32), 10, 5000, 1000),
    "cifar100": _even((3, 32, 32), 100, 500, 100),
    "tiny-imagenet": _even((3, 64, 64), 200, 500, 50),
    "uci-har": _even((128, 6), 6, 1000, 0, 30),
    "motionsense": _even((128, 6), 6, 1000, 0, 24),
    "wisdm": _even((128, 6), 6, 2000, 0, 100),
    "hhar": _even((128, 6), 6, 1000, 0, 36),
    "realworld": _even((128, 6), 8, 3000, 0, 105),
    "hhar+realworld": _even((128, 6), 9, 4000, 0, 141),
}
"""Sizes that the data sets' publishers state; those of sensors stand for unknown ones."""


@dataclass(frozen=True)
class Size:
    """What a client does in a run, on average over clients and cohorts."""

    passes: float
    """Over the data of its tasks."""
    steps: float | None
    """Of the optimiser; not known for windows of sensors."""
    examples: float | None


def shape_of(data: Data) -> Shape:
    """Return what a data set is, as far as its config keeps it."""
    if data.name == "digits":
        found = load(Data(name="digits"))
        counts = (np.bincount(y, minlength=10).tolist() for y in (found.train.y, found.test.y))
        known = Shape((1, 8, 8), *map(tuple, counts))
    else:
        known = SHAPES[data.name]
    apart = (data.server_examples or 0) + (data.server_unlabelled or data.server_examples or 0)
    return Shape(
        known.input_shape,
        _kept(known.train, data.max_per_class, apart),
        _kept(known.test, data.max_test_per_class, 0),
        known.groups,
    )


def _kept(counts: Sequence[int], most: int | None, apart: int) -> tuple[int, ...]:
    return tuple(min(n - apart, most or n) for n in counts)


def problem_of(data: Data) -> Problem:
    """Return what is learned from a data set."""
    shape = shape_of(data)
    return Problem(shape.input_shape, len(shape.train))


def dealt(experiment: Experiment) -> Partition:
    """Deal a data set of these sizes out as a config says; labels are all that it takes.

    Raises:
        ConfigError: the scenario does not fit.
    """
    data, scenario = data_and_scenario(experiment)
    key = (data.model_dump_json(), scenario.model_dump_json(exclude={"training_data"}))
    return _dealt(*key, experiment.schedule.clients)


@lru_cache(maxsize=64)
def _dealt(data: str, scenario: str, clients: int) -> Partition:
    table = TypeAdapter(Scenario).validate_json(scenario)
    shape = shape_of(Data.model_validate_json(data))
    train, test = (np.repeat(np.arange(len(n)), n) for n in (shape.train, shape.test))
    coarse = np.arange(len(shape.train)) // 5 if len(shape.train) == 100 else None
    groups: IntArray | None = None
    if shape.groups:
        groups = np.arange(len(train) + len(test), dtype=np.int64) % shape.groups
    return partition(
        table, train, test, len(shape.train), clients, 0, groups, coarse=coarse,
        overlapping=False,
    )  # fmt: skip


def size_of(experiment: Experiment) -> Size:
    """Return how much a client trains, by FedAvg's loop over its own data; equal ones once."""
    return _size_of(experiment.model_dump_json())


@cache
def _size_of(text: str) -> Size:
    experiment = Experiment.model_validate_json(text)
    schedule, training = experiment.schedule, experiment.training
    part = experiment.cohort_size / schedule.clients
    visits = part * schedule.rounds * training.local_epochs
    if isinstance(experiment.scenario, Natural):
        return Size(visits, None, None)
    counts = [[len(task.train) for task in tasks] for tasks in dealt(experiment).clients]
    if experiment.accumulates:
        counts = [np.cumsum(tasks).tolist() for tasks in counts]
    steps = fmean(sum(math.ceil(n / training.batch_size) for n in tasks) for tasks in counts)
    return Size(visits, visits * steps, visits * fmean(map(sum, counts)))


def share(here: float | None, there: float | None) -> float | None:
    """Return one length over another; None where one is not known."""
    return here / there if here is not None and there else None


def counted(experiment: Experiment, what: str) -> int:
    """Return a cost that follows from a config; equal ones are counted once.

    ``upload`` is the most bytes of an upload, ``forward`` the multiply-adds of a pass of the net,
    ``parameters`` the numbers that it trains.
    """
    assert experiment.data is not None
    problem = problem_of(experiment.data)
    if what != "upload":
        return _of_net(experiment.net.model_dump_json(), problem)[what]
    return _upload(experiment.net.model_dump_json(), experiment.method.model_dump_json(), problem)


@cache
def _of_net(net: str, problem: Problem) -> Mapping[str, int]:
    table = NetTable.model_validate_json(net)
    facts = {"num_classes": problem.num_classes, "input_shape": problem.input_shape}
    made = make_net(table.name, **facts, **table.options())
    return {
        "forward": multiply_adds(made, problem.input_shape),
        "parameters": sum(each.numel() for each in made.parameters()),
    }


@cache
def _upload(net: str, method: str, problem: Problem) -> int:
    table = MethodTable.model_validate_json(method)
    run = RunFacts(Experiment(net=NetTable.model_validate_json(net), method=table), problem)
    return make(table.name, **table.hyper_parameters()).upload_spec(run).max_bytes
