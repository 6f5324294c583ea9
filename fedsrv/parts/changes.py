"""What changes of a scenario cost: ``[scenario.domains]`` and ``[scenario.concepts]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedmodels.config.experiment import Experiment
from fedmodels.numerics import change
from fedmodels.position import Round
from fedsrv.engine.server_part import ServerPart
from fedsrv.engine.summary import Figures, by_task, has_tasks, is_scored_in
from fedsrv.state.record import Record
from fedsrv.state.run_record import present_task


class Changes(ServerPart):
    """Tells what changes cost, and how soon they were told."""

    def figures(self) -> Mapping[str, Figures]:
        """Return what computes the figures of a run that has ended."""
        return {"figures of changes": partial(figures_of_change, experiment=self.experiment)}


def figures_of_change(records: Sequence[Record], experiment: Experiment) -> dict[str, float]:
    """Return what changes of a scenario's domains and concepts cost, and how soon they were told.

    Nothing where each round goes through all tasks.
    """
    scenario = experiment.scenario
    if scenario is None or experiment.schedule.order == "rounds_outer":
        return {}
    view = "after_downlink" if is_scored_in(records, "after_downlink") else "global"
    scored: dict[str, list[change.Scored]] = {}
    last: dict[str, int] = {}
    own_tasks = experiment.schedule.own_tasks
    began: dict[str, dict[int, Round]] = {}
    alarms: dict[str, set[int]] = {}
    for record in records:
        began.setdefault("", {}).setdefault(record["task"], record["round"])
        for client, row in record.get("clients", {}).items():
            if not client.isdecimal():
                continue
            seen = {view: row.get("views", {}).get(view)}
            present = row.get("task") if own_tasks else present_task(record, int(client), row, seen)
            if present is not None:
                last[client] = task = max(last.get(client, 0), present)
                began.setdefault(client, {}).setdefault(task, record["round"])
                if has_tasks(row, view):
                    at = record["round"], task, by_task(row, view)
                    scored.setdefault(client, []).append(at)
        told: Any = record.get("drift", ())
        for alarm in told:
            alarms.setdefault(str(alarm["client"]), set()).add(alarm["task"])
    timelines = {client: scenario.shown(int(client), end + 1) for client, end in last.items()}
    recovered = [
        found for client, rows in scored.items()
        for found in change.recoveries(rows, timelines[client], began[client if own_tasks else ""])
    ]  # fmt: skip
    present = [
        float(np.mean(found)) for rows in scored.values()
        if (found := [accuracies[task] for _, task, accuracies in rows if task in accuracies])
    ]  # fmt: skip
    out = {"present": float(np.mean(present))} if present else {}
    if recovered:
        out["recovery_rounds"] = float(np.mean([rounds for rounds, _ in recovered]))
        out["recovered"] = float(np.mean([did for _, did in recovered]))
    if any("input_drift_p" in row for r in records for row in r.get("clients", {}).values()):
        each = [change.detections(alarms.get(c, ()), shown) for c, shown in timelines.items()]
        delays = [delay for found, *_ in each for delay in found]
        missed = sum(found for _, found, _, _ in each)
        false, quiet = sum(f for _, _, f, _ in each), sum(q for _, _, _, q in each)
        out |= {"drift_delay": float(np.mean(delays))} if delays else {}
        out |= {"drift_missed": missed / (missed + len(delays))} if missed + len(delays) else {}
        out |= {"drift_false_alarms": false / quiet} if quiet else {}
    if scenario.domains is not None:
        by_client = [
            change.transfer_by_domain(rows, scenario.main_domains(int(client), last[client] + 1))
            for client, rows in scored.items()
        ]
        for name, place in (("forgetting_domains", 0), ("backward_transfer_domains", 1)):
            means = [
                float(np.mean([*found[place].values()])) for found in by_client if found[place]
            ]
            out |= {name: float(np.mean(means))} if means else {}
    return out
