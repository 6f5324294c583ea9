"""``python -m fedcli.hosts [MODULE …]``: a small fork server for client processes.

It preloads what clients import, torch above all, and the given modules. It starts each client by a
fork, which shares that memory and takes milliseconds instead of seconds. It opens no channel of
gRPC, starts no thread and runs no tensor operation, because a fork must not inherit any of that.

Orders come on standard input, one JSON object a line: ``{"id": 3, "argv": ["join", …], "log":
"path"}``, and with ``"nice": 5`` a process of lower priority. What happens is told on standard
output: ``{"id": 3, "pid": 123}`` and ``{"id": 3, "status": 0}``. At the end of standard input every
client is killed, and whatever kills this process kills them too.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fedmodels.host.processes import end_with_parent

PRELOADED = (
    "numpy",
    "pydantic",
    "safetensors",
    "typer",
    "fedcli.cli",
    "fedcli.joining",
    "fedcli.runtime.shown",
    "fedmodels.methods.fedavg",
    "fedmodels.nets.trained",
    "grpc._channel",
)


@dataclass
class ForkServer:
    """The clients it has started, by process id."""

    running: dict[int, object] = field(default_factory=dict)

    def serve(self) -> None:
        """Take orders until standard input ends, then kill every client."""
        wake, ring = os.pipe()
        os.set_blocking(ring, False)
        signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # what they mean is for the launcher to decide
        buffered = b""
        try:
            while True:
                readable, _, _ = select.select([0, wake], [], [])
                if wake in readable:
                    os.read(wake, 4096)
                    self.reap()
                if 0 in readable:
                    data = os.read(0, 65536)
                    if not data:
                        return
                    *lines, buffered = (buffered + data).split(b"\n")
                    for line in lines:
                        self.start(json.loads(line))
        finally:
            for pid in self.running:
                os.kill(pid, signal.SIGKILL)

    def start(self, order: dict[str, object]) -> None:
        """Fork one client."""
        sys.stdout.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_client(order, parent)
        self.running[pid] = order["id"]
        _tell({"id": order["id"], "pid": pid})

    def reap(self) -> None:
        """Tell which clients have ended."""
        for pid in list(self.running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                _tell({"id": self.running.pop(pid), "status": code})


def _become_client(order: dict[str, object], parent: int) -> None:
    """Turn the forked process into ``fedcli`` with the order's arguments; never return."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL, parent)
    os.nice(int(str(order.get("nice", 0))))
    name = f"fedcli-{order['id']}".encode()[:15]  # what top and ps -o comm call it; no blank
    Path("/proc/self/comm").write_bytes(name)
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 0
    try:
        from fedcli.cli import main

        arguments = order["argv"]
        assert isinstance(arguments, list)
        main([str(a) for a in arguments])
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tell(fact: dict[str, object]) -> None:
    os.write(1, json.dumps(fact).encode() + b"\n")


def main() -> None:
    """Preload, say so, and serve."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # pandas, which scikit-learn imports, brings pyarrow's allocator, which has a thread unless told
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    for name in (*PRELOADED, *sys.argv[1:]):
        __import__(name)
    gc.collect()
    gc.freeze()
    try:
        _tell({"ready": True})
        ForkServer().serve()
    except BrokenPipeError:  # the end of standard input may be seen later
        sys.exit("the launcher is gone: its clients are ended")


if __name__ == "__main__":
    main()
