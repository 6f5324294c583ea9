"""Drift of clients' examples (``[evaluate] drift``): its mean, and the alarms of a run.

A client's own log holds the share of false lines among that client's. Over all clients, parts and
months the coordinator does: it takes what clients tell of a task that is new to them as one stream
of tests (:mod:`fedmodels.numerics.alarm_levels`), in the order of interactions and clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedmodels.config.experiment import Experiment
from fedmodels.facts.position import Interaction, Task
from fedmodels.numerics import change
from fedmodels.numerics.alarm_levels import Alarms, Levels
from fedmodels.numerics.data_drift import DRIFT_PARTS
from fedplugins.drift.columns import WatchedWords
from fedplugins.drift.shared import places_of, said_of
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.server_part import NOTHING, CurrentInteraction, ServerPart
from fedsrv.engine.summary import Figures
from fedsrv.parts.changes import timelines_of
from fedsrv.progress.events import EventLog
from fedsrv.state.record import ClientRow, Record, of_parts
from fedsrv.state.store import Store

MEMORY = 100
"""Tests of a run after which its levels forget."""
Told = tuple[str, str]
"""Part and client."""


class Drift(ServerPart):
    """Tells whose examples moved since their earlier tasks, and which number of them."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Begin; nothing was told."""
        super().__init__(store, events, given)
        self._seen = Seen()

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down the mean drift of the clients that report one, and of what people are told.

        ``drift`` lists whose data moved, in which task, and a line on what moved.
        """
        rows = record["clients"]
        for name in (f"{part}_drift" for part in DRIFT_PARTS):
            if values := [row[name] for row in rows.values() if name in row]:
                record["metrics"][name] = math.fsum(values) / len(values)
        self._catch_up(at.step.interaction)
        tasks = {client: at.step.task_of(int(client)) for client in rows}
        if at.step.tasks:
            for client in filter(lambda c: _tells(rows[c]), rows):
                rows[client]["task"] = tasks[client]  # a replay reads it
        if alarms := self._seen.see(rows, tasks):
            of_parts(record)["drift"] = [self._alarm(at, *each, rows, tasks) for each in alarms]

    def _catch_up(self, interaction: Interaction) -> None:
        """Read what committed records tell, where this is not the interaction after the last."""
        if self._seen.interactions != interaction:
            self._seen = Seen()
            for number in map(Interaction, range(interaction)):
                record = self.store.ledger.record(number)
                if record is None:  # it is on its way to the disk, from before drift was asked for
                    continue
                tasks = {c: row.get("task", record["task"]) for c, row in record["clients"].items()}
                self._seen.see(record["clients"], tasks)
            self._seen.interactions = interaction

    def _alarm(
        self, at: CurrentInteraction, part: str, client: str, rows: Mapping[str, ClientRow],
        tasks: Mapping[str, Task],
    ) -> dict[str, Any]:  # fmt: skip
        """Return an alarm as the record has it."""
        row, columns = rows[client], self.experiment.data and self.experiment.data.columns
        problem = at.ctx.run.problem
        names = max((p.class_names for p in at.plan.profiles.values()), key=len, default=())
        words = WatchedWords(
            part, tuple(problem.input_shape), problem.num_classes,
            columns.channels if columns else (), names, said_of(self.experiment),
        )  # fmt: skip
        amount, p = row[f"{part}_drift"], row[f"{part}_drift_p"]
        places = [int(row[name]) for name in places_of(part) if name in row] or [0]
        moved = [*dict.fromkeys(map(words.column, places))]
        return {
            "client": int(client), "task": tasks[client], "part": part, "number": places[0],
            "amount": amount, "p": p, "columns": moved,
            "line": words.line(places[0], amount, p, places[1:]),
        }  # fmt: skip

    def figures(self) -> Mapping[str, Figures]:
        """Return what computes how soon changes of a scenario were told."""
        return {"figures of drift": partial(figures_of_alarms, experiment=self.experiment)}

    def committed(self, record: Record) -> None:
        """Say what moved at which clients; a line for each number and task."""
        for line in lines_of(of_parts(record).get("drift", ())):
            self.events.tell("note", line=line)


class Seen:
    """What the interactions of a run told so far, as far as alarms follow from it."""

    def __init__(self) -> None:
        """Begin before the first interaction."""
        self.interactions = 0
        self._alarms = Alarms(Levels(MEMORY))
        self._tasks: dict[str, int] = {}
        """The last task of each client that was looked at."""

    def see(self, rows: Mapping[str, ClientRow], tasks: Mapping[str, Task]) -> list[Told]:
        """Take in the clients of the next interaction; return the parts and clients to tell of."""
        self.interactions += 1
        told = list[Told]()
        for client in sorted((c for c in rows if _tells(rows[c])), key=int):
            if tasks[client] <= self._tasks.get(client, -1):
                continue
            self._tasks[client] = tasks[client]
            for part in DRIFT_PARTS:
                row, name = rows[client], f"{part}_drift"
                key = f"{part} of {client}"
                if name in row and self._alarms.tells(key, row[f"{name}_p"], row[name]):
                    told.append((part, client))
        return told


def _tells(row: ClientRow) -> bool:
    return any(f"{part}_drift_p" in row for part in DRIFT_PARTS)


def lines_of(alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return alarms as lines that people read, one for all clients where the same number moved."""
    alike: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for alarm in alarms:
        key = alarm["part"], alarm["task"], alarm["number"]
        alike.setdefault(key, []).append(alarm)
    found = list[str]()
    for (part, task, _), several in alike.items():
        furthest = max(several, key=lambda alarm: alarm["amount"])
        clients = clients_text([str(alarm["client"]) for alarm in several])
        what = "training data" if part == "input" else "predictions"
        most = "; the most: " if len(several) > 1 else ": "
        found.append(
            f"{what} of task {task} moved from those of earlier tasks at {clients}{most}"
            f"{furthest['line']}; docs/drift.md"
        )
    return found


def figures_of_alarms(records: Sequence[Record], experiment: Experiment) -> dict[str, float]:
    """Return how soon changes of a scenario's domains and concepts were told, and what else was.

    Nothing where each round goes through all tasks, or nobody measured drift.
    """
    measured = any(_tells(row) for r in records for row in r.get("clients", {}).values())
    timelines = timelines_of(records, experiment)
    if not measured or not (experiment.scenario and experiment.scenario.timelines):
        return {}
    alarms: dict[str, set[int]] = {}
    for record in records:
        for alarm in of_parts(record).get("drift", ()):
            alarms.setdefault(str(alarm["client"]), set()).add(alarm["task"])
    each = [change.detections(alarms.get(c, ()), shown) for c, shown in timelines.items()]
    delays = [delay for found, *_ in each for delay in found]
    missed = sum(found for _, found, _, _ in each)
    false, quiet = sum(f for _, _, f, _ in each), sum(q for _, _, _, q in each)
    out = {"drift_delay": float(np.mean(delays))} if delays else {}
    out |= {"drift_missed": missed / (missed + len(delays))} if missed + len(delays) else {}
    return out | ({"drift_false_alarms": false / quiet} if quiet else {})
