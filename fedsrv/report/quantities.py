"""The quantities that a report shows: each is computed from one run's records, as a mapping.

Means over clients are unweighted. Rounds and interactions count from one. A mapping has no entry
for a client or a task that was not scored in an interaction.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import accumulate
from statistics import fmean
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from pydantic import TypeAdapter, ValidationError

from fedmodels.config.scenario import Scenario, ScenarioTable
from fedmodels.errors import ConfigError
from fedmodels.numerics.metric_tables import FIGURES, VIEWS, metric
from fedmodels.numerics.streams import lost_in_stream
from fedsrv.state.run_record import (
    RunRecord,
    interaction_of,
    number,
    numbers,
    present_task,
    table,
)

Cells = dict[tuple[int, int], float]
_SCENARIO: TypeAdapter[ScenarioTable] = TypeAdapter(Scenario)


class OfTasks(Protocol):
    """A quantity by task, of a run and one of its views."""

    def __call__(self, run: RunRecord, view: str) -> Cells:
        """Return it by (interaction or task learnt, task)."""
        ...


def _once(quantity: OfTasks) -> OfTasks:
    """Compute a quantity of a run and a view once, as a page asks for it many times."""
    known: WeakKeyDictionary[RunRecord, dict[str, Cells]] = WeakKeyDictionary()

    @wraps(quantity)
    def looked_up(run: RunRecord, view: str) -> Cells:
        found = known.setdefault(run, {})
        if view not in found:
            found[view] = quantity(run, view)
        return found[view]

    return looked_up


def metric_names(run: RunRecord) -> list[str]:
    """Return every metric that some interaction has: percentages, then losses, then the rest."""
    found = dict.fromkeys(name for row in run.rows for name in numbers(row.get("metrics")))
    return sorted(found, key=lambda name: (not metric(name).unit, "loss" not in name))


def metric_curve(run: RunRecord, name: str) -> dict[int, float]:
    """Return ``{round: metric}``."""
    return run.curve(lambda row: number(table(row.get("metrics")).get(name)))


def by_task(run: RunRecord, name: str) -> dict[int, float]:
    """Return ``{task: metric NAME_K of the run}``."""
    ending = re.compile(rf"{name}_(\d{{1,6}})", flags=re.ASCII)
    found = ((ending.fullmatch(key), value) for key, value in run.metrics().items())
    return {int(at[1]): value for at, value in found if at}


def training_loss(run: RunRecord) -> dict[int, float]:
    """Return ``{round: mean training loss of the cohort}``."""
    return run.curve(lambda row: _mean(number(client.get("loss")) for _, client in _clients(row)))


def view_curve(run: RunRecord, view: str, name: str = "accuracy") -> dict[int, float]:
    """Return ``{round: mean accuracy, or figure, of the clients' models in this view}``."""
    return run.curve(lambda row: _mean(_accuracies(row, view, name).values()))


def client_accuracy(run: RunRecord, view: str, name: str = "accuracy") -> dict[int, float]:
    """Return ``{client: the last accuracy, or figure of that name, it reached in this view}``."""
    latest: dict[int, float] = {}
    for row in run.rows:
        latest.update(_accuracies(row, view, name))
    return dict(sorted(latest.items()))


def class_accuracy(run: RunRecord, view: str) -> dict[int, float]:
    """Return ``{class: mean over clients of the last accuracy on it}``."""
    latest: dict[tuple[int, int], float] = {}
    for row in run.rows:
        for client, facts in _clients(row):
            classes = table(table(facts.get("views")).get(view)).get("classes")
            for label, value in enumerate(classes if isinstance(classes, list) else ()):
                if (accuracy := number(value)) is not None:
                    latest[client, label] = accuracy
    labels = sorted({label for _, label in latest})
    return {k: fmean(v for (_, label), v in latest.items() if label == k) for k in labels}


def of_sites(run: RunRecord) -> dict[tuple[int, str | int], float]:
    """Return ``{(client, what): number}`` of the models that stand for clients (``a_loc``).

    What is a class, whose recall it is, ``accuracy``, or a figure; ``examples`` of the training
    data, and in an open run ``task`` and the ``round`` since which the client has it.
    """
    found: dict[tuple[int, str | int], float | None] = {}
    received = "after_downlink" if "after_downlink" in views_of(run) else "global"
    for index, row in enumerate(run.rows):
        means = table(row.get("metrics"))
        main = next((name for name in ("mae_loc", "auroc_loc") if name in means), "a_loc")
        is_trained = means.get(main) in {means.get(f"{main}_trained")} - {None}
        is_received = means.get(main) == means.get(f"{main}_received")
        view = "after_local" if is_trained and not is_received else received
        for client, facts in _clients(row):
            seen = table(table(facts.get("views")).get(view))
            for what in ("accuracy", *FIGURES) if seen else ():
                found[client, what] = number(seen.get(what))
            classes = seen.get("classes")
            for label, value in enumerate(classes if isinstance(classes, list) else ()):
                found[client, label] = number(value)
            found[client, "examples"] = number(facts.get("num_examples"))
            task = number(facts.get("task"))
            if task is not None and task != found.get((client, "task")):
                found[client, "task"] = task
                found[client, "round"] = number(row.get("round"), index) + 1
    return {key: value for key, value in found.items() if value is not None}


def confusion(run: RunRecord, view: str) -> dict[tuple[int, int], float]:
    """Return ``{(true class, predicted class): examples}`` over clients' own tests at the end."""
    for row in reversed(run.rows):
        counts = table(row.get("confusions")).get(view)
        if isinstance(counts, list):
            lines = [line if isinstance(line, list) else [] for line in counts]
            return {
                (true, predicted): value
                for true, line in enumerate(lines)
                for predicted, each in enumerate(line)
                if (value := number(each)) is not None
            }
    return {}


@_once
def task_accuracy(run: RunRecord, view: str) -> Cells:
    """Return ``{(interaction, task): mean accuracy on the task over the clients scored on it}``."""
    return {place: fmean(found.values()) for place, found in _clients_on_tasks(run, view).items()}


def _clients_on_tasks(run: RunRecord, view: str) -> dict[tuple[int, int], dict[int, float]]:
    """Return ``{(interaction, task): {client: accuracy on the task}}``."""
    out: dict[tuple[int, int], dict[int, float]] = {}
    if view == RECEIVED:
        view = "after_downlink" if "after_downlink" in views_of(run) else "global"
    for index, row in enumerate(run.rows):
        for client, facts in _clients(row):
            scored = table(table(facts.get("views")).get(view))
            tasks, first = scored.get("tasks"), int(number(scored.get("first_task")) or 0)
            for task, value in enumerate(tasks if isinstance(tasks, list) else (), first):
                if (accuracy := number(value)) is not None:
                    out.setdefault((interaction_of(row, index), task), {})[client] = accuracy
    return out


@_once
def accuracy_matrix(run: RunRecord, view: str) -> Cells:
    """Return ``{(k, task): accuracy on the task after task k was learnt}``.

    That is after the last interaction that trained on task k and was scored.
    """
    scored = task_accuracy(run, view)
    return {
        (k, task): value
        for k, at in _learnt(run, {interaction for interaction, _ in scored}).items()
        for (interaction, task), value in scored.items()
        if interaction == at
    }


def _learnt(run: RunRecord, scored: Container[int]) -> dict[int, int]:
    """Return ``{task: the last of these scored interactions that trained on it}``.

    There is none where each client has a task of its own.
    """
    learnt: dict[int, int] = {}
    if _own_tasks(run):
        return learnt
    for index, row in enumerate(run.rows):
        task, interaction = number(row.get("task")), interaction_of(row, index)
        if task is not None and interaction in scored:
            learnt[int(task)] = interaction
    return learnt


RECEIVED = "received"
"""The view that stands for what clients hold before they train: ``after_downlink``, or ``global``
for methods without it."""


def comparable_view(runs: Sequence[RunRecord]) -> str:
    """Return a view that all these runs scored after each task: the received model, or the trained.

    Methods keep different models; what they forget compares only at one and the same moment.
    """
    if all(map(_own_tasks, runs)):
        return RECEIVED
    tasks = [{k for k, _ in accuracy_matrix(run, RECEIVED)} for run in runs]
    return RECEIVED if all(len(found) > 1 for found in tasks) else "after_local"


def final_task_accuracy(run: RunRecord, view: str) -> dict[int, float]:
    """Return ``{task: accuracy at the end}``."""
    scored = task_accuracy(run, view)
    last = max((at for at, _ in scored), default=None)
    return {task: value for (at, task), value in scored.items() if at == last}


def lost_by_task(run: RunRecord, view: str) -> dict[int, float]:
    """Return ``{earlier task: best earlier accuracy minus the last}``.

    As ``forgetting`` does, a difference compares clients that are scored at both times, each with
    itself. A task has no entry where there is none at some time since it was learnt.
    """
    if _own_tasks(run):
        return _lost_in_streams(run, view)
    scored = _clients_on_tasks(run, view)
    learnt = _learnt(run, {interaction for interaction, _ in scored})
    last = max(learnt, default=-1)
    out: dict[int, float] = {}
    for task in sorted(learnt.keys() - {last}):
        now = scored.get((learnt[last], task), {})
        then = [scored.get((at, task), {}) for k, at in learnt.items() if task <= k < last]
        lost = [[was[c] - now[c] for c in was.keys() & now.keys()] for was in then]
        if all(lost):
            out[task] = max(map(fmean, lost))
    return out


def _own_tasks(run: RunRecord) -> dict[tuple[int, int], int]:
    """Return ``{(interaction, client): its task}``, where clients go on to tasks of their own."""
    return {
        (interaction_of(row, index), client): int(task)
        for index, row in enumerate(run.rows)
        for client, facts in _clients(row)
        if (task := number(facts.get("task"))) is not None
    }


def _lost_in_streams(run: RunRecord, view: str) -> dict[int, float]:
    """Return :func:`lost_by_task` of clients' own tasks, mean over clients."""
    present = _own_tasks(run)
    series: dict[int, dict[int, dict[int, float]]] = {}
    for (at, task), found in _clients_on_tasks(run, view).items():
        for client, accuracy in found.items():
            series.setdefault(client, {}).setdefault(at, {})[task] = accuracy
    out: dict[int, list[float]] = {}
    for client, times in series.items():
        scored = [
            (present[at, client], times[at]) for at in sorted(times) if (at, client) in present
        ]
        for task, lost in lost_in_stream(scored).items():
            out.setdefault(task, []).append(lost)
    return {task: fmean(found) for task, found in sorted(out.items())}


def weight_matrices(run: RunRecord) -> dict[int, dict[tuple[int, int], float]]:
    """Return ``{interaction: {(receiving client, contributing client): weight}}``."""
    found = {at: _matrix(weights, cohort) for at, weights, cohort in _weights(run, list)}
    return {at: cells for at, cells in found.items() if cells}


def weight_vectors(run: RunRecord) -> dict[tuple[int, int], float]:
    """Return ``{(interaction, client): weight}`` of methods that give each client one weight."""
    return {
        (at, int(client)): float(weight)
        for at, weights, cohort in _weights(run, (int, float))
        for client, weight in zip(cohort, map(number, weights), strict=True)
        if weight is not None
    }


def _weights(
    run: RunRecord, kind: type | tuple[type, ...]
) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """Yield interaction, aggregation weights and cohort of rows with weights of this type."""
    for index, row in enumerate(run.rows):
        weights = table(row.get("series")).get("aggregation_weights")
        if not isinstance(weights, list) or not weights or not isinstance(weights[0], kind):
            continue
        cohort = row.get("cohort")
        if not isinstance(cohort, list) or len(cohort) != len(weights):
            cohort = list(range(len(weights)))
        yield interaction_of(row, index), weights, cohort


def bytes_of_client(run: RunRecord, direction: str) -> dict[int, float]:
    """Return ``{client: logical bytes over the whole run}``; ``direction`` is down or up."""
    return _sums(
        (client, number(table(moved).get(direction)))
        for row in run.rows
        for client, moved in _by_id(table(table(row.get("bytes")).get("per_client")))
    )


def bytes_up_so_far(run: RunRecord) -> dict[int, float]:
    """Return ``{interaction: logical bytes that clients sent until then}``."""
    sent = spent(run, "bytes", "up")
    return dict(zip(sent, accumulate(sent.values()), strict=True))


def by_client(run: RunRecord, name: str) -> dict[tuple[int, int], float]:
    """Return ``{(client, interaction): the number of this name in the client's row}``."""
    values = {
        (client, interaction_of(row, index)): number(facts.get(name))
        for index, row in enumerate(run.rows)
        for client, facts in _clients(row)
    }
    return {place: value for place, value in values.items() if value is not None}


def warnings_of_client(run: RunRecord) -> dict[int, float]:
    """Return ``{client: how many of its uploads stood out}``, of clients with such an upload."""
    return _sums(
        (client, 1.0) for row in run.rows for client, _ in _by_id(table(row.get("warned")))
    )


def moments_of_change(run: RunRecord) -> dict[int, str]:
    """Return ``{first round of a task that shows other domains or concepts: for how many}``."""
    if run.setting("schedule.order") in (None, "rounds_outer"):
        return {}
    try:
        scenario = _SCENARIO.validate_python(dict(table(run.setting("scenario"))))
    except (ValidationError, ConfigError):
        return {}
    if not scenario.timelines:
        return {}
    present, found = dict[int, int](), dict[int, set[int]]()
    for index, row in enumerate(run.rows):
        for client, facts in _clients(row):
            of_all = int(number(row.get("task"), 0))
            task = present_task(row, client, facts, table(facts.get("views")))
            task = of_all if task is None else task
            before = present.setdefault(client, task)
            if task > before:
                present[client] = task
                shown = scenario.shown(client, task + 1)
                if shown[before] != shown[task]:
                    round_ = int(number(row.get("round"), index)) + 1
                    found.setdefault(round_, set()).add(client)
    names = " and ".join(line.table for line in scenario.timelines)
    return {
        at: f"round {at}: {names} change at {len(c)} client{'s' * (len(c) > 1)}"
        for at, c in found.items()
    }


def seconds_of_client(run: RunRecord) -> dict[int, float]:
    """Return ``{client: seconds of training over the whole run}``."""
    return _sums(
        (client, number(facts.get("seconds")))
        for row in run.rows
        for client, facts in _clients(row)
    )


def _sums(values: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    """Return the sum of each client's values, ascending by client."""
    sums: dict[int, float] = {}
    for client, value in values:
        if value is not None:
            sums[client] = sums.get(client, 0.0) + value
    return dict(sorted(sums.items()))


def spent(run: RunRecord, part: str, name: str) -> dict[int, float]:
    """Return ``{interaction: value}`` of one entry of ``bytes`` or ``seconds``."""
    values = {
        interaction_of(row, index): number(table(row.get(part)).get(name))
        for index, row in enumerate(run.rows)
    }
    return {at: value for at, value in values.items() if value is not None}


def views_of(run: RunRecord) -> list[str]:
    """Return the views that some client was scored in."""
    found = {
        str(view)
        for row in run.rows
        for _, client in _clients(row)
        for view in table(client.get("views"))
    }
    order = {view: index for index, view in enumerate(VIEWS)}
    return sorted(found, key=lambda view: (order.get(view.partition(":")[0], len(VIEWS)), view))


def view_name(view: str) -> str:
    """Return the name of a view on a page; ``global:nearest`` is ``global`` by another rule."""
    model, _, rule = view.partition(":")
    name = VIEWS[model].title if model in VIEWS else {RECEIVED: "as received"}.get(model, model)
    return f"{name}, {rule}" if rule else name


def _by_id(entries: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield the entries of numbered clients, and not the evaluator's."""
    for key, value in entries.items():
        if str(key).isdecimal():
            yield int(key), value


def _clients(row: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for client, facts in _by_id(table(row.get("clients"))):
        yield client, table(facts)


def _accuracies(row: Mapping[str, Any], view: str, name: str = "accuracy") -> dict[int, float]:
    found = {
        client: number(table(table(facts.get("views")).get(view)).get(name))
        for client, facts in _clients(row)
    }
    return {client: value for client, value in found.items() if value is not None}


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _matrix(weights: list[Any], cohort: list[Any]) -> dict[tuple[int, int], float]:
    is_square = all(isinstance(row, list) and len(row) == len(cohort) for row in weights)
    columns = cohort if is_square else None
    cells = {}
    for receiver, row in zip(cohort, weights, strict=True):
        for j, value in enumerate(row if isinstance(row, list) else ()):
            if (weight := number(value)) is not None:
                cells[int(receiver), int(columns[j]) if columns else j] = weight
    return cells
