"""A data set with as many classes as the environment says: points around a centre of their own."""

from __future__ import annotations

import os

import numpy as np

from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.source import Source

VARIABLE = "BENCHMARK_CLASSES"
TRAIN, TEST, SHAPE = 40, 2, (1, 8, 8)
"""Examples of a class, and the shape of one."""


def load(source: Source) -> Dataset:
    """Return the data set; nothing is read."""
    classes = int(os.environ[VARIABLE])
    draw = np.random.default_rng(0)
    centres = draw.integers(64, 192, (classes, *SHAPE))

    def points(per_class: int) -> Examples:
        y = np.repeat(np.arange(classes), per_class)
        return Examples((centres[y] + draw.integers(-32, 32, (len(y), *SHAPE))).astype(np.uint8), y)

    return Dataset(
        "many-classes",
        points(TRAIN),
        points(TEST),
        tuple(map(str, range(classes))),
        scale=255.0,
        mean=(0.5,),
        std=(0.25,),
    )
