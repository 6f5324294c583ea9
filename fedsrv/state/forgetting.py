"""Forgetting on request: a run is computed again from its beginning without clients, or tasks.

What a client brought is in every later state, also in that of other clients. So an exact model
without it is one that was trained without it. The clients take no part from the first interaction
on, and everything after it is undone for good. All else of the run stays, so what is computed again
has the bits of a run in which they never took part. A client without a task takes no part in the
interactions of that task, is not scored on it, and its announcement has no example of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from fedmodels.config.combinations import refusals
from fedmodels.config.privacy import NO_GROUP
from fedmodels.errors import ConfigError
from fedmodels.facts.position import NONE_YET, Interaction
from fedmodels.tensors.archive import LIVE, PERSONAL
from fedsrv.state.run_directory import writing
from fedsrv.state.store import Store

WHY = "it is forgotten: the run is computed again without it (--forget)"
REMAINS = (
    "of what is forgotten there remain: what its clients announced in run.db, their lines "
    "in the audit log and in logs, what trackers have got, copies and backups of this directory, "
    "what fedsrv recover moved to set-aside in it, weights that it gave to other runs "
    "(begin-*.safetensors) and these runs, models that were exported or are live at clients until "
    "newer ones are, and all that lies at their own sites"
)


def forget(store: Store, names: Sequence[int | tuple[int, int]]) -> list[str]:
    """Forget clients, or single tasks of them, or finish it where a kill came in between.

    Returns:
        What is computed again, and what remains, a line each; none where nothing is undone.

    Raises:
        ConfigError: the run cannot be computed again.
    """
    fresh = {one for one in names if isinstance(one, int) and store.aside().get(one) != 0}
    tasks = {one for one in names if not isinstance(one, int)} - store.forgotten()
    if fresh or tasks:
        for line in refusals(store.experiment, also="forgetting"):
            raise ConfigError(line)
        _check_tasks(store, tasks)
        privacy, schedule = store.experiment.privacy, store.experiment.schedule
        if privacy and not privacy.has_whole_group(schedule, {*store.aside(), *fresh}):
            raise ConfigError(NO_GROUP)
        store.set_aside(
            dict.fromkeys(sorted(fresh), WHY), Interaction(0)
        )  # a crash leaves the wish
        store.forget_tasks(tasks, WHY)
    gone = {client for client, first in store.aside().items() if first == 0}
    _remove_models(store.path, gone)
    records = [record for record, _ in store.ledger.records()]
    records += store.ledger.undone().values()  # which would count again: a kill came in between
    is_done = store.forgotten() == store.forgotten(done=True)
    if not records or (is_done and not any(gone & {*record["cohort"]} for record in records)):
        store.forget_tasks((), WHY, done=True)
        return [REMAINS] if fresh or tasks else []
    seconds = sum(record["seconds"].get("wall", 0.0) for record in records)
    store.take_back(NONE_YET)
    store.forget_tasks((), WHY, done=True)
    many = len(gone) > 1
    named = [f"client{'s' * many} {', '.join(map(str, sorted(gone)))}"] if gone else []
    named += [f"task {task} of client {client}" for client, task in sorted(store.forgotten())]
    are = "are" if many or len(named) > 1 else "is"
    return [
        f"{' and '.join(named)} {are} forgotten: {len(records)} interactions are computed again, "
        f"which took {seconds:.1f} s",
        REMAINS,
    ]


def _remove_models(run: Path, clients: Collection[int]) -> None:
    """Remove the models of clients that lie in a run directory: no command answers with them."""
    for client in clients:
        place = run / "clients" / str(client)
        with writing(place):
            (place / PERSONAL).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                shutil.rmtree(place / LIVE)


def _check_tasks(store: Store, tasks: Collection[tuple[int, int]]) -> None:
    """Raise ConfigError for a task that its client does not have, or that cannot be left out."""
    held = {int(c): int(number) for c, number in store.ledger.fact("tasks", list) or ()}
    for client, task in sorted(tasks):
        if not held:
            raise ConfigError(f"--forget {client}:{task}: the run has not begun")
        if task >= held[client]:
            raise ConfigError(
                f"--forget {client}:{task}: the tasks of client {client} are 0 to "
                f"{held[client] - 1}"
            )
        if all((client, other) in {*tasks, *store.forgotten()} for other in range(held[client])):
            raise ConfigError(
                f"--forget {client}:{task}: no task of client {client} would be left: forget the "
                f"client (--forget {client})"
            )
    if tasks and store.experiment.method.pools_data:
        raise ConfigError("--forget CLIENT:TASK: this method has the data of all clients as one")
    if tasks and store.experiment.schedule.sampling == "weighted":
        raise ConfigError(
            '--forget CLIENT:TASK: [schedule] sampling = "weighted" draws by the examples of all '
            "tasks: begin a new run without the task"
        )
