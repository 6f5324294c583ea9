"""Any client's data, opened: its directory, its part of a store, or the evaluator's test set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedcli.data.store.client_data import STORE, ClientData, GlobalTest
from fedmodels.errors import DataError
from fedmodels.facts.data_description import ClientFile
from fedmodels.tensors.bundle import ClientId

if TYPE_CHECKING:
    from fedcli.data.store.partition_store import PartitionStore


def store_in(root: Path) -> PartitionStore | None:
    """Open the store of a partition, or None; DataError if a file of it is missing or damaged."""
    if not (root / STORE).is_dir():
        return None
    from fedcli.data.store.partition_store import PartitionStore

    return PartitionStore(root)


class EvaluatorData(ClientData):
    """The evaluator's data: the global test set and no task."""

    def __init__(self, root: Path) -> None:
        """Open ``root/global-test``; raise DataError if it is missing or damaged."""
        found = GlobalTest.find(root)
        if found is None:
            raise DataError(f"{root / 'global-test'} is not there: the evaluator has nothing to do")
        self.directory = root / "global-test"
        self.file = ClientFile(**found.problem.model_dump(), tasks=())
        self._begin()

    def _opened_again(self) -> ClientData:
        return EvaluatorData(self.directory.parent)


def open_data(root: Path, client: ClientId, store: PartitionStore | None = None) -> ClientData:
    """Open a client's data under a partition's root: its directory, or its part of the store.

    A client of a store has a directory, too, once it has got further tasks: it lacks ``task-0``.
    The evaluator has the global test set. A store that is open already is not opened again.

    Raises:
        DataError: the data are missing or damaged.
    """
    if not isinstance(client, int):
        return EvaluatorData(root)
    directory = root / str(client)
    if not (directory / "task-0").is_dir():
        store = store or store_in(root)
        is_beyond = store is not None and client >= len(store) and directory.is_dir()
        if store is not None and not is_beyond:
            return store.client(client)
    return ClientData(directory)
