import os
import queue
import signal
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcli.cli import clients_of
from fedsrv.launcher import PROCESSES_PER_CORE, affordable_hosts, host_ranges
from fedsrv.processes import Child, Said, coordinator_command, error_in, fork_server_command

# --- who hosts whom -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "hosts", "ranges"),
    [
        (1, 1, ["0"]),
        (3, 3, ["0", "1", "2"]),
        (3, 1, ["0-2"]),
        (5, 2, ["0-1", "2-4"]),
        (10, 3, ["0-2", "3-5", "6-9"]),
        (3, 100, ["0", "1", "2"]),
    ],
)
def test_host_ranges(clients, hosts, ranges):
    assert host_ranges(clients, hosts) == ranges


@given(st.integers(1, 300), st.integers(1, 300))
def test_every_client_has_one_host(clients, hosts):
    """The ranges are what ``--client-id`` understands, of even sizes, and never too many."""
    ranges = [clients_of(text) for text in host_ranges(clients, hosts)]
    assert [c for ids in ranges for c in ids] == list(range(clients))
    assert len(ranges) == min(hosts, clients)
    sizes = [len(ids) for ids in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_affordable_hosts():
    assert affordable_hosts(1) == 1
    assert 1 <= affordable_hosts(10_000) <= PROCESSES_PER_CORE * os.cpu_count()


# --- one process ----------------------------------------------------------------------------------


def child(tmp_path, program, box):
    return Child("it", [sys.executable, "-c", program], tmp_path / "it.log", box)


def said(box, wait_s=20):
    return box.get(timeout=wait_s)


def test_a_process_is_heard_line_by_line(tmp_path):
    box = queue.SimpleQueue()
    program = "import sys; print('one'); print(input()); print('no', file=sys.stderr); sys.exit(3)"
    it = child(tmp_path, program, box)
    assert said(box) == Said("it", "one")
    it.tell({"id": 1})
    assert said(box) == Said("it", '{"id": 1}')
    assert said(box) == Said("it", "", 3)
    assert (tmp_path / "it.log").read_text() == "no\n"
    it.tell({"id": 2})  # it is gone: its end has told so already
    it.end()


def test_a_process_ends_with_its_standard_input(tmp_path):
    box = queue.SimpleQueue()
    it = child(tmp_path, "import sys; sys.stdin.read()", box)
    it.end()
    assert said(box).status == 0


def test_a_process_that_does_not_end_is_killed(tmp_path):
    box = queue.SimpleQueue()
    it = child(tmp_path, "import time; print('up', flush=True); time.sleep(60)", box)
    assert said(box).line == "up"
    it.end(patience_s=0.05)
    assert said(box).status == -signal.SIGKILL


def test_a_process_of_its_own_session(tmp_path):
    """Ctrl-C reaches the launcher alone."""
    box = queue.SimpleQueue()
    it = child(tmp_path, "import os; print(os.getsid(0), os.environ['OMP_NUM_THREADS'])", box)
    assert said(box).line == f"{it.process.pid} 1"
    assert os.getsid(0) != it.process.pid
    it.end()


def test_commands(tmp_path):
    command = coordinator_command(tmp_path / "a.toml", tmp_path / "out", "127.0.0.1:5", True)
    assert command[1:4] == ["-m", "fedsrv", "serve"]
    assert {"--resume", "--events", "--evaluator"} <= set(command)
    without = coordinator_command(tmp_path / "a.toml", tmp_path / "out", "127.0.0.1:5", False)
    assert "--evaluator" not in without
    assert fork_server_command()[1:] == ["-m", "fedcli.hosts"]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("one\ntwo\n", "two"),
        ("error: first\nerror: what went wrong\nTraceback\n", "what went wrong"),
        ("an error: within a line\n", "an error: within a line"),
    ],
)
def test_the_error_in_a_log(tmp_path, log, line):
    (tmp_path / "log").write_text(log)
    assert error_in(tmp_path / "log") == line


def test_the_error_in_no_log(tmp_path):
    assert error_in(tmp_path / "nothing") == ""
    (tmp_path / "binary").write_bytes(b"\xff\xfe error\n")
    assert error_in(tmp_path / "binary").endswith("error")
