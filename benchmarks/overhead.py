"""Rounds of no-op clients against the bare gRPC floor of the same run.

    python -m benchmarks.overhead [--clients 2 10 50] [--nets resnet20 resnet18] [--rounds 40]

Everything fedtide does is on: validation, commits, metrics. Floor and framework alternate; the
floor is run bare, and with the same duties (benchmarks/floor.py). Its clients have a process each.
With ``--hosts`` it runs again with clients that share so many processes, as those of fedtide do.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
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
    rows, floors = [], []
    for net in options.nets:
        for clients in options.clients:
            sizes = (clients, PARAMETERS[net], options.rounds)
            layouts = sorted({clients, options.hosts or clients})
            before = _floors(*sizes, layouts)
            rows.append(_fedtide(net, clients, options.rounds, options.hosts))
            after = _floors(*sizes, layouts)
            floors += _beside(rows[-1], before, after)
    tell("overhead", rows)
    tell("floors", floors)


def _floors(
    clients: int, parameters: int, rounds: int, layouts: Sequence[int]
) -> dict[tuple[int, str], dict[str, Any]]:
    """Measure the floors, bare and with duties, each in a fresh process that may still fork."""
    sizes = (clients, parameters, rounds)
    each = [(processes, kind) for processes in layouts for kind in ("bare", "duties")]
    return {one: said_by("benchmarks.floor", *sizes, *one) for one in each}


def _beside(
    row: dict[str, Any],
    before: dict[tuple[int, str], dict[str, Any]],
    after: dict[tuple[int, str], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield what each floor took beside a run, and the ratio of the run's rounds to it."""
    for (processes, kind), one in before.items():
        both = one, after[processes, kind]
        floor_s = statistics.median(second for each in both for second in each["seconds"])
        yield {
            "net": row["net"], "clients": row["clients"], "processes": processes, "floor": kind,
            "round_s": floor_s, "ratio": row["round_s"] / floor_s,
            **{key: sum(each[key] for each in both) / 2 for key in ("server_cpu_s", "hosts_cpu_s")},
        }  # fmt: skip


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
    ended = time.time()
    records = records_of(out)[2:]
    written = [(out / name).stat().st_mtime for name in (lines.name, "summary.json")]
    return {
        "end_s": written[1] - written[0],
        "left_s": ended - written[1],
        "round_s": statistics.median(r["seconds"]["wall"] for r in records),
        "server_s": statistics.median(r["seconds"]["server"] for r in records),
        **{key: _per_round(looks, key) for key in ("cpu_s", "server_cpu_s", "hosts_cpu_s")},
        "first_round_s": first,
        **{key: max((getattr(look, key) for _, look in looks), default=0.0) for key in MEMORY},
    }


def _per_round(looks: list[tuple[int, Usage]], key: str) -> float | None:
    """Return what grows with each round, such as CPU seconds, from the first to the last look."""
    running = [(done, look) for done, look in looks if look.processes == looks[0][1].processes]
    if len(running) < 2 or running[-1][0] == running[0][0]:
        return None
    grown: float = getattr(running[-1][1], key) - getattr(running[0][1], key)
    return grown / (running[-1][0] - running[0][0])


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
