"""What every benchmark prints: one JSON line with the machine, and a short table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import psutil


def tell(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of a benchmark."""
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


def memory_mb(pid: int) -> tuple[float, float]:
    """Return (PSS, RSS) in MB of a process and everything below it."""
    pss = rss = 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            info = process.memory_full_info()
        except psutil.Error:
            continue
        pss, rss = pss + info.pss, rss + info.rss
    return pss / 1e6, rss / 1e6
