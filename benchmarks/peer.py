"""No-op rounds of a cohort, here and in Flower's simulator, in turn.

    python -m venv FLOWER && FLOWER/bin/pip install 'flwr[simulation]'
    python -m benchmarks.peer --python FLOWER/bin/python [--populations 10 50 10000]

Both send weights as large as ResNet-20's down to a cohort of 100, or to everybody, and back, and
take their mean; both use one process for each core. Here a round is also checked, committed and
kept on the disk, and clients are those of a real partition.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.measure import parser_of, tell, usage
from benchmarks.measured import given_as, keep
from benchmarks.overhead import PARAMETERS, experiment, launched

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
TITLE = "No-op rounds with ResNet-20's weights (1.1 MB)"


def main() -> None:
    """Measure each population, and print the table."""
    parser = parser_of("peer", __doc__, "peer")
    parser.add_argument("--python", required=True, help="an interpreter that has Flower")
    parser.add_argument("--populations", type=int, nargs="+", default=[10, 50, 10_000])
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    rows = []
    for population in options.populations:
        size = (population, min(options.cohort, population), options.rounds)
        turns = [(_fedtide(*size), _flower(options.python, *size)) for _ in range(options.turns)]
        row = {"population": population, "cohort": size[1]} | _best(turns)
        rows.append(row | {"ratio": row["flower_round_s"] / row["round_s"]})
    tell("peer", rows)
    if options.keep:
        given = given_as("peer").replace(options.python, "FLOWER")
        keep(options.keep, given, {TITLE: rows}, **_versions(options.python))


def _best(turns: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """Return the smaller figures of the turns: what else runs on the machine only adds to them."""
    ours, theirs = zip(*turns, strict=True)
    found = {key: min(turn[key] for turn in ours) for key in ours[0]}
    return found | {f"flower_{key}": min(turn[key] for turn in theirs) for key in theirs[0]}


def _fedtide(population: int, cohort: int, rounds: int) -> dict[str, float]:
    tables = experiment("resnet20", population, rounds, cohort)
    with tempfile.TemporaryDirectory() as place:
        found = launched(tables, Path(place), os.cpu_count())
    return {key: found[key] for key in ("round_s", "first_round_s", "pss_mb")}


def _flower(python: str, population: int, cohort: int, rounds: int) -> dict[str, float]:
    sizes = map(str, (population, cohort, rounds, PARAMETERS["resnet20"]))
    command = [python, str(Path(__file__).with_name("flower_noop.py")), *sizes]
    begun, most = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.DEVNULL, env={**os.environ, **QUIET}
        )
        while process.poll() is None:
            with_children = psutil.pid_exists(process.pid)
            most = max(most, usage(process.pid).pss_mb if with_children else 0.0)
            time.sleep(0.25)
        said.seek(0)
        lines = said.read().splitlines()
    if process.returncode:
        raise SystemExit(f"Flower's simulator ended with {process.returncode}")
    ended: list[float] = json.loads(lines[-1])
    seconds = [after - before for before, after in itertools.pairwise(ended)]
    return {
        "round_s": statistics.median(seconds[1:]),
        "first_round_s": ended[1] - begun,
        "pss_mb": most,
    }


def _versions(python: str) -> dict[str, str]:
    code = "from importlib.metadata import version; print(version('flwr'), version('ray'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    flower, ray = found.stdout.split()
    return {"Flower": flower, "Ray": ray}


if __name__ == "__main__":
    main()
