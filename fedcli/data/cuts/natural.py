"""Natural clients: the windows of one subject and device, split along time (FedAli §5.1)."""

from __future__ import annotations

import numpy as np

from fedcli.data.arrays import IntArray
from fedmodels.errors import ConfigError

FOLDS = 10


def stratified_folds(labels: IntArray, num_folds: int = FOLDS) -> IntArray:
    """Return the fold of each example: stratified by class, contiguous within each class.

    The folds are those of scikit-learn's ``StratifiedKFold(num_folds, shuffle=False)``, which
    FedAli's code uses, but classes smaller than ``num_folds`` are no error.

    Args:
        labels: (n,) class of each example, in recording order.
        num_folds: number of folds.

    Returns:
        (n,) int64 in ``[0, num_folds)``.
    """
    classes, first, coded = np.unique(labels, return_index=True, return_inverse=True)
    ranks = np.argsort(np.argsort(first))  # classes in order of appearance
    ordered = np.sort(ranks[coded])
    sizes = np.array(
        [np.bincount(ordered[f::num_folds], minlength=len(classes)) for f in range(num_folds)]
    )
    folds = np.empty(len(labels), dtype=np.int64)
    for k, rank in enumerate(ranks):
        folds[labels == classes[k]] = np.repeat(np.arange(num_folds), sizes[:, rank])
    return folds


def natural_clients(groups: IntArray, num_clients: int) -> list[IntArray]:
    """Return the examples of the first ``num_clients`` groups, in recording order.

    Args:
        groups: (n,) subject-and-device of each example.
        num_clients: how many clients are asked for.

    Raises:
        ConfigError: there are fewer groups than clients.
    """
    ids = np.unique(groups)
    if num_clients > len(ids):
        raise ConfigError(
            f"[schedule] clients = {num_clients}, but the data set has {len(ids)} natural clients"
        )
    return [np.flatnonzero(groups == g).astype(np.int64) for g in ids[:num_clients]]


def split_along_time(
    indices: IntArray, labels: IntArray, train_folds: int
) -> tuple[IntArray, IntArray]:
    """Split one client's examples: the first ``train_folds`` of ten folds of each class train.

    Overlapping windows at the border of two folds leak a little into the test part.

    Args:
        indices: (m,) examples of the client, in recording order.
        labels: (n,) class of every example of the data set.
        train_folds: folds for training, of ten.
    """
    folds = stratified_folds(labels[indices])
    return indices[folds < train_folds], indices[folds >= train_folds]
