"""Processes that the launcher forks: what they say, and how they end.

Each check runs in a fork of the fork server, since a process that has used gRPC must not fork.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from fedmodels.errors import ConfigError, DataError
from fedmodels.host.processes import Box, Child, ProcessLine
from fedsrv.launch import gpus
from fedsrv.launch.forked import Forked, fork_coordinator, fork_fedcli
from fedsrv.launch.gpus import Gpu, Look
from fedsrv.launch.hosts import Joining, LocalHosts, error_in
from fedsrv.launch.launcher import Launch
from fedsrv.launch.layout import Crowd
from fedsrv.launch.progress import PlainLines
from tests.conftest import tiny_experiment
from tests.integration import harness
from tests.integration.harness import ForkServer

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


def seen(device: str, log: Path, free: Sequence[int | str], models: str) -> list[Gpu]:
    """Look at made-up GPUs: for each the bytes that are free, or what CUDA says of its error."""

    def free_of(gpu: int) -> tuple[int, int]:
        found = free[gpu]
        if isinstance(found, str):
            raise RuntimeError(found)
        return found, 1 << 40

    torch.cuda.device_count = lambda: len(free)
    torch.cuda.get_device_name = models.__getitem__
    torch.cuda.mem_get_info = free_of
    look = Look(device, log)
    found = look.gpus()
    assert look.gpus() is found, "it looks once"
    look.end()
    return found


@checked
def gpus_are_looked_at_in_a_fork(tmp_path: Path) -> None:
    log, busy = tmp_path / "log", "CUDA error: devices are busy\nand much more"
    assert seen("auto", log, [], "") == []
    assert not torch.cuda.is_initialized()
    found = seen("auto", log, [5, busy, 0, 6, 7], "AAABA")
    assert found == [Gpu(0, "A", 5), Gpu(4, "A", 7)], "usable, and of one model"
    assert [*map(vars, seen("cuda:3", log, [5, busy, 0, 6], "AAAB"))] == [vars(Gpu(3, "B", 6))]
    for device, why in (
        ("cuda:1", r"^--device cuda:1: cuda:1 cannot be used \(CUDA error: devices are busy\);"),
        ("cuda:2", r"cuda:2 cannot be used \(no memory is free\)"),
        ("cuda:4", "this machine has cuda:0 to cuda:3"),
    ):
        with pytest.raises(ConfigError, match=why):
            seen(device, log, [5, busy, 0, 6], "AAAB")
    with pytest.raises(ConfigError, match=r"auto: cuda:0 cannot be used .* cpu uses no GPU$"):
        seen("auto", log, [busy, busy], "AA")


@checked
def a_look_at_gpus_that_comes_to_nothing(tmp_path: Path) -> None:
    look = Look("auto", tmp_path / "log")
    look.end()  # nobody asks what it saw
    torch.cuda.device_count = lambda: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ConfigError, match=r"which GPUs there are \(it ended with -9\)"):
        Look("auto", tmp_path / "log").gpus()
    torch.cuda.device_count = sys.stdin.read  # it ends with the pipe
    gpus.LOOKING_S = 0.05
    with pytest.raises(ConfigError, match=r"which GPUs there are \(no answer within 0 s\)"):
        Look("auto", tmp_path / "log").gpus()


@checked
def hosts_are_told_their_gpus(tmp_path: Path) -> None:
    box: Box = queue.SimpleQueue()
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_name = "AA".__getitem__
    torch.cuda.mem_get_info = lambda gpu: (8 << 30, 1 << 40)
    joining = Joining(tmp_path, tmp_path / "clients", "auto")
    hosts = LocalHosts(joining, tmp_path)
    hosts.begin(box)
    assert hosts.divide(Crowd(5, 5, hosts=2, evaluator=True)) == ["0-4:2", "1-3:2", "evaluator"]
    assert hosts.gpus == 2
    told: list[dict[str, Any]] = []
    hosts._server.tell = told.append
    for host in ("0-4:2", "1-3:2", "evaluator"):
        hosts.start(host, "127.0.0.1:1")
    argv = [order["argv"] for order in told]
    devices = [words[words.index("--device") + 1] for words in argv]
    assert devices == ["cuda:0", "cuda:1", "cuda:0"]
    hosts.end()


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


def test_a_fork_server_that_ends_says_why_at_once(tmp_path):
    server = ForkServer(tmp_path / "forks.log", "no_such_module")
    for _ in range(2):  # the order may still be taken, or there is nobody to take it
        with pytest.raises(AssertionError, match=r"server ended: .*No module named no_such_module"):
            server.start(["join"], tmp_path / "client.log")
    server.close()


def test_processes_find_what_pytest_found(monkeypatch):
    """As where the dependencies are on the path alone."""
    assert harness.path_with(f"one::{harness.ROOT}:two").split(":")[-3:] == [
        str(harness.ROOT), "one", "two",
    ]  # fmt: skip

    def lacking(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(harness, "version", lacking)
    with pytest.raises(pytest.fail.Exception, match="fedtide is on the path and not installed"):
        harness.environment()
