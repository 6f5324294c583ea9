"""Processes that the launcher forks: what they say, and how they end.

Each check runs in a fork of the fork server, since a process that has used gRPC must not fork.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from fedmodels.errors import DataError
from fedmodels.processes import Box, Child, ProcessLine
from fedsrv.launch.forked import Forked, fork_coordinator, fork_fedcli
from fedsrv.launch.hosts import Joining, LocalHosts, error_in
from fedsrv.launch.launcher import Launch
from fedsrv.launch.progress import PlainLines
from tests.conftest import tiny_experiment

pytestmark = pytest.mark.loopback

Check = Callable[[Path], None]
CHECKS: list[Check] = []


def checked(check: Check) -> Check:
    """Have a function called in a fork, with a directory."""
    CHECKS.append(check)
    return check


def said(box: Box) -> ProcessLine:
    return box.get(timeout=20)


def echo() -> None:
    print(os.getsid(0) == os.getpid(), input())
    print("no", file=sys.stderr)
    sys.exit(3)


@checked
def a_fork_speaks_like_a_process(tmp_path: Path) -> None:
    box: Box = queue.SimpleQueue()
    it = Child("it", Forked("echo", echo, tmp_path / "it.log"), box)
    it.tell("there")
    assert said(box) == ProcessLine("it", 'True "there"')
    assert said(box) == ProcessLine("it", "", 3)
    assert (tmp_path / "it.log").read_text() == "no\n"
    it.tell("late")
    it.end()


@checked
def a_fork_ends_with_its_standard_input_whatever_was_forked_later(tmp_path: Path) -> None:
    """A later fork must not hold the other end of an earlier one's pipe."""
    first, second = (Forked("it", lambda: sys.stdin.read(), tmp_path / "log") for _ in range(2))
    first.stdin.close()
    assert first.wait(60) == 0
    assert second.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.05)
    second.kill()
    assert second.wait(60) == -signal.SIGKILL
    second.kill()  # of no avail, and no error
    first.close()
    second.close()


@checked
def what_a_fork_raises_is_in_its_log(tmp_path: Path) -> None:
    fork = Forked("it", lambda: 1 / 0, tmp_path / "log")
    assert fork.wait(60) == 1
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()
    fork.close()


@checked
def a_coordinator_that_is_never_needed(tmp_path: Path) -> None:
    box: Box = queue.SimpleQueue()
    it = Child("server", fork_coordinator(tmp_path / "log"), box)
    it.end()
    assert said(box) == ProcessLine("server", "", 0)


@checked
def a_coordinator_takes_its_arguments_when_it_is_needed(tmp_path: Path) -> None:
    box: Box = queue.SimpleQueue()
    it = Child("server", fork_coordinator(tmp_path / "log"), box)
    it.tell(["serve", str(tmp_path / "nothing.toml")])
    assert said(box).status == 2
    assert "nothing.toml" in error_in(tmp_path / "log")
    it.end()


@checked
def a_coordinator_says_its_error_to_the_launcher(tmp_path: Path) -> None:
    """And to its log, which may be on a disk that is full."""
    box: Box = queue.SimpleQueue()
    it = Child("server", fork_coordinator(tmp_path / "log"), box)
    config = tmp_path / "config.toml"
    config.write_text(tomli_w.dumps(tiny_experiment().to_dict()))
    it.tell(["serve", str(config), "--listen", "nowhere", "--events"])
    line = said(box).line
    assert line.startswith("error: --listen 'nowhere' is not HOST:PORT")
    assert said(box).status == 2
    assert error_in(tmp_path / "log") == line.removeprefix("error: ")
    it.end()


@checked
def dealing_out_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    data = tmp_path / "data"
    hosts = LocalHosts(Joining(data, tmp_path / "clients", "cpu"), tmp_path / "logs")
    run = Launch(tiny_experiment(), tmp_path, data, hosts, PlainLines(), tmp_path / "none")
    log = tmp_path / "logs" / "partition.log"
    run.dealing = Forked("fedcli", lambda: os.kill(os.getpid(), signal.SIGKILL), log)
    with pytest.raises(DataError, match=r"^fedcli partition was killed by signal 9$"):
        run.partition()
    run.dealing.close()


@checked
def what_a_forked_fedcli_says_is_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "partition.log"
    fork = fork_fedcli(["partition", str(tmp_path / "none.toml"), "--out", str(tmp_path)], log)
    assert fork.wait(60) == 2
    assert error_in(log).endswith("none.toml: No such file or directory")
    fork.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_fork(check, fork_server, tmp_path):
    status, output = fork_server.call(f"{__name__}:{check.__name__}", tmp_path)
    assert status == 0, output
