"""The figures of a whole run, from its committed records: each metric by its own rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmodels.config import Experiment
from fedmodels.errors import DataError
from fedmodels.metrics import average_forgetting_measure, forgetting

Record = Mapping[str, Any]
_BEST_ROUND = ("personalization", "personalization_std", "generalization", "generalization_std")


def summarise(
    records: Sequence[Record], experiment: Experiment, local_view: str, state_sha256: str
) -> dict[str, Any]:
    """Return ``summary.json``."""
    return {
        "format": 1,
        "method": experiment.method.name,
        "data": experiment.data.name,
        "scenario": experiment.scenario.kind,
        "seed": experiment.seed,
        "rounds": 1 + max((r["round"] for r in records), default=-1),
        "metrics": run_metrics(records, experiment, local_view),
        "bytes": {
            key: sum(r["bytes"][key] for r in records)
            for key in ("down", "up", "wire_down", "wire_up")
        },
        "seconds": {
            key: sum(r["seconds"][key] for r in records) for key in ("train", "server", "wall")
        },
        "state_sha256": state_sha256,
    }


def run_metrics(
    records: Sequence[Record], experiment: Experiment, local_view: str
) -> dict[str, float]:
    """Return a run's metrics: means over the last scored rounds, unless a metric says otherwise.

    Personalization and Generalization are those of the round with the best mean Personalization,
    Global F1 and accuracy those of their best round (FedAli); AA is the mean of the IAA series and
    AFM is taken against the reference run (pFedGRP); forgetting is over the stages of the last
    round of each task.
    """
    scored = [r["metrics"] for r in records if "a_glo" in r["metrics"] or "a_loc" in r["metrics"]]
    scored = scored or [r["metrics"] for r in records if r["metrics"]]
    out: dict[str, float] = {}
    for key in sorted({key for metrics in scored for key in metrics}):
        series = [metrics[key] for metrics in scored if key in metrics]
        out[key] = float(np.mean(series[-experiment.evaluate.last_rounds :]))
    out |= _best_round(scored)
    iaa = [metrics["iaa"] for metrics in scored if "iaa" in metrics]
    if iaa:
        out["aa"] = float(np.mean(iaa))
        if experiment.evaluate.reference:
            reference = iaa_series(Path(experiment.evaluate.reference))
            out["afm"] = average_forgetting_measure(iaa, reference)
    matrix = stage_matrix(records, local_view)
    if len(matrix) > 1:
        out["forgetting"] = forgetting(matrix)
    return {key: value for key, value in out.items() if np.isfinite(value)}


def _best_round(scored: Sequence[Mapping[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    candidates = [m for m in scored if "personalization" in m]
    if candidates:
        best = max(candidates, key=lambda m: m["personalization"])  # ties: the earliest round
        out |= {key: best[key] for key in _BEST_ROUND if key in best}
        out["personalization_last"] = candidates[-1]["personalization"]
    for key in ("global_f1", "global_acc"):
        series = [m[key] for m in scored if key in m]
        if series:
            out[key], out[f"{key}_last"] = max(series), series[-1]
    return out


def stage_matrix(records: Sequence[Record], local_view: str) -> np.ndarray[Any, Any]:
    """Return R (T, T): mean accuracy on task j after training on task i, in i's last round.

    Entries a client cannot have (task j not met, or no test data) are left out of the mean; NaN
    where nobody has one.
    """
    last: dict[int, Record] = {}
    for record in records:
        if any(_task_series(row, local_view) for row in record.get("clients", {}).values()):
            last[record["task"]] = record
    stages = sorted(last)
    matrix = np.full((len(stages), len(stages)), np.nan)
    for i, stage in enumerate(stages):
        rows = [_task_series(row, local_view) for row in last[stage]["clients"].values()]
        for j, task in enumerate(stages[: i + 1]):
            values = [a for row in rows if len(row) > task and (a := row[task]) is not None]
            matrix[i, j] = np.mean(values) if values else np.nan
    return matrix


def _task_series(row: Mapping[str, Any], local_view: str) -> list[float | None]:
    views = row.get("views", {})
    found = views.get(local_view, {}).get("tasks") or views.get("global", {}).get("tasks") or []
    return list(found)


def iaa_series(run: Path) -> list[float]:
    """Return the IAA series of a reference run.

    Raises:
        DataError: the run has none.
    """
    try:
        lines = (run / "rounds.jsonl").read_text().splitlines()
    except OSError as error:
        raise DataError(
            f"evaluate.reference: {run} is no run directory ({error.strerror}); run the "
            "Centralized reference first"
        ) from None
    series = [metrics["iaa"] for line in lines if "iaa" in (metrics := json.loads(line)["metrics"])]
    if not series:
        raise DataError(f"evaluate.reference: the run {run} has no IAA series")
    return series
