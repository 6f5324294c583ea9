"""Processes that a program starts and hears line by line, and that end with it."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from fedmodels.console.commands import PREFIXES
from fedmodels.times import RUN_LEAVING_S, WANTED_LOOK_S

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # looked up before any fork
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int, parent: int) -> None:
    """Have the kernel send this process a signal when its parent dies; end if it has already.

    Args:
        number: the signal.
        parent: the parent's process id, as the parent itself told it.
    """
    assert _LIBC is not None, "nothing is started but on Linux"
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


@dataclass(frozen=True)
class ProcessLine:
    """One line a process said, or the end of it."""

    source: str
    line: str
    status: int | None = None
    """Exit status, when the process has ended; negative for a signal."""


Popen = subprocess.Popen[bytes]
Box = queue.SimpleQueue[ProcessLine]


class Process(Protocol):
    """What is used of a process here."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit status."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


def next_said(box: Box, until: float = math.inf) -> ProcessLine | None:
    """Wait for the next line of any process; None if there is none ``until`` then (monotonic).

    Looks up now and then: Ctrl-C in the moment before a wait begins does not end that wait.
    """
    while (left := until - time.monotonic()) > 0:
        with suppress(queue.Empty):
            return box.get(timeout=min(left, 0.5))
    return None


class Child:
    """A process whose standard output comes line by line into a box."""

    def __init__(self, source: str, process: Process, box: Box) -> None:
        self.source, self.process = source, process
        threading.Thread(target=self._listen, args=(box,), daemon=True).start()

    def _listen(self, box: Box) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                box.put(ProcessLine(self.source, line.decode(errors="replace").rstrip("\n")))
        box.put(ProcessLine(self.source, "", self.process.wait()))

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


def started(
    command: Sequence[str], log: Path | None = None, env: Mapping[str, str] | None = None
) -> Popen:
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
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})},
        )


def program(module: str, words: Sequence[str], **pipes: Any) -> Popen:
    """Start a process as :func:`run_program` does; it gets SIGTERM when this thread ends, too.

    ``pipes`` are its standard input, output and errors, as ``subprocess`` takes them.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(PREFIXES)}
    own = [sys.executable, "-m", __name__, str(os.getpid()), module]
    return subprocess.Popen([*own, *words], start_new_session=True, env=env, **pipes)


class Program(Process, Protocol):
    """A process that is told more than that it ends."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...


class Begins(Protocol):
    """What begins programs as forks: :mod:`fedmodels.host.warm`."""

    def begin(
        self, module: str, words: Sequence[str], env: Mapping[str, str], session: bool, pipes: Any
    ) -> Program:
        """Begin one; OSError if it cannot."""
        ...


warm: Begins | None = None


def begun(module: str, words: Sequence[str], **pipes: Any) -> Program:
    """Begin what :func:`program` starts, as a fork where this process keeps something warm."""
    if warm is not None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(PREFIXES)}
        with suppress(OSError):
            return warm.begin(module, words, env, True, pipes)
    return program(module, words, **pipes)


def become(
    name: str, run: Callable[[], None], files: tuple[int, int, int], *, session: bool = True
) -> NoReturn:
    """Turn this forked process into another program with these standard streams; never return.

    ``name`` is what ``top`` and ``ps -o comm`` call it.
    """
    status = 1
    try:
        Path("/proc/self/comm").write_text(name[:15], "utf-8")
        if session:
            os.setsid()  # Ctrl-C is for whoever started it
        for target, source in enumerate(files):
            os.dup2(source, target)
        logging.getLogger().handlers.clear()  # the program that follows has its own log
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # or a sibling's pipe never sees its end
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", 1, closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)  # as Python's
        run()
        status = 0
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:  # nothing may rise into the code of which this is a copy
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(status)


def run_program(
    module: str, words: Sequence[str], is_wanted: Callable[[], bool] = lambda: True
) -> int:
    """Run ``python -m MODULE`` with these words in a process of its own; return its exit status.

    No environment variable gives it options. It gets SIGTERM once it is not wanted any more, when
    SIGTERM or Ctrl-C ends this process, and when this process dies.
    """
    process = begun(module, words)
    try:
        while process.poll() is None and is_wanted():
            with suppress(subprocess.TimeoutExpired):
                process.wait(WANTED_LOOK_S)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(RUN_LEAVING_S)
            process.kill()
    return process.wait()


def main() -> None:
    """Be a program that ends with its parent."""
    _, parent, module, *words = sys.argv
    if _LIBC is not None:
        end_with_parent(signal.SIGTERM, int(parent))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
