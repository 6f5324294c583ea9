"""What each upload that counts was trained on: what its client stated, or what is known of it here.

A client states it where the method or the config lets a training read the data of earlier tasks,
and where it trains on more than its order's task has. In a run with ``[privacy]`` nobody states
anything: which tasks a training read follows from the order, the method and the config there, and
how many rows of each is not told, nor which of several models an upload trained. Who asks what an
upload was made of reads the record alone.
"""

from __future__ import annotations

from fedmodels.training.asked import reads_history
from fedsrv.engine.cohort import Answers
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.state.record import Record, trained_in


def put_provenance(record: Record, results: Answers, found: Reduced, plan: Plan) -> None:
    """Put into the rows of a record what uploads were trained on, and which models they fed."""
    for client, ordered in trained_in(record).items():
        row, answer = record["clients"].get(str(client)), results.by_client.get(client)
        if row is None:
            continue
        if (models := found.models.get(client)) and plan.run.experiment.privacy is None:
            row["models"] = list(models)
        task = plan.steps[ordered].task_of(client)
        told = [[one.task, one.rows] for one in answer.report.trained] if answer else []
        if trained := told or _known(plan, client, task, row["num_examples"]):
            row["trained"] = trained


def _known(plan: Plan, client: int, task: int, examples: int) -> list[list[int | None]]:
    """Return the tasks that a training read, of which nothing was stated; none for its order's."""
    rows = plan.profiles[client].train[: task + 1].sum(1)
    if reads_history(plan.method, plan.run.experiment) and task:
        return [[earlier, None] for earlier, number in enumerate(rows) if number]
    generates = plan.method.trains_on == "replay" and examples > rows[task:].sum()
    return [[task, None]] if generates else []
