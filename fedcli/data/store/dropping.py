"""Setting a task of a client's data aside: the mark lies in ``client.json``, beside its counts."""

from __future__ import annotations

from pathlib import Path

from fedcli.data.store.growing import alone, write_about
from fedcli.data.store.opened_data import open_data
from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveNotWritten, DataError, reason_of
from fedmodels.facts.data_description import MAX_WHY


def drop_task(root: Path, client: int, task: int, why: str = "") -> bool:
    """Set a task aside for good: an open run passes it over, whether it has begun it or not.

    Its data may be deleted once the run has said that the task is set aside.

    Args:
        root: the directory above the client's.
        client: whose task it is.
        task: from 0.
        why: what the run's log says of it.

    Returns:
        Whether that is new.

    Raises:
        DataError: there is no such task; nothing was changed.
        ArchiveNotWritten: the disk is full, or fails; nothing was changed.
    """
    held = open_data(root, client)
    try:
        with alone(held.directory):
            held = open_data(root, client)  # another process may have added a task meanwhile
            if not 0 <= task < held.num_tasks:
                raise DataError(
                    f"{held.directory} has no task {task}: it has {held.num_tasks}, from 0 on"
                )
            if held.tasks[task].set_aside:
                return False
            mark = {"set_aside": True, "why": printable(why, MAX_WHY)}
            tasks = list(held.tasks)
            tasks[task] = tasks[task].model_copy(update=mark)
            write_about(held.directory, held.file.model_copy(update={"tasks": tuple(tasks)}))
    except OSError as error:
        raise ArchiveNotWritten(
            f"{held.directory}: task {task} is not set aside: {reason_of(error)}"
        ) from None
    return True
