"""What the coordinator's memory takes of a large model, beside the floors with the same payload.

    python -m benchmarks.memory [--hidden 4096 8192 1024] [--rounds 3]

It is the anonymous memory of the process, pages that belong to no file, looked at every 20 ms. The
multiple is its peak over the payload; ``bare_mb`` of it are there before a client has joined. The
net is a perceptron with these hidden layers on digits. Two clients train it, a process each.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.load import coordinator, real_clients
from benchmarks.measure import ENV, anonymous_bytes, config_in, parser_of, tell

CLIENTS, INPUTS, CLASSES = 2, 64, 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure fedtide and both floors, and print a row of each."""
    parser = parser_of("memory", __doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 8192, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    sizes = pairwise([INPUTS, *options.hidden, CLASSES])
    parameters = sum(math.prod(size) + size[1] for size in sizes)
    with tempfile.TemporaryDirectory() as place:
        rows = [{"program": "fedtide", **_fedtide(Path(place), options.hidden, options.rounds)}]
    for name, kind in (("bare gRPC", []), ("gRPC with duties", ["duties"])):
        words = [*map(str, (CLIENTS, parameters, options.rounds, CLIENTS)), *kind]
        floor = [sys.executable, "-m", "benchmarks.floor", *words]
        with subprocess.Popen(floor, stdout=subprocess.DEVNULL) as process:
            rows.append({"program": name, "peak_mb": _peak_mb(process)})
        if process.returncode:
            raise SystemExit(f"{name} failed with status {process.returncode}")
    payload = {"payload_mb": 4 * parameters / 1e6}
    tell("memory", [{**row, **payload, "multiple": row["peak_mb"] / payload["payload_mb"]}
                    for row in rows])  # fmt: skip


def _fedtide(place: Path, hidden: list[int], rounds: int) -> dict[str, Any]:
    """Return the memory of a coordinator, before a client has joined and at its peak."""
    config, data, out = config_in(place, _tables(hidden, rounds)), place / "data", place / "run"
    dealing = [sys.executable, "-m", "fedcli", "partition", str(config), "--out", str(data)]
    subprocess.run([*dealing, "--no-picture"], check=True, stdout=subprocess.DEVNULL, env=ENV)
    with coordinator(config, out) as server:
        bare = anonymous_bytes(server.process.pid) / 1e6
        with real_clients(CLIENTS, CLIENTS, server.address, data, out):
            peak = _peak_mb(server.process)
    if server.process.returncode:
        raise SystemExit(f"the run failed: {server.log.read_text().splitlines()[-1]}")
    return {"bare_mb": bare, "peak_mb": peak}


def _tables(hidden: list[int], rounds: int) -> dict[str, Any]:
    return {
        "data": {"name": "digits", "max_per_class": 4},
        "scenario": {"kind": "iid"},
        "net": {"name": "mlp", "hidden": hidden},
        "method": {"name": "fedavg"},
        "schedule": {"clients": CLIENTS, "rounds": rounds},
        "training": {"batch_size": 16, "lr": 0.01},
        "evaluate": {"pictures": 0},
    }


def _peak_mb(process: subprocess.Popen[Any]) -> float:
    """Return the most anonymous memory of a process until it ends."""
    most = 0
    while process.poll() is None:
        with suppress(OSError):  # it has just ended
            most = max(most, anonymous_bytes(process.pid))
        time.sleep(0.02)
    return most / 1e6


if __name__ == "__main__":
    main()
