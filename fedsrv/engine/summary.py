"""The summary of a whole run, from its committed records."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from fedmodels.config.experiment import Experiment
from fedmodels.facts.position import Stage, Task
from fedmodels.numerics.metric_names import (
    BEST,
    CHOSEN,
    DEFINITIONS,
    OF_FIGURE,
    is_written_by_runs,
)
from fedmodels.numerics.metrics import (
    best_round,
    chosen,
    forgetting,
)
from fedmodels.own.code_names import short_name
from fedmodels.tensors.bundle import EVALUATOR
from fedmodels.training.fault import line_of
from fedsrv.state.record import ClientRow, MeansOver, Record, means_of

log = logging.getLogger(__name__)
Figures = Callable[[Sequence[Record]], Mapping[str, float]]
"""Computes figures of a run from its records."""
NOTHING: Mapping[str, Figures] = MappingProxyType({})

_OF_CLIENTS = ("personalization", "personalization_std", "generalization", "generalization_std")
_OF_SERVER = ("global_f1", "a_glo_balanced")


def summarise(
    records: Sequence[Record],
    experiment: Experiment,
    local_view: str,
    state_sha256: str,
    count_macs: Callable[[], Sequence[int]],
    datasets: Sequence[str] = (),
    of_parts: Mapping[str, Figures] = NOTHING,
) -> dict[str, Any]:
    """Return the content of ``summary.json``; ``of_parts`` are figures of parts, by their names.

    The run has finished, so no figure of the report may fail it: ``figures_missing`` says which
    ones could not be computed, and why.
    """
    rows = [row for record in records for row in record["clients"].values()]
    skipped = sum(row.get("skipped_examples", 0) for row in rows)
    missing: dict[str, str] = {}
    compute: dict[str, int] = {}
    metrics: dict[str, float] = {}
    with _figure("compute", missing):
        macs, epochs, net = count_macs(), experiment.training.local_epochs, experiment.net
        forward = sum(
            macs[net.number_of(int(client))]
            * (row.get("num_examples", 0) - row.get("skipped_examples", 0))
            for record in records
            for client, row in record["clients"].items()
            if client != EVALUATOR  # it trains on nothing
        )
        compute = {"macs_per_example": macs[0]} if len(macs) == 1 else {}
        compute["training_macs"] = 3 * epochs * forward  # backward counts twice
    with _figure("metrics", missing):
        metrics = run_metrics(records, experiment, local_view)
    for name, figures_of in of_parts.items():
        with _figure(name, missing):
            found = figures_of(records)
            metrics |= {key: value for key, value in found.items() if np.isfinite(value)}
    return {
        "format": 2,
        "method": experiment.method.name,
        "data": data_of(experiment, datasets),
        "scenario": experiment.scenario.kind if experiment.scenario else "",
        "seed": experiment.seed,
        "rounds": 1 + max((r["round"] for r in records), default=-1),
        "definitions": DEFINITIONS,
        "metrics": metrics,
        **_population(records),
        "bytes": {
            key: sum(r["bytes"][key] for r in records)
            for key in ("down", "up", "wire_down", "wire_up")
        },
        "seconds": {
            key: sum(r["seconds"][key] for r in records) for key in ("train", "server", "wall")
        },
        "compute": {
            **compute,
            "peak_client_rss_bytes": max((row.get("peak_rss_bytes", 0) for row in rows), default=0),
        },
        "state_sha256": state_sha256,
        **({"skipped_examples": skipped} if skipped else {}),
        **({"withheld": withheld} if (withheld := _withheld(records)) else {}),
        **({"figures_missing": missing} if missing else {}),
    }


def _population(records: Sequence[Record]) -> dict[str, Any]:
    """Return over how many clients the last means are, and from which rounds on over others."""
    facts = {
        "means_over": next((over for r in reversed(records) if (over := means_of(r))), {}),
        "means_changed": MeansOver(records).changes,
    }
    return {key: value for key, value in facts.items() if value}


def _withheld(records: Sequence[Record]) -> dict[str, int]:
    """Return what sites kept to themselves: by name, of how many clients."""
    found: dict[str, set[str]] = {}
    for record in records:
        for client, names in record.get("withheld", {}).items():
            for name in names:
                found.setdefault(name, set()).add(client)
    return {name: len(found[name]) for name in sorted(found)}


@contextmanager
def _figure(name: str, missing: dict[str, str]) -> Iterator[None]:
    """Note why a figure of the report is missing, if the block that computes it fails."""
    try:
        yield
    except Exception as error:  # a net of somebody else, or a file that has gone
        log.debug("the summary goes without %s", name, exc_info=error)
        missing[name] = line_of(error)


def data_of(experiment: Experiment, datasets: Sequence[str]) -> str:
    """Return the name of the data as clients state it, or else as the config does."""
    if datasets:
        return " and ".join(name for name, _ in Counter(datasets).most_common(3))
    return short_name(experiment.data.name) if experiment.data else "own"


def run_metrics(
    records: Sequence[Record], experiment: Experiment, local_view: str
) -> dict[str, float]:
    """Return a run's metrics: means over the last scored rounds, unless a metric says otherwise.

    ``best_…`` are values of the round that is best by ``evaluate.select_by`` (FedAli). AA is the
    mean of the IAA series (pFedGRP). Forgetting comes from the last scored round of each task.
    :mod:`fedmodels.numerics.metric_tables` says what each metric is.
    """
    scored = [r["metrics"] for r in records if "a_glo" in r["metrics"] or "a_loc" in r["metrics"]]
    scored = scored or [r["metrics"] for r in records if r["metrics"]]
    out = _last(scored, experiment.evaluate.last_rounds)
    have_own_tasks = any("task" in row for r in records for row in r.get("clients", {}).values())
    if have_own_tasks:
        pass  # no task is one of all clients
    elif experiment.schedule.selects:
        out |= _a_sel_by_task(records, experiment.evaluate.last_rounds)
    else:
        out.pop("a_sel", None)  # the cohort is everybody: a_loc
    if spent := [r["metrics"]["epsilon"] for r in records if "epsilon" in r["metrics"]]:
        out["epsilon"] = spent[-1]  # epsilon adds up over the run: the last value, no mean
    out |= _best_rounds(scored, experiment.evaluate.select_by)
    out |= _chosen_round(records, experiment.chosen_by)
    iaa = [metrics["iaa"] for metrics in scored if "iaa" in metrics]
    if iaa:
        rounds = 1 + max(record["round"] for record in records)
        out["aa" if len(iaa) == rounds else "aa_scored"] = float(np.mean(iaa))
    whole = have_own_tasks or _ends_of_tasks_are_scored(records)
    views = {"forgetting" if whole else "forgetting_scored": local_view}
    if whole:
        views["forgetting_received"] = "after_downlink"
        if is_scored_in(records, "after_local"):
            views["forgetting_trained"] = "after_local"
    for name, view in views.items():
        if have_own_tasks:
            out[name] = forgetting_of_streams(records, view)
            continue
        lost = accuracy_lost(records, view)
        if len(lost) > 1:
            out[name] = forgetting(lost)
    return {key: value for key, value in out.items() if np.isfinite(value)}


def _last(scored: Sequence[Mapping[str, float]], rounds: int) -> dict[str, float]:
    """Return the means over the last scored rounds, of those that have a metric.

    A method reports some of its own figures now and then, such as at the end of a task: their last
    values count. A score that the last rounds lack is left out: nobody in them has such test data.
    """
    out: dict[str, float] = {}
    for key in sorted({key for metrics in scored for key in metrics}):
        among = scored[-rounds:] if is_written_by_runs(key) else scored
        if series := [metrics[key] for metrics in among if key in metrics]:
            out[key] = float(np.mean(series[-rounds:]))
    return out


def _a_sel_by_task(records: Sequence[Record], last_rounds: int) -> dict[str, float]:
    """Return A_sel after each task, at both moments (GLDP, figure 4); nothing of a single task."""
    out: dict[str, float] = {}
    received = "after_downlink" if is_scored_in(records, "after_downlink") else "global"
    for moment, view in (("received", received), ("trained", "after_local")):
        for part, key in (("", "accuracy"), ("_minority", "minority")):
            series: dict[Stage, list[float]] = {}
            for record in records:
                rows = [record.get("clients", {}).get(str(c), {}) for c in record["cohort"]]
                views = [row["views"][view] for row in rows if view in row.get("views", {})]
                if known := [each[key] for each in views if each.get(key) is not None]:
                    series.setdefault(record["task"], []).append(float(np.mean(known)))
            if len(series) > 1:
                out |= {
                    f"a_sel_{moment}{part}_task_{task}": float(np.mean(means[-last_rounds:]))
                    for task, means in series.items()
                }
    return out


def _best_rounds(scored: Sequence[Mapping[str, float]], select_by: str) -> dict[str, float]:
    """Return FedAli's metrics at the round that is best on test data, and each view's highest."""
    out = {
        f"best_{name}": max(series)
        for name in BEST
        if (series := [metrics[name] for metrics in scored if name in metrics])
    }
    by_f1 = select_by == "f1"
    for names, key in (
        (_OF_CLIENTS, "personalization" if by_f1 else "a_loc_trained"),
        (_OF_SERVER, "global_f1" if by_f1 else "a_glo_balanced"),
    ):
        candidates = [m for m in scored if key in m and names[0] in m]
        if candidates:
            best = candidates[best_round([m[key] for m in candidates])]  # ties: the earliest
            out |= {f"best_{name}": best[name] for name in names if name in best}
    return out


def _chosen_round(records: Sequence[Record], by: str) -> dict[str, float]:
    """Return the round that is best on validation parts, from 1, and its scores on test data."""
    number = chosen([record["metrics"].get(by) for record in records])
    if number is None:
        return {}
    metrics = records[number]["metrics"]
    names = (*CHOSEN, *filter(OF_FIGURE.fullmatch, metrics))
    found = {f"chosen_{name}": metrics[name] for name in names if name in metrics}
    return {"chosen_round": float(records[number]["round"] + 1), **found}


def _ends_of_tasks_are_scored(records: Sequence[Record]) -> bool:
    """Tell whether the last round of every task is scored."""
    ends = {record["task"]: record for record in records}
    clients = [end.get("clients", {}).values() for end in ends.values()]
    return all(any(row.get("views") for row in rows) for rows in clients)


def accuracy_lost(records: Sequence[Record], local_view: str) -> np.ndarray[Any, Any]:
    """Return L (T, T): accuracy on task j after the last round of task i, minus that at the end.

    All clients are on one task at a time. Each entry is the mean over the clients that have both
    figures, so that no client's model is compared with another's: where rounds select clients, not
    all are scored after each task. It is everyone's model where no client is scored in the view. An
    entry without such a client is NaN.
    """
    view = local_view if is_scored_in(records, local_view) else "global"
    last: dict[Task, dict[str, dict[int, float]]] = {}
    for record in records:
        rows = record.get("clients", {})
        if any(has_tasks(row, view) for row in rows.values()):
            last[Task(record["task"])] = {c: by_task(row, view) for c, row in rows.items()}
    tasks = sorted(last)
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    for i, after in enumerate(tasks):
        for j, task in enumerate(tasks[: i + 1]):
            pairs = [
                (found.get(task), last[tasks[-1]].get(client, {}).get(task))
                for client, found in last[after].items()
            ]
            lost = [then - now for then, now in pairs if then is not None and now is not None]
            matrix[i, j] = np.mean(lost) if lost else np.nan
    return matrix


def forgetting_of_streams(records: Sequence[Record], local_view: str) -> float:
    """Return the forgetting of a run whose clients have tasks of their own.

    R_i[t, k] is client i's accuracy on its task k after the last scored round in which its present
    task was t. Its forgetting is that of R_i (:func:`~fedmodels.numerics.metrics.forgetting`), over
    the tasks that its last score covers. The mean is over the clients that have one.
    """
    from fedmodels.numerics.streams import lost_in_stream  # few runs have such clients

    view = local_view if is_scored_in(records, local_view) else "global"
    scored: dict[str, list[tuple[int, dict[int, float]]]] = {}
    for record in records:
        for client, row in record.get("clients", {}).items():
            if "task" in row and has_tasks(row, view):
                scored.setdefault(client, []).append((row["task"], by_task(row, view)))
    lost = [lost_in_stream(each).values() for each in scored.values()]
    found = [float(np.mean([*differences])) for differences in lost if differences]
    return float(np.mean(found)) if found else np.nan


def is_scored_in(records: Sequence[Record], view: str) -> bool:
    """Tell whether any client is scored in a view."""
    rows = (row for record in records for row in record.get("clients", {}).values())
    return any(view in row.get("views", {}) for row in rows)


def has_tasks(row: ClientRow, view: str) -> bool:
    """Tell whether a client is scored on single tasks in a view."""
    return bool(row.get("views", {}).get(view, {}).get("tasks"))


def by_task(row: ClientRow, view: str) -> dict[int, float]:
    """Return a client's accuracy on each task that it is scored on in a view."""
    scored = row.get("views", {}).get(view, {})
    tasks = enumerate(scored.get("tasks") or (), scored.get("first_task", 0))
    return {task: accuracy for task, accuracy in tasks if accuracy is not None}
