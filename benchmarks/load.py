"""Many clients on one machine, with a liar, a stopped and a slow one among them.

    python -m benchmarks.load [--clients 500] [--light 100] [--hosts 8] [--rounds 10]

The last ids are light clients (benchmarks/light.py), each with a connection of its own; the others
are real ones, several to a host. Of the light ones the last three are the slow one, the liar and
one that is stopped with SIGSTOP after the first round. What the coordinator uses is looked at twice
a second.
"""

from __future__ import annotations

import json
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import ENV, config_in, parser_of, records_of, tell


def main() -> None:
    """Measure one run and print its row."""
    parser = parser_of("load", __doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--light", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--deadline", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        tell("load", [measured(Path(place), **vars(options))])


def measured(
    place: Path, *, clients: int, light: int, hosts: int, rounds: int, deadline: float
) -> dict[str, Any]:
    """Run once; return what joining and rounds took, and the most the coordinator used."""
    config = config_in(place, experiment(clients, rounds, deadline))
    data, out = place / "data", place / "run"
    dealing = [sys.executable, "-m", "fedcli", "partition", str(config), "--out", str(data)]
    subprocess.run([*dealing, "--no-picture"], check=True, stdout=subprocess.DEVNULL, env=ENV)
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(config, out))
        begun, real = time.monotonic(), clients - light
        stack.enter_context(real_clients(real, hosts, server.address, data, out))
        stopped = clients - 1
        groups = {f"{real}-{clients - 4}": "honest", str(clients - 3): "slow"}
        groups |= {str(clients - 2): "liar", str(stopped): "honest"}
        made = {ids: stack.enter_context(_light(config, data, server.address, ids, kind))
                for ids, kind in groups.items()}  # fmt: skip
        server.wait_for("joined", clients)
        joined = time.monotonic() - begun
        server.wait_for("commit", 1)
        made[str(stopped)].send_signal(signal.SIGSTOP)
        status = server.process.wait()
    if status:
        raise SystemExit(f"the run failed: {server.log.read_text().splitlines()[-1]}")
    records = records_of(out)
    walls = [r["seconds"]["wall"] for r in records[1:]]
    return {
        "clients": clients,
        "light": light,
        "join_s": joined,
        "round_s": statistics.median(walls),
        "slowest_round_s": max(walls),
        "smallest_cohort": min(len(r["cohort"]) for r in records[1:]),
        "liar_refused": sum(str(clients - 2) in r.get("failed", {}) for r in records),
        **server.most,
    }


def experiment(clients: int, rounds: int, deadline_s: float) -> dict[str, Any]:
    """Return a run of small clients that can do without a few of them."""
    return {
        "data": {"name": "digits"},
        "scenario": {"kind": "iid"},
        "net": {"name": "mlp", "hidden": [64]},
        "method": {"name": "fedavg"},
        "schedule": {"rounds": rounds, "clients": clients},
        "training": {"local_epochs": 1, "batch_size": 16, "lr": 0.05},
        "evaluate": {"every": 0, "views": ["global"], "pictures": 0},
        "server": {"min_clients": clients - 5, "deadline_s": deadline_s},
    }


@dataclass
class Coordinator:
    """The coordinator under load, what it told, and the most it used."""

    process: subprocess.Popen[str]
    log: Path
    address: str = ""
    most: dict[str, float] = field(default_factory=dict)
    _lines: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def listen(self) -> None:
        """Read what it tells, for as long as it runs."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def look(self, done: threading.Event) -> None:
        """Look twice a second at what it uses."""
        process = psutil.Process(self.process.pid)
        while not done.wait(0.5):
            try:
                used = {
                    "rss_mb": process.memory_info().rss / 1e6,
                    "fds": process.num_fds(),
                    "threads": process.num_threads(),
                }
            except psutil.Error:
                return
            self.most = {key: max(used[key], self.most.get(key, 0)) for key in used}

    def wait_for(self, kind: str, count: int) -> None:
        """Wait for so many events of a kind, of different clients or interactions."""
        found: set[Any] = set()
        while len(found) < count:
            line = self._lines.get()
            if not line:
                raise SystemExit(f"the coordinator ended: {self.log.read_text()[-500:]}")
            if line.startswith("listening on "):
                self.address = line.removeprefix("listening on ").strip()
                event = {"kind": "listening", "client": "", "interaction": -1}
            else:
                event = json.loads(line)
            if event["kind"] == kind:
                found.add((event["client"], event["interaction"]))


@contextmanager
def coordinator(config: Path, out: Path) -> Iterator[Coordinator]:
    """Start a coordinator and wait until it listens."""
    log, done = out.parent / "server.log", threading.Event()
    command = [sys.executable, "-m", "fedsrv", "serve", str(config), "--out", str(out), "--events"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, env=ENV,
        )  # fmt: skip
    server = Coordinator(process, log)
    looks = [
        threading.Thread(target=server.listen),
        threading.Thread(target=server.look, args=(done,)),
    ]
    for thread in looks:
        thread.start()
    try:
        server.wait_for("listening", 1)
        yield server
    finally:
        done.set()
        process.kill()
        process.wait()
        for thread in looks:
            thread.join()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def real_clients(clients: int, hosts: int, address: str, data: Path, out: Path) -> Iterator[None]:
    """Start hosts of real clients from a fork server, as the launcher does."""
    with (out.parent / "hosts.log").open("w") as log:
        forks = subprocess.Popen(
            [sys.executable, "-m", "fedcli.hosts"],
            stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=ENV,
        )  # fmt: skip
    assert forks.stdin is not None
    for host in range(hosts):
        ids = f"{host}-{clients - hosts + host}:{hosts}"
        argv = ["join", "--client-id", ids, "--server", address, "--data", str(data)]
        argv += ["--state-dir", str(out / "clients"), "--device", "cpu"]
        order = {"id": ids, "argv": argv, "log": str(out.parent / f"host-{host}.log")}
        forks.stdin.write(json.dumps(order) + "\n")
    forks.stdin.flush()
    try:
        yield
    finally:
        forks.stdin.close()
        forks.wait()


@contextmanager
def _light(
    config: Path, data: Path, address: str, ids: str, kind: str
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.light", str(config), str(data), address, ids, kind]
    process = subprocess.Popen(command, env=ENV)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
