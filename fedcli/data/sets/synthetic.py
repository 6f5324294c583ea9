"""The synthetic streams of the literature on concept drift: SINE, CIRCLE and SEA.

SINE and CIRCLE are of Gama and others, Learning with Drift Detection, SBIA 2004; SEA is of Street
and Kim, KDD 2001, whose thresholds are 8, 9, 7 and 9.5. The numbers of SINE and CIRCLE are those of
FedDrift's code (Jothimurugesan and others, AISTATS 2023). No label is wrong.
``[scenario.concepts]`` has other concepts, and wrong labels.
"""

from __future__ import annotations

import math

import numpy as np

from fedcli.data.cuts.cut_input import rng_of
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.looks import meant
from fedcli.data.sets.source import Source

EXAMPLES = 55_000
"""For training, and as many for testing: 500 for each of ten clients at each of eleven times."""
FIRST = {"sine": ("sine", ()), "circle": ("circle", (0.2, 0.5, 0.15)), "sea": ("sea", (9.0,))}
"""The first concept of each stream."""


def synthetic(source: Source) -> Dataset:
    """Return a stream: uniform inputs, two of [0, 1) or three of [0, 10), and two classes."""
    name = source.data.name
    width, high = (3, 10.0) if name == "sea" else (2, 1.0)
    parts = []
    for part in range(2):
        rng = rng_of(0, f"stream {name}", part)
        x = rng.uniform(0, high, size=(EXAMPLES, width)).astype(np.float32)
        y = meant(*FIRST[name], x, np.zeros(len(x), dtype=np.int64), 2, rng)
        parts.append(Examples(x, y))
    return Dataset(
        name, parts[0], parts[1], ("0", "1"), scale=1.0, mean=(high / 2,),
        std=(high / math.sqrt(12),), columns=tuple(f"x{place + 1}" for place in range(width)),
    )  # fmt: skip
