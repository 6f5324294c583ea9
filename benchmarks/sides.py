"""Two layouts of one run, or two checkouts of this repository, in turn.

    python -m benchmarks.sides [--clients 50] [--sides 50 auto] [--turns 2] [--rounds 10]
        [--method noop] [--net digits-cnn]
    python -m benchmarks.sides --clients 160 --sides 2@../before 2

A side is what ``--hosts`` takes, and after an @ a checkout unless it is this one. Clients learn
digits, or do nothing with ``noop``. ``end_s`` goes from the last commit to the summary, and
``left_s`` from there until the command ends. The last row has the ratio of the second side to the
first.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import parser_of, tell
from benchmarks.overhead import experiment, launched

SHOWN = (
    "round_s", "cpu_s", "server_cpu_s", "hosts_cpu_s", "first_round_s", "end_s", "left_s",
    "server_anon_mb", "host_anon_mb", "pss_mb",
)  # fmt: skip


def main() -> None:
    """Run both sides in turn and print their medians."""
    parser = parser_of("sides", __doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--cohort", type=int, help="clients of a round; all unless given")
    parser.add_argument("--sides", nargs=2, default=["50", "auto"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--method", default="noop")
    parser.add_argument("--net", default="digits-cnn")
    options = parser.parse_args()
    tables = experiment(options.net, options.clients, options.rounds, options.cohort)
    tables["method"] = {"name": options.method}
    found: list[list[dict[str, Any]]] = [[], []]
    for turn in range(2 * options.turns):
        number = (turn + turn // 2) % 2  # first, second, second, first: a drift hits both
        found[number].append(_run(tables, options.sides[number]))
        print(json.dumps({"side": options.sides[number], **found[number][-1]}), flush=True)
    digests = {run.pop("state_sha256") for runs in found for run in runs}
    rows = [
        {"side": side, **{key: statistics.median(run[key] or 0.0 for run in runs) for key in SHOWN}}
        for side, runs in zip(options.sides, found, strict=True)
    ]
    ratios = {key: rows[1][key] / rows[0][key] if rows[0][key] else None for key in SHOWN}
    tell("sides", [*rows, {"side": "ratio", **ratios}])
    print("the same state" if len(digests) == 1 else f"states differ: {sorted(digests)}")


def _run(tables: dict[str, Any], side: str) -> dict[str, Any]:
    hosts, _, tree = side.partition("@")
    with tempfile.TemporaryDirectory() as place:
        found = launched(tables, Path(place), hosts, Path(tree).resolve() if tree else None)
        summary = json.loads((Path(place) / "run" / "summary.json").read_text())
    return {key: found[key] for key in SHOWN} | {"state_sha256": summary["state_sha256"]}


if __name__ == "__main__":
    main()
