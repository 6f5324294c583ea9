"""A lock on the states of a process's clients: two processes of one client would spoil them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedmodels.errors import ArchiveError
from fedmodels.files import locked
from fedmodels.tensors.bundle import EVALUATOR, ClientId

LOCK = ".lock"
"""The file of a ``--state-dir`` in which the byte at a client's id is locked."""
EVALUATORS_BYTE = 1 << 30


def lock_states(states: Path, clients: Sequence[ClientId]) -> int | None:
    """Lock the states of clients until the returned file is closed, or the process ends.

    Returns:
        The open file. None if the file cannot be made: the first write of a state then fails
        with its own line. A file system without locks is no error.

    Raises:
        ArchiveError: another process has one of the clients.
    """
    try:
        states.mkdir(parents=True, exist_ok=True)
        handle = os.open(states / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    for client in clients:
        place = EVALUATORS_BYTE if client == EVALUATOR else int(client)
        try:
            is_free = locked(handle, place)
        except OSError:
            continue
        if not is_free:
            os.close(handle)
            raise ArchiveError(
                f"client {client} runs already, with its state in {states}; wait until that "
                "process has ended, or give another --state-dir"
            )
    return handle
