"""Real processes over loopback, for tests: one coordinator, clients forked from one fork server."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import pytest
import tomli_w

from fedmodels.config.experiment import Experiment

PLUGINS = Path(__file__).parent.parent / "plugins"
ROOT = PLUGINS.parent.parent


def path_with(given: str) -> str:
    """Return a path of Python's: the code beside these tests, and behind it what is given."""
    beside = map(str, (PLUGINS, ROOT / "models", ROOT / "proto", ROOT))
    return ":".join(dict.fromkeys([*beside, *filter(None, given.split(":"))]))


PATH = path_with(os.environ.get("PYTHONPATH", ""))
"""The code beside these tests goes before what is installed, as it does in pytest's process."""
TIMEOUT_S = 200.0
"""Above what a process that imports torch takes on a busy machine, below a test's own limit."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of every process a test starts."""
    try:
        version("fedtide")
    except PackageNotFoundError:
        lacks = "fedtide is on the path and not installed, and the programs ask for its version"
        pytest.fail(f"{lacks}: `make setup`, or `pip install --editable .`", pytrace=False)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, **more}


def _send(pid: int, number: int) -> None:
    """Send a signal; a fork that has ended may be gone before its server tells the status."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class ForkServer:
    """``python -m tests.integration.forks``, or a module that does more, started once for many."""

    def __init__(self, log: Path, module: str = "tests.integration.forks", **env: str) -> None:
        self._log, self._has_ended = log, False
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=environment(**env), start_new_session=True, cwd=ROOT,
            )  # fmt: skip
        self._told: dict[str, dict[str, int]] = {}
        self._changed = threading.Condition()
        self._next = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            fact = json.loads(line)
            with self._changed:
                self._told.setdefault(str(fact.pop("id", "")), {}).update(fact)
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _fact(self, key: str, name: str, timeout_s: float = TIMEOUT_S) -> int:
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_ended or name in self._told.get(key, {}), timeout_s
            )
            told = self._told.get(key, {})
        assert name in told or not self._has_ended, f"the fork server ended: {self._said()}"
        assert name in told, f"{key}: no {name} within {timeout_s} s"
        return told[name]

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def wait_for(self, forks: Sequence[Client]) -> None:
        """Wait until all have ended or one has failed, after which others may wait for it."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._has_ended
                    or any(fork.has_failed() for fork in forks)
                    or all(fork.has_ended() for fork in forks)
                ),
                TIMEOUT_S,
            )

    def start(self, argv: list[str], log: Path) -> Client:
        """Fork one ``fedcli`` with these arguments."""
        key, pid = self._forked({"argv": argv, "log": str(log)})
        return Client(self, key, pid, log)

    def call(self, function: str, place: Path) -> tuple[int, str]:
        """Call ``module:function`` with a directory in a fork; return its status and its output.

        A test that forks does so in such a function. The process of pytest may have used gRPC,
        which starts threads of its own again in each fork.
        """
        log = place / "call.log"
        key, _ = self._forked({"call": function, "place": str(place), "log": str(log)})
        return self._fact(key, "status"), log.read_text()

    def typed(self, folder: Path, program: str, *words: object) -> tuple[int, str]:
        """Type a command in a folder; return its status and what it printed."""
        command = self.begun(folder, program, *words)
        return command.wait(), command.log.read_text()

    def begun(self, folder: Path, program: str, *words: object) -> Client:
        """Type a command in a folder, and do not wait for its end."""
        log = folder.with_name(f"{folder.name}-{self._next}.log")
        return self.called(f"{program}.cli:main", [program, *map(str, words)], folder, log)

    def called(self, function: str, argv: list[str], folder: Path, log: Path) -> Client:
        """Call ``module:function`` in a folder, with the words of a command line."""
        order = {"call": function, "argv": argv, "place": str(folder), "log": str(log)}
        key, pid = self._forked(order)
        return Client(self, key, pid, log)

    def start_fedsrv(
        self, argv: Sequence[str], log: Path | None = None, lease_s: float = 0.0
    ) -> ForkedServer:
        """Fork one ``fedsrv`` with these arguments; errors go to its output unless to a log.

        A lease, if one is given, is how long it takes a client that says nothing for connected.
        """
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        files = {"stdin": theirs_in, "stdout": theirs_out}
        order = {name: f"/proc/{os.getpid()}/fd/{file}" for name, file in files.items()}
        order["log"] = str(log or order["stdout"])
        try:
            key, pid = self._forked({"argv": [*argv], "lease_s": lease_s, **order})
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        ours = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")
        return ForkedServer(self, key, pid, *ours)

    def _forked(self, order: dict[str, Any]) -> tuple[str, int]:
        """Send an order; return its key and the process id of the fork."""
        key = str(self._next)
        self._next += 1
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and what follows says so
            self.process.stdin.write(json.dumps({"id": key, **order}).encode() + b"\n")
            self.process.stdin.flush()
        return key, self._fact(key, "pid")

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(TIMEOUT_S)
        self.process.stdout.close()


class Client:
    """One forked process, such as a client."""

    def __init__(self, server: ForkServer, key: str, pid: int, log: Path) -> None:
        self.server, self.key, self.pid, self.log = server, key, pid, log

    def kill(self) -> None:
        _send(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return its exit status."""
        return self.server._fact(self.key, "status", timeout_s)

    def has_ended(self) -> bool:
        return "status" in self.server._told[self.key]

    def has_failed(self) -> bool:
        return self.server._told[self.key].get("status", 0) != 0

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass
class ForkedServer:
    """One forked ``fedsrv``; the part of Popen that tests use."""

    server: ForkServer
    key: str
    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]

    @property
    def returncode(self) -> int | None:
        return self.server._told[self.key].get("status")

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.server._fact(self.key, "status", timeout or TIMEOUT_S)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return what it prints until its end."""
        said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=lambda: said.put(self.stdout.read()), daemon=True).start()
        self.wait(timeout)
        return said.get(timeout=TIMEOUT_S).decode(), None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            _send(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it still runs, and close its pipes."""
        self.kill()
        self.wait()
        self.stdin.close()
        self.stdout.close()


class Coordinator:
    """``fedsrv serve --events``: a process of its own, or a fork where there is a fork server."""

    def __init__(
        self,
        config: Path,
        out: Path,
        *more: str,
        port: int = 0,
        forks: ForkServer | None = None,
        lease_s: float = 0.0,
        **env: str,
    ) -> None:
        self.out, self.log = out, out.parent / f"{out.name}-server.log"
        listen = [] if "--listen" in more else ["--listen", f"127.0.0.1:{port}"]
        arguments = ["serve", str(config), "--out", str(out), *listen, "--events", *more]
        self.process: subprocess.Popen[bytes] | ForkedServer
        if forks is not None:
            self.process = forks.start_fedsrv(arguments, self.log, lease_s)
        else:
            with self.log.open("ab") as errors:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "fedsrv", *arguments],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                    env=environment(**env), start_new_session=True,
                )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.events: list[dict[str, Any]] = []
        self.address = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line.decode().strip())
        self._lines.put(None)

    def listening(self) -> Coordinator:
        """Wait until clients can join."""
        self.wait_for(lambda event: bool(self.address))
        return self

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def wait_for(
        self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """Return the next event that is wanted."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"nothing wanted came; so far: {self.events[-5:]}") from None
            assert line is not None, f"the coordinator ended: {self.log.read_text()}"
            if line.startswith("listening on "):
                self.address, event = line.removeprefix("listening on "), {}
            else:
                event = json.loads(line)
                self.events.append(event)
            if wanted(event):
                return event

    def wait_kind(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Wait for an event of a kind with these facts."""
        return self.wait_for(
            lambda e: e.get("kind") == kind and all(e.get(k) == v for k, v in facts.items())
        )

    def kill(self) -> None:
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return its exit status."""
        status = self.process.wait(timeout_s)
        assert self.process.stdin is not None
        self.process.stdin.close()
        return status

    def error(self) -> str:
        """Return its last error line."""
        return self.log.read_text().splitlines()[-1]

    def close(self) -> None:
        self.kill()


class Relay:
    """``fedsrv relay``, forked; one that is started again listens where it listened."""

    def __init__(
        self, forks: ForkServer, log: Path, up: str, clients: str, *more: str, port: int = 0
    ) -> None:
        self.log = log
        arguments = ["relay", "--up", up, "--clients", clients]
        listen = ["--listen", f"127.0.0.1:{port}"]
        self.process = forks.start_fedsrv([*arguments, *listen, *more], log)
        said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(
            target=lambda: said.put(self.process.stdout.readline()), daemon=True
        ).start()
        line = said.get(timeout=TIMEOUT_S).decode().strip()
        assert line.startswith("listening on "), line or log.read_text()
        self.port = int(line.rpartition(":")[2])

    def kill(self) -> None:
        self.process.close()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return its exit status."""
        status = self.process.wait(timeout_s)
        self.process.close()
        return status

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def write_config(path: Path, experiment: Experiment) -> Path:
    """Write an experiment as a config file."""
    path.write_text(tomli_w.dumps(experiment.to_dict()))
    return path


def join_arguments(client: str, address: str, data: Path, states: Path, *more: str) -> list[str]:
    """Return the arguments of ``fedcli join``."""
    return [
        "join", "--client-id", client, "--server", address, "--data", str(data),
        "--state-dir", str(states), *(() if "--device" in more else ("--device", "cpu")), *more,
    ]  # fmt: skip


def summary_of(out: Path) -> dict[str, Any]:
    """Return a run's summary."""
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def until(condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until something is so that tells nobody; fail with ``what`` if it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.01)


def reached(path: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a file appears."""
    until(path.exists, f"{path.name} was not reached", timeout_s)
