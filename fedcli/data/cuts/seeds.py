"""Random generators of the data side: one for each purpose, all from the run's seed.

Training draws from ``fedmodels/numerics/randomness.py``.
"""

from __future__ import annotations

import hashlib

import numpy as np


def rng_of(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return the generator of one purpose, the same in every process.

    Args:
        seed: the run's seed, 0 or more.
        purpose: what is drawn, e.g. ``"shards"``; different purposes are independent.
        ids: further numbers, e.g. a client's id.
    """
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return np.random.default_rng(np.random.SeedSequence([seed, word, *ids]))
