"""Gathering everybody's training data in one place, for Centralized on pooled data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedcli.data.arrays import IntArray
from fedcli.data.cuts.cut_input import Partition, TaskIndices
from fedcli.data.sets.dataset import Dataset
from fedcli.data.store.partition_writer import client_moments, description_of, groups_of, owners_of
from fedmodels.data_description import Normaliser, ProblemFile


def gathered(dataset: Dataset, partition: Partition) -> tuple[Dataset, Partition]:
    """Move all training examples to client 0, task by task; test data stay where they are.

    Where clients have moments of their own, the returned inputs are normalised by their owner's.
    """
    if partition.zscore != "none":
        dataset = _normalised_by_owner(dataset, partition)
    nothing: IntArray = np.zeros(0, dtype=np.int64)
    most = max(len(tasks) for tasks in partition.clients)
    union = [
        np.unique(np.concatenate([tasks[m].train for tasks in partition.clients if m < len(tasks)]))
        for m in range(most)
    ]
    first = partition.clients[0]
    clients = [
        tuple(
            TaskIndices(union[m], first[m].test if m < len(first) else nothing) for m in range(most)
        ),
        *(tuple(TaskIndices(nothing, t.test) for t in tasks) for tasks in partition.clients[1:]),
    ]
    return dataset, replace(partition, clients=tuple(clients), zscore="none")


def _normalised_by_owner(dataset: Dataset, partition: Partition) -> Dataset:
    """Return the data set with each natural client's inputs normalised by its own moments."""
    raw = np.concatenate([dataset.train_x, dataset.test_x])
    x = np.zeros(raw.shape, dtype=np.float32)
    groups = groups_of(dataset)
    moments = client_moments(dataset, partition)
    for owner, own in zip(owners_of(dataset, partition), moments, strict=True):
        normalise = Normaliser.of(ProblemFile(**description_of(dataset, own)))
        x[groups == owner] = normalise(raw[groups == owner])
    first = len(dataset.train_y)
    return replace(dataset, train_x=x[:first], test_x=x[first:], scale=1.0, mean=(0.0,), std=(1.0,))
