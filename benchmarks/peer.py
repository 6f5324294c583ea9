"""No-op rounds of a cohort, here and in Flower's and pfl's simulators, in turn.

    python -m venv FLOWER && FLOWER/bin/pip install 'flwr[simulation]'
    python -m venv PFL && PFL/bin/pip install 'pfl[pytorch]'
    python -m benchmarks.peer --python FLOWER/bin/python [--pfl PFL/bin/python]
        [--populations 10 50 10000]

Here and in Flower weights as large as ResNet-20's go down to a cohort of 100, or to everybody, and
back, and their mean is taken, with one process for each core. pfl has all clients in one process,
and sends nothing. Here a round is also checked, committed and kept on the disk, and clients are
those of a real partition.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
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
    parser.add_argument("--pfl", help="an interpreter that has pfl")
    parser.add_argument("--populations", type=int, nargs="+", default=[10, 50, 10_000])
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    simulators = {"flower": options.python} | ({"pfl": options.pfl} if options.pfl else {})
    rows = []
    for population in options.populations:
        size = (population, min(options.cohort, population), options.rounds)
        turns = [_turn(size, simulators) for _ in range(options.turns)]
        row = {"population": population, "cohort": size[1]} | _best(turns)
        rows.append(row | {"ratio": row["flower_round_s"] / row["round_s"]})
    tell("peer", rows)
    if options.keep:
        given, versions = given_as("peer"), dict[str, str]()
        for name, python in simulators.items():
            given, versions = given.replace(python, name.upper()), versions | _versions(python)
        keep(options.keep, given, {TITLE: rows}, **versions)


def _turn(size: tuple[int, int, int], simulators: Mapping[str, str]) -> dict[str, float]:
    """Measure each side once."""
    found = _fedtide(*size)
    for name, python in simulators.items():
        figures = _simulated(python, f"{name}_noop.py", *size)
        found |= {f"{name}_{key}": value for key, value in figures.items()}
    return found


def _best(turns: list[dict[str, float]]) -> dict[str, float]:
    """Return the smaller figures of the turns: what else runs on the machine only adds to them."""
    return {key: min(turn[key] for turn in turns) for key in turns[0]}


def _fedtide(population: int, cohort: int, rounds: int) -> dict[str, float]:
    tables = experiment("resnet20", population, rounds, cohort)
    with tempfile.TemporaryDirectory() as place:
        found = launched(tables, Path(place), os.cpu_count())
    return {key: found[key] for key in ("round_s", "first_round_s", "pss_mb")}


def _simulated(
    python: str, file: str, population: int, cohort: int, rounds: int
) -> dict[str, float]:
    sizes = map(str, (population, cohort, rounds, PARAMETERS["resnet20"]))
    command = [python, str(Path(__file__).with_name(file)), *sizes]
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
        raise SystemExit(f"{file} ended with {process.returncode}")
    ended: list[float] = json.loads(lines[-1])
    seconds = [after - before for before, after in itertools.pairwise(ended)]
    return {
        "round_s": statistics.median(seconds[1:]),
        "first_round_s": ended[1] - begun,
        "pss_mb": most,
    }


def _versions(python: str) -> dict[str, str]:
    code = (
        "import json; from importlib.metadata import distributions; "
        "print(json.dumps({one.name: one.version for one in distributions()}))"
    )
    held = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    known = {"flwr": "Flower", "ray": "Ray", "pfl": "pfl"}
    found: dict[str, str] = json.loads(held.stdout)
    return {known[name]: found[name] for name in known if name in found}


if __name__ == "__main__":
    main()
