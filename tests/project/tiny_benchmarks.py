"""Runs a benchmark in a fork whose own children are forks too, and looks how they ended.

``python -m benchmarks.NAME`` starts interpreters that import torch for seconds each. Here a child
that would be ``python -m MODULE`` or ``python -c CODE`` is a fork of the process that starts it,
which has imported all that already. It has its own files, environment, directory and session.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

KILLED = (-signal.SIGKILL, -signal.SIGTERM)
FAILS = "127.0.0.1:9"
"""What a child is told that is to fail, as nobody listens there."""


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """``subprocess.Popen`` of this interpreter by a fork; of others as ever."""

    made: ClassVar[list[ForkedPopen]] = []
    was_stopped = False
    """Whether whoever started it has ended it."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        (_, _, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
         _, _, _, _, _, new_session, _) = given  # fmt: skip
        words = [word for word in map(os.fspath, args) if word != "-u"]
        ForkedPopen.made.append(self)
        if words[0] != sys.executable or words[1] not in ("-m", "-c"):
            return super()._execute_child(args, *given)  # type: ignore[misc]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if new_session:
                os.setsid()
            _become(words[1:], [p2cread, c2pwrite, errwrite], cwd, env)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )
        return None

    def send_signal(self, sig: int) -> None:
        self.was_stopped |= self.poll() is None
        super().send_signal(sig)


def _become(words: Sequence[str], files: Sequence[int], cwd: Any, env: Any) -> None:
    """Turn the fork into the program with these words; never return."""
    for target, source in enumerate(files):
        if source != -1:
            os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if cwd is not None:
        os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
        sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(":"))
    status = 0
    ForkedPopen.made.clear()
    try:
        sys.argv = [words[1], *words[2:]]
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = "-c"
            exec(words[1], {"__name__": "__main__"})
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
        if isinstance(done.code, str):
            print(done.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Run ``benchmarks.NAME`` with the words of the command line, and look at its children."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    name = sys.argv[0]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    for child in ForkedPopen.made:
        status, was_ended = child.poll(), child.was_stopped and child.poll() in KILLED
        if status != 0 and not was_ended and FAILS not in str(child.args):
            sys.exit(f"a child of {name} ended with {status}: {child.args}")
