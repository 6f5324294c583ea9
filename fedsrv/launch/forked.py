"""Processes forked from the launcher: they share torch with it instead of importing it again.

Importing torch takes seconds of CPU and half a gigabyte that no other process can use. The
launcher needs it to check the experiment, so the coordinator and the fork server of the clients
begin as its forks, before it starts a thread. What is started again later is an ordinary process.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from fedmodels.console.log_lines import LogLevel, set_up_logging
from fedmodels.host.processes import become, end_with_parent


def open_standard_streams() -> None:
    """Open standard streams that were closed before the command began, on nothing.

    Pipes would get their numbers otherwise, and forks put their own there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


class Forked:
    """A forked process with pipes for standard input and output; the part of Popen used here."""

    def __init__(self, name: str, run: Callable[[], None], log: Path) -> None:
        """Fork; the child calls ``run`` in a session of its own, with errors going to a log.

        ``name`` is what ``top`` and ``ps -o comm`` call it; the command line is the launcher's. It
        has no blank: Slurm reads ``/proc/PID/stat`` by blanks where it tracks processes by their
        parents, and one such name keeps its signals from every job of the node.
        """
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        with log.open("ab") as errors:
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                become(name, run, (theirs_in, theirs_out, errors.fileno()))
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin: IO[bytes] | None = os.fdopen(ours_out, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(ours_in, "rb")
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, return the exit status; TimeoutExpired if it does not end in time."""
        while (status := self.poll()) is None:
            with suppress(ProcessLookupError):  # another thread has reaped it meanwhile
                end = os.pidfd_open(self.pid)
                try:
                    if not select.select([end], [], [], timeout)[0]:
                        raise subprocess.TimeoutExpired("fork", timeout or 0)
                finally:
                    os.close(end)
        return status

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close its pipes."""
        for pipe in filter(None, (self.stdin, self.stdout)):
            pipe.close()


def fork_hosts(log: Path, modules: Sequence[str] = ()) -> Forked:
    """Fork the fork server of the clients, which imports these modules for all of them."""

    def run() -> None:
        sys.argv = ["fedcli.hosts", *modules]
        _module("fedcli.hosts")

    return Forked("fedcli-hosts", run, log)


def fork_coordinator(log: Path) -> Forked:
    """Fork a coordinator that waits for its arguments, a JSON list on a line of its own."""
    return Forked("fedsrv-serve", _wait_and_serve, log)


def fork_fedcli(arguments: Sequence[str], log: Path) -> Forked:
    """Fork ``fedcli`` with these arguments; it ends with the launcher, and prints to the log."""
    launcher = os.getpid()

    def run() -> None:
        end_with_parent(signal.SIGKILL, launcher)
        os.dup2(2, 1)
        set_up_logging(LogLevel.WARNING)  # the launcher knows notes by the name of their logger
        sys.argv = ["fedcli", *arguments]
        _module("fedcli")

    return Forked(f"fedcli-{arguments[0]}", run, log)


def share_memory() -> None:
    """Keep what is imported so far where forks share it."""
    gc.collect()
    gc.freeze()


def _wait_and_serve() -> None:
    __import__("fedsrv.coordinator")  # while it waits
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return  # the launcher ended before it needed a coordinator
        line += byte
    sys.argv = ["fedsrv", *json.loads(line)]
    _module("fedsrv")


def _module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
