"""Seconds to an accuracy with slow clients: synchronous, with a deadline, and asynchronous rounds.

    python -m benchmarks.asynchronous [--seeds 0 1 2] [--seconds 60] [--targets 0.7 0.8 0.85]
        [--buffers 2 4 8]

Ten clients, one process each, hold digits of a few classes each. Two of them wait 4 s before they
train, the others 0.2 s. Every schedule has the same time. A row gives the seconds from the first
order until the global model first had an accuracy on the global test set, as medians over seeds,
and how many commits and uploads there were. Times are those at which scores were written.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import ENV, config_in, launching, parser_of, tell

METHOD = Path(__file__).parent / "plugins" / "slow_clients.py"
CLIENTS, QUICK = 10, 8
SYNCHRONOUS: dict[str, dict[str, dict[str, Any]]] = {
    "synchronous": {"schedule": {"order": "tasks_outer"}},
    "deadline 1 s": {
        "schedule": {"order": "tasks_outer"},
        "server": {"min_clients": QUICK, "deadline_s": 1.0},
    },
}
Curve = list[tuple[float, dict[str, Any]]]
"""The records of a run, each with the seconds since the first order."""


def main() -> None:
    """Measure every schedule and print the table."""
    parser = parser_of("asynchronous", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.7, 0.8, 0.85])
    parser.add_argument("--buffers", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    rows, schedules = [], dict(SYNCHRONOUS)
    for size in options.buffers:
        schedules[f"buffer {size}"] = {"schedule": {"order": "asynchronous", "buffer": size}}
    for name, tables in schedules.items():
        curves = [_curve(tables, seed, options.seconds) for seed in options.seeds]
        rows.append({"schedule": name, **_row(curves, options.targets)})
    tell("asynchronous", rows)


def _row(curves: Sequence[Curve], targets: Sequence[float]) -> dict[str, Any]:
    """Return the medians over the runs of one schedule; None where a run missed a target."""
    row: dict[str, Any] = {}
    for target in targets:
        times = [_seconds_to(curve, target) for curve in curves]
        row[f"s_to_{target:g}"] = _median([t for t in times if t is not None], len(times))
    row["best"] = statistics.median(max(map(_accuracy, curve)) for curve in curves)
    row["commits"] = statistics.median(len(curve) for curve in curves)
    slow = [_uploads(curve, range(CLIENTS - QUICK)) for curve in curves]
    row["uploads"] = statistics.median(_uploads(curve, range(CLIENTS)) for curve in curves)
    row["of_slow_clients"] = statistics.median(slow)
    stale = [record["metrics"].get("staleness", 0.0) for curve in curves for _, record in curve]
    row["staleness"] = statistics.mean(stale)
    return row


def _median(found: list[float], runs: int) -> float | None:
    return statistics.median(found) if len(found) == runs else None


def _seconds_to(curve: Curve, target: float) -> float | None:
    return next((at for at, record in curve if _accuracy((at, record)) >= target), None)


def _accuracy(point: tuple[float, dict[str, Any]]) -> float:
    return float(point[1]["metrics"].get("a_glo_balanced", 0.0))


def _uploads(curve: Curve, clients: range) -> int:
    return sum(client in clients for _, record in curve for client in record["cohort"])


def _curve(tables: dict[str, dict[str, Any]], seed: int, seconds: float) -> Curve:
    """Launch a run, end it after ``seconds``, and return its records."""
    experiment = {
        "seed": seed,
        "data": {"name": "digits"},
        "scenario": {"kind": "dirichlet", "alpha": 0.2},
        "net": {"name": "mlp", "hidden": [64]},
        "method": {"name": f"{METHOD}:SlowClients"},
        "training": {"local_epochs": 2, "batch_size": 16, "lr": 0.05},
        "evaluate": {"views": ["global"], "pictures": 0},
        "server": tables.get("server", {}),
        "schedule": {"rounds": 10_000, "clients": CLIENTS, **tables["schedule"]},
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:  # clients end later
        out = Path(place) / "run"
        command = launching(config_in(Path(place), experiment), out)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENV)
        try:
            return _watched(process, out / "rounds.jsonl", seconds)
        finally:
            process.kill()
            process.wait()


def _watched(process: subprocess.Popen[bytes], lines: Path, seconds: float) -> Curve:
    """Read records as they are written, until ``seconds`` after the first order."""
    curve: Curve = []
    begun: float | None = None
    while begun is None or time.monotonic() - begun < seconds:
        if process.poll() is not None:
            raise SystemExit("the run failed")
        texts = lines.read_text().splitlines(keepends=True) if lines.exists() else []
        now = time.monotonic()
        for text in texts[len(curve) :]:
            if text.endswith("\n"):
                record = json.loads(text)
                begun = now - record["seconds"]["wall"] if begun is None else begun
                curve.append((now - begun, record))
        time.sleep(0.02)
    return curve


if __name__ == "__main__":
    main()
