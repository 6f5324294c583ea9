"""What benchmarks share: their options, what they read of runs and processes, what they print."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options; its help is the text of the benchmark's file."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m benchmarks.{name}", None, text, formatter_class=form)


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


@dataclass(frozen=True)
class Usage:
    """What a process and everything below it use at one moment."""

    processes: int
    cpu_s: float
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
    count, cpu, pss, anon, rss, server, server_anon, host = 0, 0.0, 0, 0, 0, 0, 0, 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            memory, times = process.memory_full_info(), process.cpu_times()
            own = anonymous_bytes(process.pid)
            name = process.name()
        except (psutil.Error, OSError):  # it has ended
            continue
        count, cpu = count + 1, cpu + times.user + times.system
        pss, rss, anon = pss + memory.pss, rss + memory.rss, anon + own
        if name == "fedsrv-serve":
            server, server_anon = server + memory.pss, server_anon + own
        elif name.startswith("fedcli-") and name.removeprefix("fedcli-")[0].isdigit():
            host = max(host, own)
    memories = (pss, anon, rss, server, server_anon, host)
    return Usage(count, cpu, *(number / 1e6 for number in memories))


def anonymous_bytes(pid: int) -> int:
    """Return the bytes of a process's share of memory that belong to no file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
