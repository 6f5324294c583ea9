"""What crosses the coordinator's wire with relays in front of it.

    python -m benchmarks.relays [--clients 8 16] [--relays 0 1 2 4] [--rounds 8] [--keep]

FedAvg on digits with the small CNN, in four host processes with as many clients each. Hosts are
dealt to relays in equal parts, or join the coordinator where there are none. Bytes are those of a
round on the wire of the coordinator, seconds those of a round, medians from the third round on.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from benchmarks.measure import ENV, config_in, parser_of, records_of, tell
from benchmarks.measured import given_as, keep

TITLE = "Relays in front of the coordinator: FedAvg on digits, the small CNN"
LONGEST_S, HOSTS = 300, 4


def main() -> None:
    """Measure every number of clients with every number of relays; print the table."""
    parser = parser_of("relays", __doc__, "relays")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--relays", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for clients in options.clients:
        with tempfile.TemporaryDirectory() as place:
            found = [_row(Path(place), clients, n, options.rounds) for n in options.relays]
        digests = [row.pop("state_sha256") for row in found]
        same = ("equal" if digest == digests[0] else "other" for digest in digests)
        rows += [{**row, "digest": digest} for row, digest in zip(found, same, strict=True)]
    tell(TITLE, rows)
    if options.keep:
        keep(options.keep, given_as("relays"), {TITLE: rows})


def _row(root: Path, clients: int, relays: int, rounds: int) -> dict[str, Any]:
    """Run once; return what crossed the coordinator's wire."""
    place = root / f"relays-{relays}"
    place.mkdir()
    config = config_in(place, _experiment(clients, rounds))
    data, out = root / "data", place / "run"
    if not data.exists():
        dealing = ["partition", str(config), "--out", str(data), "--no-picture"]
        command = [sys.executable, "-m", "fedcli", *dealing]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENV)
    with ExitStack() as stack:
        serve = ["fedsrv", "serve", str(config), "--out", str(out), "--listen", "127.0.0.1:0"]
        server = _started(stack, place / "server.log", *serve)
        address = _address(server)
        above = []
        for number in range(relays):
            served = _ids(clients, relays, number)
            relay = ["fedsrv", "relay", "--up", address, "--clients", served]
            above.append(_address(_started(stack, place / f"relay-{number}.log", *relay)))
        above = above or [address]
        for number in range(HOSTS):
            ids, place_of_host = _ids(clients, HOSTS, number), above[number * len(above) // HOSTS]
            join = ["fedcli", "join", "--client-id", ids, "--server", place_of_host]
            join += ["--data", str(data), "--state-dir", str(place / "states"), "--device", "cpu"]
            _started(stack, place / f"host-{number}.log", *join)
        if server.wait(LONGEST_S):
            raise SystemExit(f"the run failed: {(place / 'server.log').read_text()[-500:]}")
    records = records_of(out)
    summary = json.loads((out / "summary.json").read_text())
    middle = records[2:-1]
    wires = {f"{way}_bytes": _median(middle, "bytes", f"wire_{way}") for way in ("down", "up")}
    walls = statistics.median(r["seconds"]["wall"] for r in middle)
    facts = {"clients": clients, "relays": relays, "round_s": walls}
    return {**facts, **wires, "state_sha256": summary["state_sha256"]}


def _ids(clients: int, parts: int, number: int) -> str:
    """Return the range of ids of one of several equal parts."""
    share = clients // parts
    return f"{number * share}-{(number + 1) * share - 1}"


def _median(records: list[dict[str, Any]], *keys: str) -> int:
    return round(statistics.median(r[keys[0]][keys[1]] for r in records))


def _experiment(clients: int, rounds: int) -> dict[str, Any]:
    return {
        "data": {"name": "digits"},
        "scenario": {"kind": "drawn", "classes": 4},
        "net": {"name": "digits-cnn"},
        "method": {"name": "fedavg"},
        "schedule": {"rounds": rounds, "clients": clients},
        "training": {"local_epochs": 1, "batch_size": 16, "lr": 0.05},
        "evaluate": {"every": 0, "views": ["global"], "pictures": 0},
    }


def _started(stack: ExitStack, log: Path, *command: str) -> subprocess.Popen[str]:
    errors: IO[str] = stack.enter_context(log.open("w"))
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *command], stdout=subprocess.PIPE, stderr=errors, text=True,
        env=ENV,
    )  # fmt: skip
    stack.enter_context(process)  # waits for its end
    stack.callback(process.kill)
    return process


def _address(process: subprocess.Popen[str]) -> str:
    """Return where a process says that it listens."""
    assert process.stdout is not None
    until = time.monotonic() + 60
    while time.monotonic() < until:
        line = process.stdout.readline()
        if line.startswith("listening on "):
            return line.removeprefix("listening on ").strip()
        if not line:
            break
    raise SystemExit("a process did not begin to listen")


if __name__ == "__main__":
    main()
