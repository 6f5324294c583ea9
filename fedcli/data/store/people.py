"""In which part each person of a client is, so that nobody is learned here and tested there.

    DIR/<id>/people.key           random bytes, with which names are hashed; they stay at the site
    DIR/<id>/task-N/people.npy    (k, 3) int64: hash of a person's name, 1 for testing and 0 for
                                  training, and the number in ``train_group.npy``

A person is what has one value in the column ``group``, or one folder of images with ``group``. The
table is written with its task, and counts as the task does.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedcli.data.arrays import IntArray
from fedcli.data.store.client_data import SALT, ClientData
from fedmodels.errors import DataError
from fedmodels.host.files import write_atomically


def new_salt(place: Path) -> bytes:
    """Write random bytes into a directory, with which names are hashed there; return them."""
    salt = secrets.token_bytes(16)
    write_atomically(place / SALT, salt.hex() + "\n", sync=True)
    return salt


def keys_of(names: Sequence[str], salt: bytes) -> IntArray:
    """Return the hash of each name (n,)."""
    digests = (hashlib.blake2b(n.encode(), digest_size=8, key=salt).digest() for n in names)
    return np.array([int.from_bytes(d, "little", signed=True) for d in digests], dtype=np.int64)


def people_table(keys: IntArray, train: IntArray, test: IntArray) -> IntArray:
    """Return the table of a task: of each person key, part and number, (k, 3).

    Args:
        keys: (K,) of each group, by its number.
        train: (n,) group of each training example.
        test: (m,) likewise of each test example.
    """
    parts = [(np.unique(codes), part) for part, codes in enumerate((train, test))]
    rows = [np.column_stack([keys[c], np.full(len(c), part), c]) for c, part in parts]
    return np.concatenate(rows).astype(np.int64)


def put_before(held: ClientData) -> tuple[dict[int, bool], list[int]]:
    """Return of each person of a client whether it is for testing, and tasks that do not say it.

    Raises:
        DataError: a table is damaged.
    """
    found, unknown = dict[int, bool](), list[int]()
    for task in range(held.num_tasks):
        table = held.people(task)
        if table is None:
            unknown.append(task)
            continue
        for key, tested, _ in table.tolist():
            found.setdefault(key, bool(tested))
    return found, unknown


def salt_of(held: ClientData) -> bytes | None:
    """Return with what the names of a client's people are hashed; None where none are.

    Raises:
        DataError: the file is damaged.
    """
    path = held.salt_place
    if not path.exists():
        return None
    try:
        return bytes.fromhex(path.read_text("utf-8"))
    except (OSError, ValueError):
        raise DataError(
            f"{path} is damaged: put it back from a backup, as it says who comes again"
        ) from None
