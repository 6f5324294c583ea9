"""What changes of a scenario cost: ``[scenario.domains]`` and ``[scenario.concepts]``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from fedmodels.config.experiment import Experiment
from fedmodels.facts.position import Round, Task
from fedmodels.numerics import change
from fedsrv.engine.server_part import ServerPart
from fedsrv.engine.summary import Figures, by_task, has_tasks, is_scored_in
from fedsrv.state.record import ClientRow, Record
from fedsrv.state.run_record import present_task


class Changes(ServerPart):
    """Tells what changes cost."""

    def figures(self) -> Mapping[str, Figures]:
        """Return what computes the figures of a run that has ended."""
        return {"figures of changes": partial(figures_of_change, experiment=self.experiment)}


def figures_of_change(records: Sequence[Record], experiment: Experiment) -> dict[str, float]:
    """Return what changes of a scenario's domains and concepts cost.

    Nothing where each round goes through all tasks.
    """
    scenario, timelines = experiment.scenario, timelines_of(records, experiment)
    if scenario is None or experiment.schedule.order == "rounds_outer":
        return {}
    view, own_tasks = _view_of(records), experiment.schedule.own_tasks
    scored: dict[str, list[change.Scored]] = {}
    trained: dict[str, list[float]] = {}
    began: dict[str, dict[int, Round]] = {}
    latest: dict[str, int] = {}
    for record in records:
        began.setdefault("", {}).setdefault(record["task"], record["round"])
        for client, row, now in _present_clients(record, experiment, view):
            latest[client] = task = max(latest.get(client, 0), now)
            began.setdefault(client, {}).setdefault(task, record["round"])
            if has_tasks(row, view):
                at = record["round"], task, by_task(row, view)
                scored.setdefault(client, []).append(at)
            if task in (just_trained := by_task(row, "after_local")):
                trained.setdefault(client, []).append(just_trained[task])
    recovered = [
        found for client, rows in scored.items()
        for found in change.recoveries(rows, timelines[client], began[client if own_tasks else ""])
    ]  # fmt: skip
    received = [[each[task] for _, task, each in rows if task in each] for rows in scored.values()]
    out = _over_clients("present", received) | _over_clients("present_trained", trained.values())
    if recovered:
        out["recovery_rounds"] = float(np.mean([rounds for rounds, _ in recovered]))
        out["recovered"] = float(np.mean([did for _, did in recovered]))
    if scenario.domains is not None:
        by_client = [
            change.transfer_by_domain(rows, scenario.main_domains(int(client), latest[client] + 1))
            for client, rows in scored.items()
        ]
        for place, name in enumerate(("forgetting_domains", "backward_transfer_domains")):
            out |= _over_clients(name, [each[place].values() for each in by_client])
    return out


def _over_clients(name: str, found: Iterable[Collection[float]]) -> dict[str, float]:
    """Return the mean over clients of each one's mean; nothing where no client has a value."""
    means = [np.mean([*each]) for each in found if each]
    return {name: float(np.mean(means))} if means else {}


def timelines_of(records: Sequence[Record], experiment: Experiment) -> dict[str, Sequence[object]]:
    """Return what each client of a run showed, task by task; nothing where nothing changes."""
    scenario, last = experiment.scenario, dict[str, int]()
    if scenario is None or experiment.schedule.order == "rounds_outer":
        return {}
    view = _view_of(records)
    for record in records:
        for client, _, present in _present_clients(record, experiment, view):
            last[client] = max(last.get(client, 0), present)
    return {client: scenario.shown(int(client), task + 1) for client, task in last.items()}


def _view_of(records: Sequence[Record]) -> str:
    """Return by which view the tasks of a run are known."""
    return "after_downlink" if is_scored_in(records, "after_downlink") else "global"


def _present_clients(
    record: Record, experiment: Experiment, view: str
) -> Iterator[tuple[str, ClientRow, Task]]:
    """Yield the clients of a record, the row of each, and its task, where that is known."""
    for client, row in record.get("clients", {}).items():
        if not client.isdecimal():
            continue
        own, seen = experiment.schedule.own_tasks, {view: row.get("views", {}).get(view)}
        present = row.get("task") if own else present_task(record, int(client), row, seen)
        if present is not None:
            yield client, row, Task(present)
