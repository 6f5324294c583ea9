"""How a round grows with clients, with parameters, with classes and with the population.

    python -m benchmarks.scale [--clients 5 10 20 40] [--widths 64 512 1024 2048]
        [--classes 10 100 1000] [--populations 100 1000 10000 --cohort 100]

Rounds of clients that train nothing, launched like any run, several to a host; for classes, rounds
of FedProto, whose clients have four examples of each class and send a prototype of each. One
quantity grows at a time; the exponent is the slope of log(seconds) over log(quantity), 1 where a
round is linear. Populations are of digits, dealt out with repetition; FedAvg trains a cohort of
them, which stays as large.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import tell
from benchmarks.overhead import experiment, launched

CLIENTS = 10


def main() -> None:
    """Measure and print one table for each quantity."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 10, 20, 40])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512, 1024, 2048])
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--populations", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hosts", type=int, default=2)
    options = parser.parse_args()
    hosts, rounds = options.hosts, options.rounds
    by_clients = [_row(n, 512, rounds, hosts) for n in options.clients]
    tell("scale_clients", [*by_clients, _slope(by_clients, "clients")])
    by_size = [_row(CLIENTS, width, rounds, hosts) for width in options.widths]
    tell("scale_parameters", [*by_size, _slope(by_size, "parameters")])
    by_class = [_row_of_classes(classes, rounds, hosts) for classes in options.classes]
    tell("scale_classes", [*by_class, _slope(by_class, "classes")])
    of_all = [_row_of_population(n, options.cohort, rounds, hosts) for n in options.populations]
    tell("scale_populations", [*of_all, _slope(of_all, "population")])


def _row(clients: int, width: int, rounds: int, hosts: int) -> dict[str, Any]:
    """Return the seconds of a round with an MLP of one hidden square layer of this width."""
    tables = experiment("mlp", clients, rounds)
    tables["net"]["hidden"] = [width, width]
    with tempfile.TemporaryDirectory() as place:
        found = launched(tables, Path(place), hosts)
    parameters = 64 * width + width * width + 2 * width + 11 * width
    return {"clients": clients, "parameters": parameters, **found}


def _row_of_classes(classes: int, rounds: int, hosts: int) -> dict[str, Any]:
    """Return the seconds of a round of FedProto with so many classes."""
    tables = experiment("mlp", CLIENTS, rounds)
    tables |= {"method": {"name": "fedproto"}, "data": {"name": "many-classes"}}
    os.environ["BENCHMARK_CLASSES"] = str(classes)
    with tempfile.TemporaryDirectory() as place:
        found = launched(tables, Path(place), hosts)
    return {"clients": CLIENTS, "classes": classes, **found}


def _row_of_population(clients: int, cohort: int, rounds: int, hosts: int) -> dict[str, Any]:
    """Return what rounds of a cohort cost among so many clients, and what joining sends."""
    tables = experiment("digits-cnn", clients, rounds)
    tables["scenario"] = {"kind": "drawn", "classes": 4}
    tables["method"] = {"name": "fedavg"}
    tables["schedule"]["per_round"] = min(cohort, clients)
    tables["evaluate"]["clients"] = min(cohort, clients)
    with tempfile.TemporaryDirectory() as place:
        found = launched(tables, Path(place), hosts)
        run = Path(place) / "run"
        logs = "".join(path.read_text() for path in (run / "logs").glob("client-*.log"))
        join_bytes = sum(map(int, re.findall(r"clients joined, in (\d+) bytes", logs)))
        stored = sum(path.stat().st_size for path in run.glob("run.db*"))
    shown = ("round_s", "server_s", "first_round_s", "server_anon_mb", "host_anon_mb", "anon_mb")
    row = {"population": clients, "cohort": min(cohort, clients)} | {k: found[k] for k in shown}
    return row | {"join_bytes": join_bytes, "run_db_bytes": stored}


def _slope(rows: Sequence[dict[str, Any]], quantity: str) -> dict[str, Any]:
    """Return the fitted exponent, under the column it belongs to."""
    x = [math.log(row[quantity]) for row in rows]
    fits: dict[str, Any] = {quantity: "exponent"}
    measured = ("round_s", "server_s", "first_round_s", "server_anon_mb", "host_anon_mb")
    for column in (*measured, "join_bytes", "run_db_bytes"):
        if any(not row.get(column) for row in rows):
            continue
        fits[column] = float(np.polyfit(x, [math.log(row[column]) for row in rows], 1)[0])
    return fits


if __name__ == "__main__":
    main()
