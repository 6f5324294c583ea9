"""Rounds of no-op clients beside those of another checkout: CI fails where they take more.

    git worktree add ../before HEAD^ && python -m benchmarks.paired ../before

Processor seconds of a round are compared for each process, coordinator and hosts, in turn: before,
now, now, before. One that takes more than ``--most`` times as long in each of ``--tries`` tries is
a regression, and the command ends with 1. Fewer tries would fail for what else a machine does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import parser_of, tell
from benchmarks.overhead import experiment, launched

PROCESSES = ("server_cpu_s", "hosts_cpu_s")
HERE = Path(__file__).parents[1]
NETS = {"digits-cnn": 120, "resnet20": 80, "resnet18": 12}
"""Rounds of each net: seconds of rounds, since processors count in hundredths of one."""


def main() -> int:
    """Compare; return the exit status."""
    parser = parser_of("paired", __doc__)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--most", type=float, default=1.05)
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for net in options.nets:
        tables = experiment(net, options.clients, NETS[net])
        left = set(PROCESSES)
        for number in range(options.tries):
            row = ratios(tables, options.before.resolve())
            rows.append({"net": net, "try": number + 1, **row})
            left = {process for process in left if row[process] > options.most}
            if not left:
                break
        rows[-1]["more"] = ", ".join(sorted(left))
    tell("paired", rows)
    more = [f"{row['net']}: {row['more']}" for row in rows if row.get("more")]
    for line in more:
        print(f"more than {options.most:g} times as much in each try: {line}", file=sys.stderr)
    return int(bool(more))


def ratios(tables: dict[str, Any], before: Path) -> dict[str, float]:
    """Return what each process takes, by what it took in the other checkout."""
    took = {tree: dict.fromkeys(PROCESSES, 0.0) for tree in (before, HERE)}
    for tree in (before, HERE, HERE, before):  # a drift hits both
        with tempfile.TemporaryDirectory() as place:
            found = launched(tables, Path(place), 2, tree)
        for process in PROCESSES:
            took[tree][process] += found[process]
    return {process: took[HERE][process] / took[before][process] for process in PROCESSES}


if __name__ == "__main__":
    sys.exit(main())
