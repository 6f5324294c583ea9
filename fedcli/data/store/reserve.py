"""Examples set apart for the server before the rest is dealt out; no client holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcli.data.arrays import Inputs, IntArray
from fedcli.data.cuts.cut_input import rng_of
from fedcli.data.cuts.long_tail import keep_per_class
from fedcli.data.sets.dataset import Dataset
from fedmodels.config.data import Data
from fedmodels.errors import ConfigError


@dataclass(frozen=True)
class Reserve:
    """The server's examples: as many of each class with their labels, and others without."""

    x: Inputs  # (n, *input_shape)
    y: IntArray  # (n,)
    unlabelled: Inputs  # (m, *input_shape)


def set_apart(dataset: Dataset, data: Data, seed: int) -> tuple[Dataset, Reserve | None]:
    """Return the data set without the server's examples, and the server's examples.

    Both parts are drawn from the training split as it was published, before ``max_per_class`` and
    before the long tail, so that they are balanced and disjoint from every client's data.

    Raises:
        ConfigError: a class has too few examples to leave any for the clients.
    """
    if data.server_examples is None:
        return dataset, None
    labelled = data.server_examples
    wanted = labelled + (data.server_unlabelled or labelled)
    held = np.bincount(dataset.train.y, minlength=dataset.num_classes)
    if held.min() <= wanted:
        raise ConfigError(
            f"[data] server_examples: the server would get {wanted} training examples of each "
            f"class, but class {int(held.argmin())} has {int(held.min())}, and clients need some"
        )
    each = np.full(dataset.num_classes, wanted, dtype=np.int64)
    taken = keep_per_class(dataset.train.y, each, rng_of(seed, "server"))
    few = np.full(dataset.num_classes, labelled, dtype=np.int64)
    first = keep_per_class(dataset.train.y[taken], few, rng_of(seed, "server", 1))
    shown, hidden = taken[first], np.delete(taken, first)
    reserve = Reserve(dataset.train.x[shown], dataset.train.y[shown], dataset.train.x[hidden])
    left = np.setdiff1d(np.arange(len(dataset.train.y)), taken)
    return dataset.at(train=left), reserve
