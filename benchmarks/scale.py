"""How a round grows with clients, with parameters, with classes and with the population.

    python -m benchmarks.scale [--clients 5 10 20 40] [--widths 64 512 1024 2048]
        [--classes 10 100 1000] [--populations 100 1000 10000 --cohort 100]

Rounds of clients that train nothing, launched like any run, several to a host; for classes, rounds
of FedProto, whose clients have four examples of each class and send a prototype of each. One
quantity grows at a time; the exponent is the slope of log(seconds) over log(quantity), 1 where a
round is linear. Populations are of digits, dealt out with repetition; FedAvg trains a cohort of
them, which stays as large. An option without numbers leaves its table out; ``--keep`` writes the
record that docs/results/scale.md is made from, or another one by name.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import parser_of, records_of, tell
from benchmarks.measured import exponents, given_as, keep
from benchmarks.overhead import experiment, launched

CLIENTS = 10
POPULATIONS = "Clients that a cohort is drawn from: FedAvg on digits, the small CNN"
CLIENTS_OF_A_ROUND = "Clients in a round that train nothing: an MLP"
PARAMETERS = "Parameters: ten clients that train nothing, an MLP"
METHODS = (
    "What methods keep of each client: four rounds among 1,000 clients of digits, the small CNN"
)
CLASSES = "Classes: ten clients that train nothing, prototypes of FedProto"
GROWS = {
    POPULATIONS: "population",
    CLIENTS_OF_A_ROUND: "clients",
    PARAMETERS: "parameters",
    CLASSES: "classes",
    METHODS: None,
}
"""What grows in each table."""


def main() -> None:
    """Measure and print one table for each quantity."""
    parser = parser_of("scale", __doc__, "scale")
    parser.add_argument("--clients", type=int, nargs="*", default=[5, 10, 20, 40])
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 512, 1024, 2048])
    parser.add_argument("--classes", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--populations", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hosts", type=int, default=2)
    options = parser.parse_args()
    how = (options.rounds, options.hosts)
    found = {
        POPULATIONS: [_row_of_population(n, options.cohort, *how) for n in options.populations],
        CLIENTS_OF_A_ROUND: [_row(n, 512, *how) for n in options.clients],
        PARAMETERS: [_row(CLIENTS, width, *how) for width in options.widths],
        CLASSES: [_row_of_classes(classes, *how) for classes in options.classes],
        METHODS: [_row_of_method(name, options.cohort, options.hosts) for name in options.methods],
    }
    tables = {title: rows for title, rows in found.items() if rows}
    for title, rows in tables.items():
        grows = GROWS[title]
        last = [] if grows is None else [{grows: "exponent", **exponents(rows, grows)}]
        tell(title, [*rows, *last])
    if options.keep:
        keep(options.keep, given_as("scale"), tables, GROWS)


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
    tables["evaluate"] = {
        **tables["evaluate"],
        "views": ["after_downlink"],
    }  # it has no global model
    os.environ["BENCHMARK_CLASSES"] = str(classes)
    with tempfile.TemporaryDirectory() as place:
        found = launched(tables, Path(place), hosts)
    return {"clients": CLIENTS, "classes": classes, **found}


def _row_of_population(clients: int, cohort: int, rounds: int, hosts: int) -> dict[str, Any]:
    """Return what rounds of a cohort cost among so many clients, and what joining sends."""
    tables = {**experiment("digits-cnn", clients, rounds, cohort), "method": {"name": "fedavg"}}
    with tempfile.TemporaryDirectory() as place:
        found = launched(tables, Path(place), hosts)
        run = Path(place) / "run"
        logs = "".join(path.read_text() for path in (run / "logs").glob("client-*.log"))
        join_bytes = sum(map(int, re.findall(r"clients joined, in (\d+) bytes", logs)))
        stored = sum(path.stat().st_size for path in run.glob("run.db*"))
        last = records_of(run)[-2]
    shown = ("round_s", "server_s", "first_round_s", "server_anon_mb", "host_anon_mb", "anon_mb")
    row = {"population": clients, "cohort": min(cohort, clients)} | {k: found[k] for k in shown}
    row |= {f"{way}_bytes": last["bytes"][way] for way in ("down", "up")}
    return row | {"join_bytes": join_bytes, "run_db_bytes": stored}


def _row_of_method(name: str, cohort: int, hosts: int) -> dict[str, Any]:
    """Return what a method keeps on the server after four rounds among 1,000 clients."""
    tables = {**experiment("digits-cnn", 1000, 4, cohort), "method": {"name": name}}
    with tempfile.TemporaryDirectory() as place:
        found = launched(tables, Path(place), hosts)
        run = Path(place) / "run"
        records = records_of(run)
        state = max((run / "server").glob("state-*.safetensors")).stat().st_size
        stored = sum(path.stat().st_size for path in run.glob("run.db*"))
    trained = len({client for record in records for client in record["cohort"]})
    told = ("round_s", "server_s", "server_anon_mb", "host_anon_mb")
    row = {"method": name, "cohort": cohort, "trained": trained} | {key: found[key] for key in told}
    return row | {"state_bytes": state, "run_db_bytes": stored}


if __name__ == "__main__":
    main()
