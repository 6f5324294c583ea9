"""Programs that begin as forks of a process that has imported what they need.

Each check runs in a fork of the fork server, since a process that has used gRPC must not fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedmodels.host import processes
from fedmodels.host.processes import Program, begun
from fedmodels.host.warm import Begun, kept
from tests.integration.harness import ForkServer
from tests.integration.warm_program import MARK

pytestmark = pytest.mark.loopback

Check = Callable[[Path], None]
CHECKS: list[Check] = []
PROGRAM = "tests.integration.warm_program"


def checked(check: Check) -> Check:
    """Have a function called in a fork, with a directory."""
    CHECKS.append(check)
    return check


def told(program: Program) -> dict[str, Any]:
    assert program.stdout is not None
    seen: dict[str, Any] = json.loads(program.stdout.readline())
    return seen


def ended(program: Program, status: int = 3) -> int:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(b"%d\n" % status)
    program.stdin.close()
    program.stdout.close()
    return program.wait(60)


def a_program(*words: str, **more: Any) -> Program:
    pipe = subprocess.PIPE
    return begun(PROGRAM, words, stdin=pipe, stdout=pipe, **more)


@checked
def a_program_is_a_fork_that_sees_what_an_interpreter_would(tmp_path: Path) -> None:
    place = tmp_path / "there"
    place.mkdir()
    os.environ |= {"ODD": "é\udcff", "FEDSRV_SERVE_PORT": "7"}
    held = os.open(tmp_path / "lock", os.O_CREAT)
    os.set_inheritable(held, True)
    with kept([MARK]):
        fork = a_program("a", "--b=ç", cwd=place)
        assert isinstance(fork, Begun)
        seen = told(fork)
        assert (fork.poll(), ended(fork), fork.poll()) == (None, 3, 3)
        fork.send_signal(signal.SIGTERM)  # of no avail, and no error
    assert seen.pop("has")
    assert seen.pop("path") == str(place)
    assert seen.pop("comm") == PROGRAM[:15]
    assert seen == {
        "argv": ["a", "--b=ç"], "cwd": str(place), "env": {"ODD": "é\udcff"}, "files": 3,
        "leads": True,
    }  # fmt: skip
    other = a_program("a", "--b=ç", cwd=place)
    other.kill()
    other.wait()
    assert not isinstance(other, Begun), "nothing is warm any more"


@checked
def a_program_is_killed_or_asked_to_end(tmp_path: Path) -> None:
    with kept([]):
        for number, method in ((signal.SIGKILL, "kill"), (signal.SIGTERM, "terminate")):
            fork = a_program()
            told(fork)
            with pytest.raises(subprocess.TimeoutExpired):
                fork.wait(0.01)
            getattr(fork, method)()
            assert fork.wait(60) == -number
        with (tmp_path / "log").open("wb") as log:
            fork = begun("no.such.module", [], stdin=log, stdout=log, stderr=subprocess.STDOUT)
            assert fork.wait(60) == 1
    assert "No module named" in (tmp_path / "log").read_text()


def gone(pid: int) -> bool:
    """Wait for the end of a process of another one."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    return bool(select.select([end], [], [], 60)[0])


@checked
def programs_end_with_what_forks_them_and_the_next_is_an_interpreter(tmp_path: Path) -> None:
    with kept([]):
        fork = a_program()
        told(fork)
        warm = processes.warm
        os.kill(warm.pid, signal.SIGTERM)  # for the owner to decide
        os.kill(warm.pid, signal.SIGINT)
        other = a_program()
        told(other)
        assert ended(other) == 3
        os.kill(warm.pid, signal.SIGKILL)
        assert fork.wait(60) < 0
        other = a_program()
        assert isinstance(other, subprocess.Popen)
        assert not told(other)["has"]
        assert ended(other) == 3


@checked
def a_program_whose_output_nobody_reads_ends_as_a_program(tmp_path: Path) -> None:
    """And not as a copy of what forked it, which went on with other orders."""
    with kept([]):
        assert ended(a_program()) == 1
        other = a_program()
        told(other)
        assert ended(other) == 3


@checked
def nothing_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    owner = os.fork()
    if not owner:
        with kept([]):
            fork = a_program()
            told(fork)
            os.write(writes, f"{processes.warm.pid} {fork.pid}".encode())
            signal.pause()
    both = [*map(int, os.read(reads, 64).split())]
    os.kill(owner, signal.SIGKILL)
    assert all(map(gone, both))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_warm(check: Check, fork_server: ForkServer, tmp_path: Path) -> None:
    status, said = fork_server.call(f"{__name__}:{check.__name__}", tmp_path)
    assert status == 0, said
