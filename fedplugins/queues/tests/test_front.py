"""The front of a queue: which runs are served side by side, and what becomes of each."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError, LinkError, RunFailed, RunStopped
from fedmodels.facts.config_file import parse_experiment
from fedmodels.times import QUEUE_LOOK_S
from fedpb import PROTOCOL
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.queues import front as module
from fedplugins.queues.front import Front
from fedplugins.queues.reaching import QueueAt
from fedplugins.queues.run_queue import runs_of, submit, withdraw
from fedplugins.queues.served_run import MOST_KILLS, ServedRun
from fedplugins.queues.service import FrontService, NoRun
from fedplugins.queues.submitting import put
from fedsrv.cli import app
from fedsrv.identity.guard import Guard, NotYours
from fedsrv.identity.roles import why_not
from fedsrv.progress.events import Event
from fedsrv.progress.watching import check_health, watched
from fedsrv.state.run_directory import lock
from fedsrv.transport.listening import listen_at, stop_server


@pytest.fixture
def experiment() -> Experiment:
    return parse_experiment('[data]\nname = "digits"\n[net]\nname = "digits-cnn"\n'
                            '[method]\nname = "fedavg"\n[schedule]\nrounds = 1\nclients = 2\n'
                            '[scenario]\nkind = "iid"\n')  # fmt: skip


class Processes:
    """The processes of runs, as a test has them begin and end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = list[tuple[str, int, bool]]()
        self.statuses = dict[str, int]()
        self.asked = list[str]()
        monkeypatch.setattr(ServedRun, "begin", lambda run, *given: self.begin(run, *given))
        monkeypatch.setattr(ServedRun, "look", lambda run: self.look(run))
        monkeypatch.setattr(ServedRun, "ask_to_end", lambda run: self.asked.append(run.name))
        monkeypatch.setattr(module, "cores", lambda: 4)
        monkeypatch.setattr(module, "free_bytes", lambda: 1 << 40)

    def begin(self, run: ServedRun, resumes: bool, hear: Any) -> None:
        self.begun.append((run.name, run.place, resumes))
        run._process = True  # type: ignore[assignment]
        run._hear = [*hear]
        run.queued.run.mkdir(exist_ok=True)
        (run.queued.run / "run.db").touch()
        run.rss = lambda: 0  # type: ignore[method-assign]

    def look(self, run: ServedRun) -> int | None:
        if (status := self.statuses.pop(run.name, None)) is not None:
            run._process = None
        return status


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def front_of(queue: Path, at_once: int = 2, **more: Any) -> Front:
    given = {"at_once": at_once, "patience_s": 60.0, **more}
    return Front(queue, f"unix:{queue}/socket", ["--insecure"], **given)


def states(queue: Path) -> list[str]:
    return [run.state for run in runs_of(queue)]


def test_runs_are_served_side_by_side_at_ports_behind_the_front(
    tmp_path: Path, experiment: Experiment, processes: Processes
) -> None:
    names = [submit(experiment, tmp_path, name).place.name for name in "abc"]
    front = front_of(tmp_path)
    front.look(0.0)
    assert processes.begun == [(names[0], 1, False), (names[1], 2, False)]
    processes.statuses[names[0]] = 0
    front.look(1.0)
    assert processes.begun[2:] == [(names[2], 1, False)]
    assert states(tmp_path) == ["over", "running", "running"]
    again = front_of(tmp_path)  # this one was killed, and its runs with it
    again.look(0.0)
    assert processes.begun[3:] == [(names[1], 2, True), (names[2], 1, True)], "where they were"


@pytest.mark.parametrize(
    ("cores", "free", "beside"), [(1, 1 << 40, 1), (4, 1 << 29, 1), (4, 1 << 40, 3)]
)
def test_a_run_begins_beside_others_where_cores_and_memory_allow(
    cores: int, free: int, beside: int, tmp_path: Path, experiment: Experiment,
    processes: Processes, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in "abc":
        submit(experiment, tmp_path, name)
    monkeypatch.setattr(module, "cores", lambda: cores)
    monkeypatch.setattr(module, "free_bytes", lambda: free)
    front_of(tmp_path, at_once=3).look(0.0)
    assert len(processes.begun) == beside


def test_a_run_that_is_killed_goes_on_by_itself_and_fails_only_if_it_gets_nowhere(
    tmp_path: Path, experiment: Experiment, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, other = (submit(experiment, tmp_path, name).place.name for name in "ab")
    commits = iter([1, 1, 2, *[2] * MOST_KILLS])
    monkeypatch.setattr(ServedRun, "commits", property(lambda run: next(commits)))
    front, now = front_of(tmp_path), 0.0
    front.look(now)
    for kills in range(2 + MOST_KILLS):
        assert "failed" not in states(tmp_path), kills
        processes.statuses[killed] = (-9, RunStopped.exit_code)[kills % 2]
        front.look(now)
        now += 10_000
        front.look(now)
    assert states(tmp_path) == ["running", "running"]
    processes.statuses[killed] = -9
    front.look(now)
    assert states(tmp_path) == ["failed", "running"]
    assert [name for name, *_ in processes.begun].count(other) == 1


def test_a_run_that_fails_says_so_on_its_page_and_keeps_no_other_one(
    tmp_path: Path, experiment: Experiment, processes: Processes
) -> None:
    names = [submit(experiment, tmp_path, name).place.name for name in "ab"]
    told, followed = list[Event](), list[tuple[str, bool]]()

    def follow(name: str, run: Path | None) -> Any:
        followed.append((name, run is not None))
        return told.append

    front = front_of(tmp_path, at_once=1, pages=[follow])
    front.look(0.0)
    processes.statuses[names[0]] = 2
    front.look(1.0)
    assert states(tmp_path) == ["failed", "running"]
    assert [event.kind for event in told] == ["ended"]
    assert followed == [(names[0], True), (names[0], False), (names[1], True)]


def test_a_run_that_misses_a_site_lets_others_go_first_and_its_turn_comes_again(
    tmp_path: Path, experiment: Experiment, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (submit(experiment, tmp_path, name) for name in "ab")
    front = front_of(tmp_path, at_once=1)
    front.look(0.0)
    (run,) = front.served()
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    run._take(Event("waiting", detail={"line": "waiting for client 1", "clients": ["1"]}))
    front.look(64.0)
    assert processes.asked == []
    front.look(66.0)
    assert processes.asked == [first.place.name]
    assert first.state == "skipped"
    processes.statuses[first.place.name] = RunStopped.exit_code
    front.look(67.0)
    assert [name for name, *_ in processes.begun] == [first.place.name, second.place.name]
    processes.statuses[second.place.name] = 0
    front.look(68.0)
    assert states(tmp_path) == ["running", "over"]
    assert processes.begun[-1] == (first.place.name, 1, True)
    (run,) = front.served()
    run._take(Event("waiting", detail={"line": "waiting for client 1", "clients": ["1"]}))
    front.look(1e6)  # nobody waits: it has time
    assert first.state == "running"


def test_a_site_that_comes_ends_the_wait(
    tmp_path: Path, experiment: Experiment, processes: Processes
) -> None:
    submit(experiment, tmp_path, "a")
    front = front_of(tmp_path)
    front.look(0.0)
    (run,) = front.served()
    run._take(Event("waiting", detail={"line": "waiting", "clients": ["0", "1"]}))
    run._take(Event("joined", client="0"))
    assert run.misses_for(1e9) > 0
    run._take(Event("joined", client="1"))
    assert run.misses_for(1e9) == 0
    assert run.line == "client 1 joined"


def test_a_withdrawn_run_is_asked_to_end_and_stays_withdrawn(
    tmp_path: Path, experiment: Experiment, processes: Processes
) -> None:
    run = submit(experiment, tmp_path, "a")
    front = front_of(tmp_path)
    front.look(0.0)
    withdraw(tmp_path, run.place.name)
    front.look(1.0)
    assert processes.asked == [run.place.name]
    processes.statuses[run.place.name] = 0
    front.look(2.0)
    assert states(tmp_path) == ["withdrawn"]
    assert front.served() == []


def test_a_process_that_a_killed_front_has_left_ends_first(
    tmp_path: Path, experiment: Experiment, processes: Processes
) -> None:
    import os

    run = submit(experiment, tmp_path, "a")
    run.run.mkdir()
    handle, front = lock(run.run), front_of(tmp_path)
    front.look(0.0)
    assert processes.begun == []
    os.close(handle)
    front.look(QUEUE_LOOK_S)
    assert processes.begun == [(run.place.name, 1, True)]


def test_a_port_that_somebody_else_has_is_no_place(
    tmp_path: Path, experiment: Experiment, processes: Processes
) -> None:
    run = submit(experiment, tmp_path, "a")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        front = Front(tmp_path, f"127.0.0.1:{port - 1}", [], at_once=2, patience_s=60)
        front.look(0.0)
    assert processes.begun == [(run.place.name, 2, False)]


def test_a_run_whose_process_is_about_to_go_keeps_its_port(
    tmp_path: Path, experiment: Experiment, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front was killed and comes again at once: sites go on where they were."""
    import os

    run = submit(experiment, tmp_path, "a")
    run.run.mkdir()
    run.keep_place(2)
    handle, front = lock(run.run), front_of(tmp_path)
    monkeypatch.setattr(Front, "_is_free", lambda front, place: place != 2)
    front.look(0.0)
    assert processes.begun == []
    os.close(handle)
    front.look(QUEUE_LOOK_S)
    assert processes.begun == [(run.place.name, 2, True)]


def test_a_damaged_word_on_how_a_run_ended_ends_no_other_run(
    tmp_path: Path, experiment: Experiment, processes: Processes
) -> None:
    damaged, served = (submit(experiment, tmp_path, name) for name in "ab")
    damaged.end.write_text("ov")
    front = front_of(tmp_path)
    front.look(0.0)
    assert [name for name, *_ in processes.begun] == [served.place.name]
    served.end.write_text("")
    front.look(1.0)
    assert processes.asked == [served.place.name]
    processes.statuses[served.place.name] = RunStopped.exit_code
    front.look(2.0)
    assert front.served() == []


# --- over the network -----------------------------------------------------------------------------


@contextmanager
def listening(queue: Path, guard: Guard | None = None) -> Iterator[tuple[str, Front]]:
    """Serve the calls of a front whose runs have no processes."""
    front = front_of(queue)
    service = FrontService(front, guard or Guard())
    service.complaints.open()
    address = f"unix:{queue}/socket"
    given = service.handlers(), service.gate, service.health, service.gate.threads
    server, _ = listen_at(address, None, *given)
    try:
        yield address, front
    finally:
        stop_server(server, 0)
        service.gate.close()
        service.complaints.close()


@pytest.mark.loopback
def test_a_queue_without_runs_answers_status_and_health_and_takes_runs(
    tmp_path: Path, experiment: Experiment, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedplugins.queues.service.put_apart", put)
    config, queue = tmp_path / "wards.toml", tmp_path / "queue"
    queue.mkdir()
    submit(experiment, tmp_path, "a").config.rename(config)
    cli = CliRunner()
    with listening(queue) as (address, front):
        check_health(address)
        assert "is empty" in cli.invoke(app, ["status", address]).output
        done = cli.invoke(app, ["submit", str(config), "--queue", address])
        assert done.output == "0001-wards\n"
        front.look(0.0)
        said = cli.invoke(app, ["status", address]).output
        assert said == f"0001-wards: running at {address}.1: starting\n"
        assert "running" in cli.invoke(app, ["queue", address]).output
        with pytest.raises(LinkError, match=r"front of a queue.*0001-wards at unix:.*socket\.1"):
            [*watched(address)]
        cli.invoke(app, ["queue", address, "--withdraw", "0001-wards"])
        assert runs_of(queue)[0].state == "withdrawn"
        with pytest.raises(LinkError, match="has no run '0009-x'"):
            QueueAt(address).withdraw("0009-x")
        with pytest.raises(LinkError, match="cannot name a run"):
            QueueAt(address).submit(experiment, "../x")


@pytest.mark.loopback
@pytest.mark.parametrize("how", ["", "too-slow", "killed"])
def test_a_process_of_its_own_checks_what_is_submitted(
    how: str, tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedpb.tables import table_of
    from fedpb.v1 import front_pb2 as pb
    from fedplugins.queues import submitting

    if not how:
        bad = table_of({"method": {"name": "fedavgg"}})
        with pytest.raises(ConfigError, match="key 'net' is missing"):
            submitting.put_apart(pb.SubmitRunRequest(name="a", config=bad), tmp_path)
        return
    request = pb.SubmitRunRequest(name="a", config=table_of(experiment.to_dict()))
    if how == "too-slow":
        monkeypatch.setattr(submitting, "SUBMIT_S", 0.0)
    else:
        monkeypatch.setattr(submitting, "program", lambda *given, **pipes: killed(**pipes))
    with pytest.raises(RunFailed, match="could not be checked"):
        submitting.put_apart(request, tmp_path)
    assert not [*tmp_path.glob("0*")]


def killed(**pipes: Any) -> Any:
    return subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], **pipes)


def test_the_front_stays_small() -> None:
    """By a process that imports no torch."""
    code = (
        "import sys, fedplugins.queues.serving, fedplugins.queues.front, fedsrv.dashboard.live\n"
        "import fedplugins.queues.service, fedplugins.trackers.prometheus\n"
        "import fedsrv.identity.certificate_guard\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_names_files_is_not_submitted_over_the_network(
    tmp_path: Path, experiment: Experiment
) -> None:
    """Neither by the command, nor by a caller that sends it all the same: code would run there."""
    from fedpb.tables import table_of
    from fedpb.v1 import front_pb2 as pb

    own = experiment.net.model_copy(update={"weights": "/etc/passwd"})
    with pytest.raises(ConfigError, match="names files of this machine"):
        QueueAt("127.0.0.1:1").submit(experiment.model_copy(update={"net": own}), "a")
    for table, key, value in (
        ("net", "weights", "/etc/passwd"), ("method", "name", "/tmp/own.py:Own"),
        ("method", "name", "own.py:Own"), ("schedule", "availability", "/etc/passwd"),
    ):  # fmt: skip
        values = experiment.to_dict()
        values[table] = {**values[table], key: value}
        request = pb.SubmitRunRequest(name="a", config=table_of(values))
        with pytest.raises(ConfigError):
            put(request, tmp_path)
    assert not [*tmp_path.glob("0*")]


@pytest.mark.loopback
def test_roles_decide_who_may_see_submit_and_withdraw(
    tmp_path: Path, experiment: Experiment
) -> None:
    class Watchers(Guard):
        @contextmanager
        def admitted(self, call: str, context: Any) -> Iterator[None]:
            if why := why_not("fedtide:watcher", call.rpartition("/")[2]):
                raise NotYours(why)
            yield

    with listening(tmp_path, Watchers()) as (address, _):
        assert QueueAt(address).runs() == []
        with pytest.raises(LinkError, match="may not call SubmitRun: that takes a certificate as"):
            QueueAt(address).submit(experiment, "a")
        with pytest.raises(LinkError, match="may not call WithdrawRun"):
            QueueAt(address).withdraw("0001-a")
    for role in ("client:0", "relay:0-3", "evaluator"):
        for call in ("ListRuns", "SubmitRun", "WithdrawRun"):
            assert why_not(f"fedtide:{role}", call)


def test_a_site_is_told_where_runs_are_served(
    tmp_path: Path, experiment: Experiment, processes: Processes
) -> None:
    for name in "ab":
        submit(experiment, tmp_path, name)
    front = front_of(tmp_path)
    service = FrontService(front, Guard())
    ask = rpc.PrepareRequest(client_id="0", protocol=PROTOCOL)
    with pytest.raises(NoRun):
        service.prepare(ask)
    front.look(0.0)
    assert list(service.prepare(ask).places) == [1, 2]


@pytest.mark.loopback
def test_who_submits_to_a_slow_front_hears_that_the_run_may_be_there(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not answer in time; "nobody answers" would have the run submitted once more."""
    import threading

    heard = threading.Event()
    for name, seconds in (("SUBMIT_S", -0.9), ("CONNECT_S", 1.0)):
        monkeypatch.setattr(f"fedplugins.queues.reaching.{name}", seconds)
    monkeypatch.setattr("fedplugins.queues.service.put_apart", lambda *given: heard.wait(20))
    with listening(tmp_path) as (address, _):
        with pytest.raises(LinkError, match=r"may have done it: fedsrv status .* shows its runs"):
            QueueAt(address).submit(experiment, "a")
        heard.set()
