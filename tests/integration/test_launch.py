"""The launcher as a user runs it: to the end, interrupted, killed, and with dying processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedmodels.facts.resolution import experiment_of
from fedmodels.tensors.archive import save
from fedmodels.tensors.bundle import Bundle
from tests.conftest import records_of, undealt
from tests.integration.conftest import tables
from tests.integration.harness import (
    TIMEOUT_S,
    ForkedServer,
    ForkServer,
    environment,
    reached,
    summary_of,
    until,
    write_config,
)
from tests.runs import assert_same

pytestmark = pytest.mark.loopback

SHORT = tables("fedprox", evaluate={"every": 1})
LONG = tables("held", schedule={"rounds": 3, "clients": 3})


class Launched:
    """``fedsrv launch`` in a session of its own: a fork, or a process as users start it."""

    def __init__(
        self, config: Path, out: Path, *more: str, forks: ForkServer | None = None,
        lease_s: float = 0.0, **env: str,
    ) -> None:  # fmt: skip
        self.out = out
        trial = [] if "--forecast" in more else ["--no-forecast"]  # a run takes as long as it
        arguments = ["launch", str(config), "--out", str(out), *trial, *more]
        self.process: subprocess.Popen[str] | ForkedServer
        if forks is not None:
            self.process = forks.start_fedsrv(arguments, lease_s=lease_s)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedsrv", *arguments],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=environment(**env), start_new_session=True,
            )  # fmt: skip

    def end(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout_s)
        return int(self.process.returncode or 0), output

    def log(self, name: str) -> str:
        return (self.out / "logs" / f"{name}.log").read_text()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if isinstance(self.process, ForkedServer):
            return self.process.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def launch(tmp_path: Path, steer: Path, fork_server: ForkServer) -> Iterator[Any]:
    made: list[Launched] = []

    def start(
        experiment: dict[str, Any], *more: str, out: str = "run", forked: bool = True
    ) -> Launched:
        config = write_config(tmp_path / "config.toml", experiment_of(experiment))
        forks = fork_server if forked else None
        made.append(Launched(config, tmp_path / out, *more, forks=forks, HELD_DIR=str(steer)))
        return made[-1]

    for leftover in steer.iterdir():
        leftover.unlink()
    yield start
    for one in made:
        one.close()


def gone(processes: list[psutil.Process]) -> bool:
    """Wait until none of these processes is alive any more."""
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_run_from_beginning_to_end(launch, whole_run, partition, tmp_path):
    begun = time.time()
    run = launch(SHORT, "--hosts", "2", "--forecast", forked=False)
    status, output = run.end()
    assert status == 0, output
    assert re.search(r"forecast: an interaction sends [\d.]+ kB to each of 3 clients", output)
    check_records(records_of(run.out), time.time() - begun)
    assert "waiting for 3 clients to join at 127.0.0.1:" in output
    assert "client 2 joined (" in output
    assert "interaction 4 of 4: round 2, task 1 committed, loss " in output
    said = (run.out / "logs" / "client-1.log").read_text()
    assert "client 1, round 2, task 1: loss" in said
    assert "client 1, round 2: scored after_local" in said or "scored global" in said
    assert "client 2 joined" in (run.out / "logs" / "server.log").read_text()
    assert "(a_glo) %" in output
    assert f"state digest: {summary_of(run.out)['state_sha256']}\n" in output
    files = {p.name for p in run.out.iterdir()}
    expected = {"config.toml", "env.json", "run.db", "rounds.jsonl", "summary.json"}
    assert expected | {"report.html", "server", "clients", "logs", "data"} <= files
    closed = ("server", "clients", "logs", "data")
    assert {(run.out / name).stat().st_mode & 0o777 for name in closed} == {0o700}
    assert (run.out / "clients" / "2" / "personal.safetensors").exists()
    assert {p.name for p in (run.out / "logs").glob("client-*")} == {
        "client-0-2:2.log", "client-1.log", "client-evaluator.log"
    }  # fmt: skip
    assert not list(run.out.glob("clients/*/pictures"))  # FedProx has nothing to show
    alone = whole_run(SHORT, run.out / "data", evaluator=True).summary
    assert_same(summary_of(run.out), alone)
    again = experiment_of(SHORT)
    assert (run.out / "config.toml").read_text() == write_config(
        tmp_path / "again.toml", again
    ).read_text()
    status, output = launch(SHORT).end()
    assert status == 2
    assert "already holds a run; add --resume" in output
    longer = {**SHORT, "schedule": {"rounds": 3, "clients": 3}}
    status, output = launch(longer, "--resume", "--forecast").end()
    assert status == 0, output
    assert "forecast" not in output, "it goes on"
    assert summary_of(run.out)["rounds"] == 3
    fresh = whole_run(longer, run.out / "data", evaluator=True).summary
    assert summary_of(run.out)["state_sha256"] == fresh["state_sha256"]


def check_records(records: list[dict[str, Any]], wall: float) -> None:
    """Check what is recorded of the two rounds of two tasks of ``SHORT``."""
    assert [r["interaction"] for r in records] == [0, 1, 2, 3]
    assert [r["round"] for r in records] == [0, 0, 1, 1]
    assert [r["task"] for r in records] == [0, 1, 0, 1]
    keys = {"round", "interaction", "task", "cohort", "metrics", "bytes", "seconds", "clients"}
    assert all(keys <= set(r) for r in records)
    per_client = records[0]["bytes"]["per_client"]
    assert sum(b["up"] for b in per_client.values()) == records[0]["bytes"]["up"]
    assert records[0]["bytes"]["wire_up"] > records[0]["bytes"]["up"]
    assert records[-1]["seconds"]["wall"] < wall
    assert {"a_glo", "a_loc", "a_sel", "global_f1"} <= set(records[-1]["metrics"])


def test_clients_draw_what_they_learnt(launch, tmp_path):
    """The first ones, into their own directories; the launcher's page shows it."""
    status, output = launch(tables("fedproto", evaluate={"every": 0}), "--hosts", "1").end()
    assert status == 0, output
    drawn = sorted(p.relative_to(tmp_path / "run") for p in tmp_path.glob("run/clients/*/*/*.svg"))
    assert drawn == [Path(f"clients/{c}/pictures/prototypes.svg") for c in (0, 1)]
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count('src="data:image/svg+xml;base64,') == 2
    rows = records_of(tmp_path / "run")
    assert "prototype_drift" not in rows[0]["metrics"]
    assert rows[-1]["metrics"]["prototype_drift"] > 0


def test_a_run_that_starts_from_a_file_of_weights(launch, whole_run, tmp_path):
    file = tmp_path / "weights.safetensors"
    save(file, Bundle(weights={"head/bias": torch.full((10,), 2.0)}), {})
    own_head = {**SHORT, "method": {"name": "fedper"}}  # clients begin with a part of the file
    table = {**own_head, "net": {"name": "digits-cnn", "weights": str(file)}}
    status, output = launch(table, "--hosts", "1").end()
    assert status == 0, output
    out = tmp_path / "run"
    alone = whole_run(table, out / "data", evaluator=True).summary
    assert summary_of(out)["state_sha256"] == alone["state_sha256"]
    plain = {**own_head, "net": {"name": "digits-cnn"}}
    other = whole_run(plain, out / "data", evaluator=True).summary
    assert other["state_sha256"] != alone["state_sha256"]
    save(file, Bundle(weights={"head/bias": torch.full((10,), 3.0)}), {})
    status, output = launch(table, "--resume", "--hosts", "1").end()
    assert status == 1
    assert "net.weights_sha256" in output.splitlines()[-1], output


def test_ctrl_c_leaves_a_resumable_run_and_nothing_else(launch, whole_run, steer):
    (steer / "aggregate-3").touch()
    run = launch(LONG)
    reached(steer / "aggregate-3.reached")
    family = run.family()
    assert len(family) >= 5  # coordinator, fork server, three clients
    run.process.send_signal(signal.SIGINT)
    status, output = run.end()
    assert status == 130
    assert output.splitlines()[-1] == (f"stopped; add --resume to continue the run in {run.out}")
    assert "Traceback" not in output
    assert gone(family)
    status, output = launch(LONG, "--resume").end()
    assert status == 0, output
    alone = whole_run(LONG, run.out / "data", evaluator=True).summary
    assert summary_of(run.out)["state_sha256"] == alone["state_sha256"]


def test_nothing_outlives_a_killed_launcher(launch, steer):
    (steer / "aggregate-1").touch()
    run = launch(LONG)
    reached(steer / "aggregate-1.reached")
    family = run.family()
    run.process.kill()
    run.process.wait()
    assert gone(family)


def test_what_dies_is_started_again(launch, whole_run, steer):
    """A client; then the fork server, which takes its clients along; then the coordinator."""
    for point in ("train-1-2", "aggregate-3"):
        (steer / point).touch()
    run = launch(LONG)
    reached(steer / "train-1-2.reached")
    family = {process.name(): process for process in run.family()}
    family["fedcli-1"].kill()
    reached(steer / "aggregate-3.reached")
    hosts = family["fedcli-hosts"]
    clients = hosts.children()
    assert {f"fedcli-{client}" for client in range(3)} <= {each.name() for each in clients}
    assert hosts.num_threads() == 1  # a fork has no other thread, nor what one was about to do
    hosts.kill()
    assert gone(clients)
    family["fedsrv-serve"].kill()
    status, output = run.end()
    assert status == 0, output
    for name in ("client-1", "hosts", "server"):
        assert f"{name} died (killed by signal 9)" in output
    alone = whole_run(LONG, run.out / "data", evaluator=True).summary
    assert summary_of(run.out)["state_sha256"] == alone["state_sha256"]


@pytest.mark.parametrize("what", ["missing", "other classes"])
def test_data_that_no_restart_mends_end_the_run_at_once(launch, partition, tmp_path, what):
    data = undealt(partition, tmp_path / "given")
    file = data / "1" / "client.json"
    said = json.loads(file.read_text())
    file.unlink()
    if what == "other classes":
        file.write_text(json.dumps({**said, "class_names": said["class_names"][::-1]}))
    run = launch(SHORT, "--data", str(data), "--hosts", "3")
    status, output = run.end()
    assert status == 1
    assert "died" not in output
    wanted = "client.json is missing" if what == "missing" else "which the run names differently"
    last = output.splitlines()[-1]
    assert last.startswith("error: client-1: ")
    assert wanted in last
    assert last.endswith("fix that, then --resume continues the run")
    if what == "missing":
        file.write_text(json.dumps(said))
        status, output = launch(SHORT, "--data", str(data), "--hosts", "3", "--resume").end()
        assert status == 0, output


def test_pooled_training_refuses_data_that_are_dealt_out(launch, partition):
    """It would train on client 0's alone, and look like a bad upper bound."""
    status, output = launch(tables("centralized"), "--data", str(partition)).end()
    assert status == 2
    assert "centralized trains only on client 0's: leave out --data" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "status", "line"),
    [
        (["--set", "method.mue=1"], 2, "unknown key 'mue' in [method]; fedprox has: mu"),
        (["--data", "nowhere"], 1, "--data nowhere holds no client directory 0"),
        (["--hosts", "0"], 2, "Invalid value for '--hosts'"),
        (["--set", "data.name='femnist'", "--set", "data.root='/nowhere'"], 1, "femnist"),
        (["--set", "data.name=nothere"], 2, "'nothere' is not known"),
        (["--set", "scenario.tasks=[1, 2]"], 2, "tasks lists 2 numbers for 3 clients"),
        (["--set", "schedule.clients=500"], 2, "use fewer clients"),
        (["--set", "compression.up=int8", "--set", "method.name=local"], 2, "[compression]"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(more, status, line, launch):
    if os.environ.get("FEDTIDE_DATA") and "data.name='femnist'" in more:
        pytest.skip("the real data set is at hand")
    run = launch(SHORT, *more)
    found, output = run.end()
    assert found == status, output
    said = [text for text in output.splitlines() if not text.startswith("╰")]  # the end of a box
    assert line in said[-1]
    assert "Traceback" not in output
    assert not run.out.exists()


def test_data_that_cannot_be_dealt_out_leave_nothing(launch):
    """So the same command is told the same the second time."""
    for _ in range(2):
        run = launch(SHORT, "--set", "data.name='emnist'")
        status, output = run.end()
        assert status in (1, 2), output
        assert "emnist" in output.splitlines()[-1]
        assert not run.out.exists()


def test_sigterm_drains_a_launched_run(launch, whole_run, steer):
    (steer / "aggregate-3").touch()
    run = launch(LONG, "--json", "--log-level", "debug", "--dashboard", "0")
    reached(steer / "aggregate-3.reached")
    page = re.search(r"live page: (http://127\.0\.0\.1:\d+/)", run.log("server"))
    assert page

    def client_1_waits() -> bool:
        with urllib.request.urlopen(page[1] + "state.json", timeout=10) as answer:
            state = json.load(answer)
        assert (state["interactions"], state["finished"]) == (6, False)
        return state["interaction"] == 2 and state["clients"]["1"]["phase"] == "waits"

    until(client_1_waits, "the page does not tell that client 1 waits")
    family = run.family()
    server = next(p for p in family if p.name() == "fedsrv-serve")
    run.process.send_signal(signal.SIGTERM)
    until(lambda: "stopping: clients have" in run.log("server"), "it does not stop")
    server.kill()  # it hangs in the method: what a supervisor does when its patience is over
    status, output = run.end()
    assert status == 128 + signal.SIGTERM, output
    *objects, last = output.splitlines()
    assert last == f"stopped as asked; add --resume to continue the run in {run.out}"
    kinds = {json.loads(line)["kind"] for line in objects}
    assert {"listening", "dashboard", "joined", "order", "commit", "draining"} <= kinds
    assert "launcher" in kinds
    assert gone(family)
    status, output = launch(LONG, "--resume", "--quiet").end()
    assert (status, output) == (0, "")
    alone = whole_run(LONG, run.out / "data", evaluator=True).summary
    assert summary_of(run.out)["state_sha256"] == alone["state_sha256"]


def test_sigterm_to_every_process_stops_a_run_without_a_wait(launch, steer):
    """As Slurm and systemd send it. The coordinator does not think that clients are at work."""
    (steer / "train-0-1").touch()
    run = launch(LONG, "--hosts", "1")
    reached(steer / "train-0-1.reached")
    for process in (psutil.Process(run.process.pid), *run.family()):
        process.send_signal(signal.SIGTERM)
    status, output = run.end()
    assert status == 128 + signal.SIGTERM, output
    assert {f"client {client} left: stopped" in output for client in range(3)} == {True}
    assert "waiting for client" not in run.log("server").partition("stopping: ")[2]
    assert "error" not in output
