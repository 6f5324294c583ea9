"""A process that has imported what programs need, and begins each of them as a fork of itself.

An interpreter that imports torch takes seconds of the processor. A fork of a process that has done
so takes milliseconds, and shares that memory. The process is itself a fork, made by
:func:`kept` before its owner has a thread or anything of gRPC, which a fork must not inherit. It
ends with its owner, and each program gets SIGTERM when it ends. Where nothing is kept warm,
:func:`fedmodels.host.processes.begun` starts interpreters.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

from fedmodels.host import processes
from fedmodels.host.processes import become, end_with_parent

LONGEST = 64
"""Bytes of an answer: a process id, or an exit status."""


@contextmanager
def kept(modules: Sequence[str]) -> Iterator[None]:
    """Have programs that this process starts meanwhile begin as forks; those left end with it.

    On Linux alone: elsewhere each program is an interpreter of its own.

    Args:
        modules: what they import.
    """
    if sys.platform != "linux":
        yield
        return
    processes.warm = warm = Warm(modules)
    try:
        yield
    finally:
        processes.warm = None
        warm.end()


class Warm:
    """The process that forks, as its owner sees it."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Fork it; it imports the modules meanwhile."""
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _serve(theirs.detach(), owner, modules)
        theirs.close()

    def end(self) -> None:
        """End it, and what it has forked."""
        self._door.close()
        os.waitpid(self.pid, 0)

    def begin(
        self, module: str, words: Sequence[str], env: Mapping[str, str], session: bool, pipes: Any
    ) -> Begun:
        """Begin a program; ``session`` says whether it has one of its own.

        Raises:
            OSError: the process that forks is gone.
        """
        cwd = str(pipes.get("cwd") or os.getcwd())
        order = {"argv": [module, *words], "env": dict(env), "cwd": cwd, "session": session}
        written = os.memfd_create("order")
        os.write(written, json.dumps(order).encode())
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, feeds = _pipe(pipes.get("stdin"), 0)
        stdout, tells = _pipe(pipes.get("stdout"), 1)
        stderr = _pipe(pipes.get("stderr"), 2, stdout)[0]
        try:
            files = [theirs.fileno(), written, stdin, stdout, stderr]
            socket.send_fds(self._door, [b"!"], files)
            theirs.close()
            return Begun(reply, feeds, tells)
        except OSError:
            for ours in filter(None, (feeds, tells)):
                ours.close()
            reply.close()
            raise
        finally:
            theirs.close()
            os.close(written)
            for fd, pipe in ((stdin, feeds), (stdout, tells)):
                if pipe is not None:
                    os.close(fd)


def _pipe(given: Any, number: int, out: int = 1) -> tuple[int, IO[bytes] | None]:
    """Return the file of a standard stream, and this side of it where it is a pipe."""
    if given == subprocess.PIPE:
        reads, writes = os.pipe()
        return (reads, os.fdopen(writes, "wb")) if not number else (writes, os.fdopen(reads, "rb"))
    if given == subprocess.STDOUT:
        return out, None
    return number if given is None else given.fileno(), None


class Begun:
    """A program in a fork, of one thread; the part of Popen that is used of programs."""

    def __init__(self, reply: socket.socket, stdin: IO[bytes] | None, stdout: IO[bytes] | None):
        pid, ends, *_ = socket.recv_fds(reply, LONGEST, 1)
        if not ends:
            raise ChildProcessError("what begins programs has ended")
        self._reply, self.pid, self._end = reply, int(pid), ends[0]
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            status = self._reply.recv(LONGEST)  # nothing where what forked it has ended
            self.returncode = int(status) if status else -signal.SIGKILL
            self._reply.close()
            os.close(self._end)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, return the exit status; TimeoutExpired if it does not end in time."""
        if self.poll() is None and not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("fork", timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


# --- the process that forks -----------------------------------------------------------------------


def _serve(door: int, owner: int, modules: Sequence[str]) -> NoReturn:
    """Be the process that forks; never return."""
    try:
        end_with_parent(signal.SIGKILL, owner)
        Path("/proc/self/comm").write_text("fedtide-warm", "utf-8")
        held = os.dup2(door, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # locks, and others' pipes
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # what they mean is for the owner to decide
        # pandas brings pyarrow's allocator, which has a thread unless told
        os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
        for name in modules:
            import_module(name)
        gc.collect()
        gc.freeze()
        with socket.socket(fileno=held) as orders:
            _fork_each(orders)
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _fork_each(orders: socket.socket) -> None:
    """Fork what is ordered, and tell how each fork ended, until the owner has gone."""
    running = dict[int, socket.socket]()
    wake, ring = os.pipe()
    os.set_blocking(ring, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    while True:
        ready = select.select([orders.fileno(), wake], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
            for pid in [*running]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with running.pop(pid) as reply, suppress(OSError):
                        reply.send(b"%d" % os.waitstatus_to_exitcode(status))
        if orders.fileno() in ready:
            word, files, *_ = socket.recv_fds(orders, 1, 5)
            if not word:
                return
            reply, own = socket.socket(fileno=files[0]), os.getpid()
            if not (pid := os.fork()):
                _run(own, *files[1:])
            running[pid] = reply
            end = os.pidfd_open(pid)
            with suppress(OSError):
                socket.send_fds(reply, [b"%d" % pid], [end])
            for file in (end, *files[1:]):
                os.close(file)


def _run(parent: int, written: int, stdin: int, stdout: int, stderr: int) -> NoReturn:
    """Turn this fork into the program that was ordered; never return."""
    order = json.loads(os.pread(written, os.fstat(written).st_size, 0))

    def run() -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_with_parent(signal.SIGTERM, parent)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        sys.path.insert(0, order["cwd"])  # as python -m does
        sys.argv = order["argv"]
        runpy.run_module(order["argv"][0], run_name="__main__", alter_sys=True)

    become(order["argv"][0], run, (stdin, stdout, stderr), session=order["session"])
