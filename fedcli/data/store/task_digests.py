"""Which data a task has, said to the coordinator so that it learns nothing of them.

A site that was restored from a backup may give a new task a number that the run has learned other
data under. So each added task has a digest of its content and its number. It is keyed by the random
bytes with which the site hashes names (:mod:`fedcli.data.store.people`), which stay there: nobody
else can try out guesses, or see that two tasks are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from fedcli.data.arrays import AT_ONCE, Labelled


def content_of(parts: Iterable[Labelled], classes: Sequence[str]) -> bytes:
    """Return the hash of a task's raw inputs and labels, by the names of the classes.

    Args:
        parts: inputs (n, *input_shape) and labels (n,), or (n, L) of several, of each part.
        classes: the client's, in the order of its labels.
    """
    found = hashlib.blake2b(digest_size=32)
    for x, y in parts:
        found.update(repr((x.dtype.str, x.shape, y.shape)).encode())
        for start in range(0, len(x), AT_ONCE):
            found.update(np.ascontiguousarray(x[start : start + AT_ONCE]).tobytes())
        if y.ndim > 1:
            found.update(np.ascontiguousarray(y).tobytes())
            continue
        for name, label in sorted((classes[label], label) for label in np.unique(y).tolist()):
            found.update(repr(name).encode() + np.flatnonzero(y == label).astype("<i8").tobytes())
    return found.digest()


def digest_of(key: bytes, task: int, content: bytes) -> str:
    """Return what the coordinator is told of a task's content under its number, 32 hex digits."""
    facts = task.to_bytes(8, "little") + content
    return hashlib.blake2b(facts, digest_size=16, key=key, person=b"fedtide task").hexdigest()
