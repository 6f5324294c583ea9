"""The processes of a launched run: a coordinator and a fork server, each with a line protocol.

Both end when their standard input does, so nothing outlives the launcher, however it dies.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsrv.launch.forked import Forked


@dataclass(frozen=True)
class Said:
    """One line a process said, or the end of it."""

    source: str
    line: str
    status: int | None = None
    """Exit status, when the process has ended; negative for a signal."""


Popen = subprocess.Popen[bytes]
Box = queue.SimpleQueue[Said]


def next_said(box: Box, until: float = math.inf) -> Said | None:
    """Wait for the next line of any process; None if there is none ``until`` then (monotonic).

    Looks up now and then: Ctrl-C in the moment before a wait begins does not end that wait.
    """
    while time.monotonic() < until:
        with suppress(queue.Empty):
            return box.get(timeout=0.5)
    return None


class Child:
    """A process whose standard output comes line by line into a box."""

    def __init__(self, source: str, process: Popen | Forked, box: Box) -> None:
        self.source, self.process = source, process
        threading.Thread(target=self._listen, args=(box,), daemon=True).start()

    def _listen(self, box: Box) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                box.put(Said(self.source, line.decode(errors="replace").rstrip("\n")))
        box.put(Said(self.source, "", self.process.wait()))

    def tell(self, fact: Any) -> None:
        """Send one JSON line; a process that is gone is noticed by its end, not here."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(fact).encode() + b"\n")
            self.process.stdin.flush()

    def terminate(self) -> None:
        """Ask it to end; one that is gone already is noticed by its end."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)

    def end(self, patience_s: float = 5.0) -> None:
        """Close its standard input, wait, and kill it if that was not enough."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def started(command: Sequence[str], log: Path | None = None) -> Popen:
    """Start an ordinary process with this program's interpreter: ``-m`` and what follows.

    Its standard error goes to a log, or into a pipe where there is none.
    """
    with ExitStack() as stack:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(log.open("ab")) if log else subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the launcher's business
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )


def coordinator_arguments(
    config: Path, out: Path, address: str, evaluator: bool, server_data: Path | None = None
) -> list[str]:
    """Return the arguments of ``fedsrv``; resuming an empty directory starts afresh."""
    command = ["serve", str(config), "--listen", address]
    command += ["--out", str(out), "--resume", "--events"]
    command += ["--evaluator"] if evaluator else []
    return [*command, "--server-data", str(server_data)] if server_data else command


def notes_in(log: Path) -> list[str]:
    """Return the notes on the data in the log of a partition, each once."""
    try:
        lines = log.read_text("locale", "replace").splitlines()
    except OSError:
        return []
    said = (line.partition("note: ")[2] for line in lines if " fedcli.data." in line)
    return [f"note: {text}" for text in dict.fromkeys(said) if text]


def error_in(log: Path) -> str:
    """Return the last error line of a log, without its prefix; empty where there is none."""
    try:
        lines = log.read_text("locale", "replace").splitlines()
    except OSError:
        return ""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else (lines[-1] if lines else "")
