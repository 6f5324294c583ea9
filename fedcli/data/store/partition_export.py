"""From a store to one directory for each client, the same as ``fedcli partition`` writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedcli.data.sets.dataset import Labelled
from fedcli.data.store.client_data import PARTS, ClientData, Part
from fedcli.data.store.partition_store import STORE, PartitionStore
from fedcli.data.store.partition_writer import (
    why_not_written,
    write_client,
    write_wholes,
    written_whole,
)
from fedmodels.errors import DataError
from fedmodels.tensors.bundle import ClientId


def export_partition(root: Path, out: Path, clients: Sequence[ClientId] | None = None) -> int:
    """Write clients of a store as directories into ``out``, with all else that the root holds.

    By default everybody's data are written. Returns how many clients those are.

    Raises:
        DataError: there is no store, it holds no such client, or ``out`` is neither absent nor
            empty, or cannot be written.
    """
    store = PartitionStore.find(root)
    if store is None:
        raise DataError(f"{root} holds no store: its clients have directories already, if any")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} holds something: choose another directory")
    wanted = range(len(store)) if clients is None else clients
    opened = [store.client(c) if isinstance(c, int) else _no_client(c) for c in wanted]
    try:
        with written_whole(out) as place:
            shutil.copytree(root, place, ignore=shutil.ignore_patterns(STORE), dirs_exist_ok=True)
            for client in opened:
                write_client(place / client.directory.name, client.file, _held(client))
                for task in range(client.num_tasks):
                    if (wholes := client.wholes(task)) is not None:
                        write_wholes(place / client.directory.name, task, wholes)
    except OSError as error:
        raise DataError(why_not_written(out, error)) from None
    return len(opened)


def _held(client: ClientData) -> Iterator[tuple[int, Part, Labelled]]:
    """Yield inputs and labels of each task and part."""
    for task in range(client.num_tasks):
        for part in PARTS:
            yield task, part, client.arrays(task, part)


def _no_client(client: ClientId) -> ClientData:
    raise DataError(f"the {client} has no directory: its data lie in global-test")
