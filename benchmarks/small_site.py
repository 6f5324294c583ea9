"""What a site needs of memory: the peak of one `fedcli join`, by net, data, batches and method.

    python -m benchmarks.small_site [--nets mlp resnet18 …] [--keep]

A coordinator and two sites talk over loopback for one round, on random pictures or recordings of
the net's usual shape. The figures are the most memory that the first site's process had resident
(RSS), with the libraries of torch and the pages of its data that were read, and the most of it that
was anonymous: what belongs to no file, which the kernel cannot drop when memory is short.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load import coordinator
from benchmarks.measure import ENV, anonymous_bytes, config_in, parser_of, tell
from benchmarks.measured import given_as, keep

SHAPES = {
    "mlp": (1, 8, 8), "digits-cnn": (1, 8, 8), "cnn5": (1, 28, 28), "resnet18": (3, 32, 32),
}  # fmt: skip
DATA = """
import numpy as np


class Made:
    def __init__(self, rows, seed):
        self.x = np.random.default_rng(seed).integers(0, 255, (rows, *{shape}), dtype=np.uint8)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], row % 10


def load():
    return Made(2 * {examples}, 0), Made(64, 1)
"""
Row = tuple[str, str, int, int, int]
ROWS: list[Row] = [
    ("mlp", "fedavg", 200, 32, 16),
    ("mlp", "fedavg", 20_000, 32, 16),
    ("digits-cnn", "gldp", 200, 32, 16),
    ("cnn5", "fedavg", 200, 32, 16),
    ("resnet18", "fedavg", 32, 32, 16),
    ("resnet18", "fedavg", 32, 4, 4),
]
"""Net, method, examples of each site, and examples of a batch in training and in evaluation."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each row in turn, and print them."""
    parser = parser_of("small_site", __doc__, "small-site")
    parser.add_argument("--nets", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--most", type=int, default=20_000, help="examples of a site at most")
    options = parser.parse_args(arguments)
    chosen = [row for row in ROWS if row[0] in options.nets and row[2] <= options.most]
    rows = [_measured(*row) for row in chosen]
    tell("small_site", rows)
    if options.keep:
        keep(options.keep, given_as("small_site"), {"The memory of one site": rows})


def _measured(net: str, method: str, examples: int, batch: int, scored: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        (folder / "made.py").write_text(DATA.format(shape=SHAPES[net], examples=examples))
        tables = {
            "data": {"name": f"{folder / 'made.py'}:load"},
            "scenario": {"kind": "iid"},
            "net": {"name": net},
            "method": {"name": method},
            "schedule": {"clients": 2, "rounds": 1},
            "training": {"batch_size": batch, "lr": 0.01},
            "evaluate": {"batch_size": scored, "pictures": 0},
        }
        config, data = config_in(folder, tables), folder / "data"
        dealing = [sys.executable, "-m", "fedcli", "partition", str(config), "--out", str(data)]
        subprocess.run([*dealing, "--no-picture"], check=True, stdout=subprocess.DEVNULL, env=ENV)
        server = stack.enter_context(coordinator(config, folder / "run"))
        sites = [_site(client, server.address, folder) for client in range(2)]
        for site in sites:
            stack.callback(_ended, site)
        peak, anonymous = _peak_bytes(sites[0])
        if sites[0].returncode:
            raise SystemExit(f"the site failed: {(folder / 'site-0.log').read_text()[-500:]}")
    return {
        "net": net, "method": method, "examples": examples, "batch": batch, "scored_batch": scored,
        "peak_mb": peak / 1e6, "anonymous_mb": anonymous / 1e6,
    }  # fmt: skip


def _site(client: int, address: str, folder: Path) -> subprocess.Popen[bytes]:
    words = ["join", "--client-id", client, "--server", address, "--data", folder / "data"]
    words += ["--state-dir", folder / f"state-{client}", "--device", "cpu"]
    with (folder / f"site-{client}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fedcli", *map(str, words)], stdout=log, stderr=log, env=ENV
        )


def _ended(site: subprocess.Popen[bytes]) -> None:
    site.kill()
    site.wait()


def _peak_bytes(site: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Return the most memory, and the most anonymous one, that a process had until it ends."""
    resident = anonymous = 0
    while site.poll() is None:
        with suppress(psutil.NoSuchProcess, OSError):  # it has just ended
            resident = max(resident, psutil.Process(site.pid).memory_info().rss)
            anonymous = max(anonymous, anonymous_bytes(site.pid))
        time.sleep(0.02)
    return resident, anonymous


if __name__ == "__main__":
    main()
