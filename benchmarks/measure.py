"""What benchmarks share: options, processes and turns, what they read of runs, what they print."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tomli_w

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
"""The environment of processes that train."""


def parser_of(name: str, text: str | None, record: str = "") -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options; its help is the text of the benchmark's file.

    With the name of a record there is ``--keep``, which may name another one.
    """
    form = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(
        f"python -m benchmarks.{name}", None, text, formatter_class=form
    )
    if record:
        about = "write a record of benchmarks/records/measured, by this name or another"
        found.add_argument("--keep", nargs="?", const=record, help=about)
    return found


def config_in(place: Path, tables: Mapping[str, Any]) -> Path:
    """Write an experiment into a directory; return its file."""
    file = place / "config.toml"
    file.write_text(tomli_w.dumps(tables))
    return file


def launching(config: Path, out: Path, *options: object) -> list[str]:
    """Return the command that launches a run."""
    words = ["launch", str(config), "--out", str(out), *map(str, options)]
    return [sys.executable, "-m", "fedsrv", *words]


def said_by(module: str, *words: object) -> Any:
    """Run a module in a process of its own; return the JSON that it prints."""
    command = [sys.executable, "-m", module, *map(str, words)]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def in_turn(
    work: Mapping[str, Callable[[], object]],
    times: int,
    left_out: int = 0,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the median seconds of each way, without the first ones left out.

    Ways alternate, so that a busy machine slows all of them. ``wait`` waits until what a way has
    begun on a device is done.
    """
    took: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(left_out + times):
        for name, function in work.items():
            begun = time.perf_counter()
            function()
            wait()
            took[name].append(time.perf_counter() - begun)
    return {name: statistics.median(seconds[left_out:]) for name, seconds in took.items()}


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's interactions."""
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def tell(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of a benchmark: one JSON line with the machine, and a short table."""
    machine = {"cpus": os.cpu_count(), "machine": platform.machine()}
    print(json.dumps({"benchmark": name, **machine, "rows": rows}), flush=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = [columns, *([_text(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  " + "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)))
    print(flush=True)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)


class Peak:
    """The most anonymous memory of this process while it is open, beyond that before, in MB.

    It is looked at every 5 ms.
    """

    def __enter__(self) -> Peak:
        self._before, self.mb, self._over = anonymous_mb(), 0.0, threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.mb = max(self.mb, anonymous_mb() - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()


def anonymous_mb() -> float:
    """Return the anonymous memory of this process."""
    info = psutil.Process().memory_info()
    return float(info.rss - info.shared) / 1e6


@dataclass(frozen=True)
class Usage:
    """What a process and everything below it use at one moment."""

    processes: int
    cpu_s: float
    server_cpu_s: float
    """Of that, the coordinator's."""
    hosts_cpu_s: float
    """That of the processes that have clients."""
    pss_mb: float
    anon_mb: float
    """Of that, what is no page of a file."""
    rss_mb: float
    server_pss_mb: float
    """Of the coordinator among them."""
    server_anon_mb: float
    host_anon_mb: float
    """Of the largest host of clients among them."""


def usage(pid: int) -> Usage:
    """Look at a process and its descendants."""
    count, pss, anon, rss, server, server_anon, host = 0, 0, 0, 0, 0, 0, 0
    cpu = server_cpu = hosts_cpu = 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            memory, times = process.memory_full_info(), process.cpu_times()
            own = anonymous_bytes(process.pid)
            name = process.name()
        except (psutil.Error, OSError):  # it has ended
            continue
        spent = times.user + times.system
        count, cpu = count + 1, cpu + spent
        pss, rss, anon = pss + memory.pss, rss + memory.rss, anon + own
        if name == "fedsrv-serve":
            server, server_anon = server + memory.pss, server_anon + own
            server_cpu += spent
        elif name.startswith("fedcli-") and name.removeprefix("fedcli-")[0].isdigit():
            host, hosts_cpu = max(host, own), hosts_cpu + spent
    memories = (pss, anon, rss, server, server_anon, host)
    return Usage(count, cpu, server_cpu, hosts_cpu, *(number / 1e6 for number in memories))


def anonymous_bytes(pid: int) -> int:
    """Return the bytes of a process's share of memory that belong to no file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
