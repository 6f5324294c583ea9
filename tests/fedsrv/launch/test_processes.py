import io
import json
import os
import queue
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedmodels.errors import DataError, RunFailed
from fedmodels.host import processes
from fedmodels.host.processes import Child, ProcessLine, next_said, started
from fedmodels.host.warm import kept
from fedmodels.methods.fedavg import FedAvg
from fedmodels.own.own_code import own
from fedsrv.coordinator import _run_to_the_end
from fedsrv.launch import launcher
from fedsrv.launch.hosts import error_in
from fedsrv.launch.launcher import Launch
from fedsrv.launch.progress import PlainLines
from fedsrv.progress.events import HAS_FAILED, Event, EventLog
from tests.conftest import tiny_experiment

# --- one process ----------------------------------------------------------------------------------


def child(tmp_path, program, box):
    return Child("it", started(["-c", program], tmp_path / "it.log"), box)


def said(box, wait_s=20):
    return box.get(timeout=wait_s)


def test_a_process_is_heard_line_by_line(tmp_path):
    box = queue.SimpleQueue()
    program = "import sys; print('one'); print(input()); print('no', file=sys.stderr); sys.exit(3)"
    it = child(tmp_path, program, box)
    assert said(box) == ProcessLine("it", "one")
    it.tell({"id": 1})
    assert said(box) == ProcessLine("it", '{"id": 1}')
    assert said(box) == ProcessLine("it", "", 3)
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


# --- a launched run -------------------------------------------------------------------------------


@dataclass
class Started:
    """Hosts that only remember who was started."""

    clients: list[str] = field(default_factory=list)
    name, listen, serve_options, gpus = "hosts", "127.0.0.1:0", (), 1

    def divide(self, crowd):
        return ["0-2", "3-4"]

    def why(self, status):
        return f"killed by signal {-status}"

    def start(self, clients, server):
        assert server, "nobody listens yet"
        self.clients.append(clients)

    def forecast(self, config, data, told):
        return True

    def begin_again(self):
        """All hosts of before are gone."""


@pytest.mark.parametrize(
    ("status", "log", "line"),
    [
        (1, "error: no room\n", "^no room$"),
        (120, "", "^fedcli partition ended with 120, without a word$"),
        (-signal.SIGKILL, "INFO unpacked\n", "^fedcli partition was killed by signal 9$"),
    ],
)
def test_data_that_are_not_dealt_out_are_one_line(tmp_path, status, log, line):
    """The log goes when the launch ends, as nothing of the run is left."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "partition.log").write_text(log)
    lines = PlainLines(Console(file=io.StringIO()))
    run = Launch(tiny_experiment(), tmp_path, tmp_path, Started(), lines, tmp_path / "none")
    run.dealing = SimpleNamespace(wait=lambda: status)
    with pytest.raises(DataError, match=line):
        run.partition()


def test_clients_are_told_of_code_that_ends_the_coordinator(tmp_path):
    """Else those of other machines would wait until it comes back, and it would end again."""
    file, told = tmp_path / "mine.py", []
    file.write_text(f"import sys\ndef aggregate():\n    sys.exit()  # {file}\n")
    engine = SimpleNamespace(method=FedAvg(), run=own(f"{file}:aggregate"))
    store = SimpleNamespace(ended=lambda: None)
    with pytest.raises(RunFailed, match=r"mine.py \(line 3\) ends the process"):
        _run_to_the_end(engine, SimpleNamespace(end=told.append), store, EventLog())
    assert told[0].startswith(f"{HAS_FAILED}{file} (line 3) ends the process; ")


def told_of_a_failure(tmp_path):
    """Return a launched run whose only host was told that the run has failed, and what it says."""
    (tmp_path / "logs").mkdir()
    said = io.StringIO()
    lines = PlainLines(Console(file=said))
    run = Launch(tiny_experiment(), tmp_path, tmp_path, Started(), lines, tmp_path / "none")
    run.clients, run.address, run.config = ["0"], "127.0.0.1:5", tmp_path / "launch.toml"
    why = f"pull: {HAS_FAILED}its loss is not finite (FAILED_PRECONDITION)"
    (tmp_path / "logs" / "client-0.log").write_text(f"error: {why}\n")
    (tmp_path / "logs" / "server.log").write_text("error: its loss is not finite\n")
    run.box.put(ProcessLine("hosts", json.dumps({"id": "0", "status": 1})))
    return run, said


@pytest.mark.parametrize(("status", "line"), [(-9, "not known: killed by signal 9"), (0, "1 s")])
def test_hosts_do_not_wait_for_a_trial_however_it_ends(tmp_path, digits, status, line):
    """What code of one's own prints in it is no forecast."""
    said = io.StringIO()
    lines, logs = PlainLines(Console(file=said, width=200)), tmp_path / "logs"
    logs.mkdir()
    (logs / "forecast.log").write_text("no forecast, ")
    run = Launch(
        tiny_experiment(), tmp_path, digits, Started(), lines, tmp_path / "none", forecasts=True
    )
    run.config, run.coordinator = tmp_path / "launch.toml", SimpleNamespace(tell=[].append)
    run.hosts.gpus = 0
    run.start(None)
    run._server_said(ProcessLine("server", "listening on 127.0.0.1:5"))
    assert run.hosts.clients == run.clients != []
    run.told.write_text(json.dumps({"lines": ["1 s"]}))
    run._client_said({"id": "forecast", "status": status})
    assert run.hosts.clients == run.clients
    assert said.getvalue() == f"forecast: {line}\n"
    assert [*logs.iterdir()] == [logs / "forecast.log"]


def test_hosts_that_die_before_the_coordinator_listens_start_once_it_does(tmp_path):
    (tmp_path / "logs").mkdir()
    lines = PlainLines(Console(file=io.StringIO()))
    run = Launch(tiny_experiment(), tmp_path, tmp_path, Started(), lines, tmp_path / "none")
    run.clients = ["0-1", "2"]
    run.box.put(ProcessLine("hosts", "", -6))
    run.box.put(ProcessLine("server", "listening on 127.0.0.1:5"))
    for client in run.clients:
        run.box.put(ProcessLine("hosts", json.dumps({"id": client, "status": 0})))
    run.box.put(ProcessLine("server", "", 0))
    run.watch()
    assert run.hosts.clients == ["0-1", "2"]


def test_a_client_that_was_told_of_the_failure_is_not_started_again(tmp_path):
    run, said = told_of_a_failure(tmp_path)
    run.box.put(ProcessLine("server", "", 1))
    with pytest.raises(RunFailed, match=r"^its loss is not finite$"):
        run.watch()
    assert said.getvalue() == ""
    assert run.hosts.clients == []


def test_what_the_coordinator_says_of_its_failure_counts_before_its_log(tmp_path):
    """On a full disk the log ends before the line that says so."""
    run, _ = told_of_a_failure(tmp_path)
    (tmp_path / "logs" / "server.log").write_text("INFO fedsrv: client evaluator left: ")
    run.box.put(ProcessLine("server", "error: the disk is full"))
    run.box.put(ProcessLine("server", "", 1))
    with pytest.raises(RunFailed, match=r"^the disk is full$"):
        run.watch()


def test_a_coordinator_that_dies_after_the_failure_is_started_with_its_clients(
    tmp_path, monkeypatch
):
    run, said = told_of_a_failure(tmp_path)
    monkeypatch.setattr(launcher, "started", lambda command, log: started(["-c", "exit(1)"], log))
    run.box.put(ProcessLine("server", "", -signal.SIGKILL))
    with pytest.raises(RunFailed):
        run.watch()
    assert said.getvalue() == "server died (killed by signal 9); starting it again\n"
    assert run.hosts.clients == ["0"]
    run.coordinator.end()


@pytest.mark.parametrize(
    ("status", "why"), [(-9, "killed by signal 9"), (1, "no memory"), (2, "no client.json")]
)
def test_what_a_restart_may_mend_is_started_again(tmp_path, status, why):
    run, said = told_of_a_failure(tmp_path)
    run.box.get()
    (tmp_path / "logs" / "client-0.log").write_text(f"error: {why}\n")
    for _ in range(4):
        run.box.put(ProcessLine("hosts", json.dumps({"id": "0", "status": status})))
    with pytest.raises(RunFailed) as failed:
        run.watch()
    if status == 2:
        assert str(failed.value).startswith(f"client-0: {why}; fix that, then --resume continues")
        assert run.hosts.clients == []
    else:
        assert str(failed.value) == f"client-0 died 4 times without progress: {why}"
        assert said.getvalue() == 3 * f"client-0 died ({why}); starting it again\n"
        assert run.hosts.clients == ["0"] * 3


def test_where_others_suffice_no_client_ends_a_run_at_once(tmp_path):
    run, _ = told_of_a_failure(tmp_path)
    server = run.experiment.server.model_copy(update={"min_clients": 1})
    run.experiment = run.experiment.model_copy(update={"server": server})
    run.box.get()
    (tmp_path / "logs" / "client-0.log").write_text("error: no client.json\n")
    for _ in range(4):
        run.box.put(ProcessLine("hosts", json.dumps({"id": "0", "status": 2})))
    with pytest.raises(RunFailed, match="died 4 times without progress"):
        run.watch()
    assert run.hosts.clients == ["0"] * 3


def test_arguments(tmp_path):
    run, _ = told_of_a_failure(tmp_path)
    run.clients = ["0", "evaluator"]
    command = run._arguments()
    assert command[0] == "serve"
    assert {"--resume", "--events", "--evaluator"} <= set(command)
    run.clients = ["0"]
    assert "--evaluator" not in run._arguments()


def test_hosts_without_room_are_named_where_their_clients_are_waited_for(tmp_path):
    """The coordinator alone would say that they are not connected."""
    run, said = told_of_a_failure(tmp_path)
    run.box.get()
    run.clients = ["0-1", "2"]
    waits = "no room on the Ray cluster: it takes 1 CPU, and 0 CPU is free on all nodes"
    away = Event("waiting", detail={"line": "waiting for client 2 (not connected) for 10 s"})
    for fact in ({"id": "0-1", "node": "a"}, {"id": "2", "waits": waits}):
        run.box.put(ProcessLine("hosts", json.dumps(fact)))
    run.box.put(ProcessLine("server", away.to_json()))
    run.box.put(ProcessLine("hosts", json.dumps({"id": "2", "node": "b"})))
    run.box.put(ProcessLine("server", away.to_json()))
    run.box.put(ProcessLine("server", "", 1))
    with pytest.raises(RunFailed):
        run.watch()
    assert said.getvalue().splitlines() == [
        f"client-2 waits: {waits}",
        "waiting for client 2 (not connected) for 10 s (no room for client-2)",
        "client-2 has found room on b",
        "waiting for client 2 (not connected) for 10 s",
    ]


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


# --- waiting --------------------------------------------------------------------------------------

INTERRUPTED = """
import queue, signal, sys, threading
from fedmodels.host.processes import next_said

begun = threading.Event()

class Box(queue.SimpleQueue):
    def get(self, *args, **options):
        begun.set()  # the other thread runs when this one lets go of the interpreter to wait
        return super().get(*args, **options)

def ring():
    begun.wait()
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # the wait itself is not disturbed

threading.Thread(target=ring).start()
try:
    next_said(Box())
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_ctrl_c_that_did_not_end_the_wait_is_seen_soon():
    """As when it comes in the moment before the wait begins."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], timeout=100)
    assert done.returncode == 7


def test_what_is_said_is_heard():
    box = queue.SimpleQueue()
    box.put(ProcessLine("server", "a line"))
    assert next_said(box) == ProcessLine("server", "a line")


def test_the_fork_server_of_a_launcher_that_is_gone_ends_with_one_line():
    """It finds nobody who reads, before it sees the end of its orders."""
    script = "from fedcli import hosts; hosts.PRELOADED = (); hosts.main()"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nobody:
        found = subprocess.run(
            [sys.executable, "-c", script], stdin=subprocess.DEVNULL, stdout=nobody,
            stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert found.returncode == 1
    assert found.stderr == "the launcher is gone: its clients are ended\n"


def test_a_client_that_was_set_out_is_not_started_again_until_the_run_goes_back(tmp_path):
    """It ends with a status of its own, and the run finishes without it."""
    (tmp_path / "logs").mkdir()
    said = io.StringIO()
    lines = PlainLines(Console(file=said, width=200))
    run = Launch(tiny_experiment(), tmp_path, tmp_path, Started(), lines, tmp_path / "none")
    run.clients, run.address = ["0", "1"], "127.0.0.1:5"
    (tmp_path / "logs" / "client-1.log").write_text("error: client 1 takes no part any more\n")
    out = ProcessLine("hosts", json.dumps({"id": "1", "status": 3}))
    run.box.put(out)
    note = Event("note", "1", detail={"line": "the run went back"}, unix_time=1.0)
    run.box.put(ProcessLine("server", note.to_json()))
    run.box.put(out)
    run.box.put(ProcessLine("server", "", 0))
    run.box.put(ProcessLine("hosts", json.dumps({"id": "0", "status": 0})))
    run.watch()
    assert run.hosts.clients == ["1"], "once, by the note"
    assert run.restarts == {}
    assert said.getvalue().count("client-1: client 1 takes no part any more") == 2


def test_elsewhere_than_on_linux_nothing_is_kept_warm(monkeypatch):
    monkeypatch.setattr("fedmodels.host.warm.sys.platform", "darwin")
    monkeypatch.delattr("os.fork")
    with kept(["torch"]):
        assert processes.warm is None
