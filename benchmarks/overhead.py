"""Rounds of no-op clients against the bare gRPC floor of the same run.

    python -m benchmarks.overhead [--clients 2 10 50] [--nets resnet20 resnet18] [--rounds 40]

Everything fedtide does is on: validation, commits, metrics. Floor and framework alternate; the
floor is run bare, and with the same duties (benchmarks/floor.py).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Usage,
    config_in,
    launching,
    parser_of,
    records_of,
    said_by,
    tell,
    usage,
)  # fmt: skip

PLUGINS = Path(__file__).parent / "plugins"
MEMORY = ("server_pss_mb", "server_anon_mb", "host_anon_mb", "pss_mb", "anon_mb", "rss_mb")
PARAMETERS = {"resnet20": 272_474 + 1_376, "resnet18": 11_173_962 + 9_600}


def main() -> None:
    """Measure every combination and print the table."""
    parser = parser_of("overhead", __doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 10, 50])
    parser.add_argument("--nets", nargs="+", default=["resnet20"], choices=list(PARAMETERS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--hosts", type=int, help="client processes; by default one per client")
    options = parser.parse_args()
    rows = []
    for net in options.nets:
        for clients in options.clients:
            sizes = (clients, PARAMETERS[net], options.rounds)
            floors = [_floors_in_processes(*sizes)]
            row = _fedtide(net, clients, options.rounds, options.hosts)
            floors.append(_floors_in_processes(*sizes))
            bare, duties = (statistics.median(a + b) for a, b in zip(*floors, strict=True))
            row |= {"floor_s": bare, "ratio": row["round_s"] / bare}
            row |= {"duties_s": duties, "ratio_to_duties": row["round_s"] / duties}
            rows.append(row)
    tell("overhead", rows)


def _floors_in_processes(clients: int, parameters: int, rounds: int) -> list[list[float]]:
    """Measure the floor, bare and with duties, each in a fresh process that may still fork."""
    sizes = (clients, parameters, rounds)
    return [said_by("benchmarks.floor", *sizes, *kind)[2:] for kind in ([], ["duties"])]


def _fedtide(net: str, clients: int, rounds: int, hosts: int | None) -> dict[str, Any]:
    """Launch a run of no-op clients and read what its rounds took."""
    with tempfile.TemporaryDirectory() as place:
        found = launched(experiment(net, clients, rounds), Path(place), hosts or clients)
    return {"net": net, "clients": clients, "hosts": hosts or clients, **found}


def launched(
    tables: dict[str, Any], place: Path, hosts: int | str, tree: Path | None = None
) -> dict[str, Any]:
    """Run an experiment; return what its rounds and its processes took, in s and MB.

    Args:
        tables: the experiment.
        place: where its run directory goes.
        hosts: how many processes the clients have, as ``launch`` takes it.
        tree: the checkout whose code runs; this one unless given.
    """
    out = place / "run"
    command = launching(config_in(place, tables), out, "--hosts", hosts)
    code = [tree, tree / "models", tree / "proto"] if tree else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [PLUGINS, *code]))}
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env, cwd=tree)
    first: float | None = None
    looks: list[tuple[int, Usage]] = []
    lines = out / "rounds.jsonl"
    while process.poll() is None:
        if first is None and lines.exists() and lines.stat().st_size:
            first = time.monotonic() - begun
        if first is not None:
            looks.append((lines.read_bytes().count(b"\n"), usage(process.pid)))
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit(f"the run failed: see {out / 'logs'}")
    records = records_of(out)[2:]
    written = [(out / name).stat().st_mtime for name in (lines.name, "summary.json")]
    return {
        "end_s": written[1] - written[0],
        "round_s": statistics.median(r["seconds"]["wall"] for r in records),
        "server_s": statistics.median(r["seconds"]["server"] for r in records),
        "cpu_s": _cpu_per_round(looks),
        "first_round_s": first,
        **{key: max((getattr(look, key) for _, look in looks), default=0.0) for key in MEMORY},
    }


def _cpu_per_round(looks: list[tuple[int, Usage]]) -> float | None:
    """Return the CPU seconds of all processes per round, between the first and the last look."""
    running = [(done, look) for done, look in looks if look.processes == looks[0][1].processes]
    if len(running) < 2 or running[-1][0] == running[0][0]:
        return None
    return (running[-1][1].cpu_s - running[0][1].cpu_s) / (running[-1][0] - running[0][0])


def experiment(net: str, clients: int, rounds: int, cohort: int | None = None) -> dict[str, Any]:
    """Return a run whose only cost is the framework; it scores after the last round alone.

    With ``cohort``, so many clients take part in a round, and clients hold four classes each.
    """
    tables: dict[str, Any] = {
        "data": {"name": "digits"},
        "scenario": {"kind": "iid"},
        "net": {"name": net},
        "method": {"name": "noop"},
        "schedule": {"rounds": rounds, "clients": clients},
        "evaluate": {"every": 0, "views": ["global"], "pictures": 0},
    }
    if cohort is not None:
        tables["scenario"] = {"kind": "drawn", "classes": 4}
        tables["schedule"]["per_round"] = tables["evaluate"]["clients"] = min(cohort, clients)
    return tables


if __name__ == "__main__":
    main()
