"""Runs of a queue, served one after the other, and a site that stays for all of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from fedplugins.queues.run_queue import QueuedRun, runs_of, submit, withdraw
from fedsrv.identity.certificates import Authority, init_authority, issue, revoke
from tests.faults.ground import free_port
from tests.integration.conftest import tables
from tests.integration.harness import Client, Relay, reached, summary_of, until
from tests.integration.test_tls_run import client_options, server_options

pytestmark = pytest.mark.loopback


def test_a_site_stays_for_the_runs_of_a_queue(loopback, tmp_path):
    """Each is the run that one process computes; what the site does not allow waits for it."""
    runs = [
        loopback(tables("fedavg", schedule={"rounds": n, "clients": 3}), f"{n}") for n in (1, 2)
    ]
    queue = tmp_path / "queue"
    for run in runs:
        submit(run.experiment, queue, "wards")
    submit(loopback(tables("fedprox"), "3").experiment, queue, "other")
    forks, place = runs[0].fork_server, f"unix:{tmp_path}/socket"
    served = forks.begun(tmp_path, "fedsrv", "serve", queue, "--listen", place)
    allowed = ("--allow-method", "fedavg", "--device", "cpu", "--state-dir", tmp_path / "states")
    words = ("join", "--stay", "--client-id", "0-2", "--server", place, *allowed)
    site = forks.begun(tmp_path, "fedcli", *words, "--data", runs[0].partition)
    until(lambda: "this site stays out of it" in site.output(), "the third run was looked at")
    assert [run.state for run in runs_of(queue)] == ["over", "over", "running"]
    for queued, run in zip(runs_of(queue), runs, strict=False):
        assert summary_of(queued.run)["state_sha256"] == run.alone["state_sha256"]
    assert "0003-other: client" not in served.output()
    assert len([*(tmp_path / "states").glob("*/0")]) == 2
    for process in (site, served):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM


def test_a_relay_stays_for_the_runs_of_a_queue(loopback, tmp_path, steer):
    """It is killed between two runs and in a run, which then is withdrawn; the others end."""
    schedule = {"rounds": 1, "clients": 3}
    runs = [
        loopback(tables(method, schedule=schedule), method)
        for method in ("fedavg", "held", "held-whole")  # what travels differs
    ]
    queue, place, log = tmp_path / "queue", f"unix:{tmp_path}/socket", tmp_path / "relay.log"
    names = [submit(run.experiment, queue, "wards").place.name for run in runs]
    (steer / "train-1-1").touch()
    forks = runs[0].fork_server
    served = forks.begun(tmp_path, "fedsrv", "serve", queue, "--listen", place)
    relay = Relay(forks, log, place, "0-2", "--stay")
    site = forks.begun(
        tmp_path, "fedcli", "join", "--stay", "--client-id", "0-2", "--device", "cpu",
        "--server", f"127.0.0.1:{relay.port}", "--data", runs[0].partition,
    )  # fmt: skip

    def killed() -> Relay:
        relay.kill()
        relay.process.close()
        return Relay(forks, log, place, "0-2", "--stay", port=relay.port)

    until(lambda: runs_of(queue)[0].state == "over", "the first run")
    relay = killed()
    reached(steer / "train-1-1.reached")
    relay = killed()
    until(lambda: "client 1 joined" in relay.output().rpartition("waiting for")[2], "all again")
    withdraw(queue, names[1])
    until(lambda: f"{names[1]}: was withdrawn" in served.output(), "the second run")
    (steer / "train-1-1").unlink()
    until(lambda: runs_of(queue)[2].state == "over", "the third run")
    assert [run.state for run in runs_of(queue)] == ["over", "withdrawn", "over"]
    for n in (0, 2):
        found = summary_of(runs_of(queue)[n].run)
        assert found["state_sha256"] == runs[n].alone["state_sha256"]
        assert found["bytes"]["up"] < runs[n].alone["bytes"]["up"], "sums went up"
    assert re.search("serves? no run there any more|is not served any more", relay.output())
    for process in (site, relay.process, served):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    relay.process.close()


def test_runs_side_by_side_are_killed_and_go_on_each_by_itself(loopback, tmp_path, steer):
    """The process of one, then the front, then all of it anew; each is the run of one process."""
    runs = [loopback(tables(method), method) for method in ("held", "held-whole")]
    queue, place = tmp_path / "queue", f"unix:{tmp_path}/socket"
    queue.mkdir()
    (steer / "train-1-1").touch()  # both wait in their second round
    forks = runs[0].fork_server

    def front() -> Client:
        words = ("serve", queue, "--listen", place, "--at-once", "2")
        return forks.begun(tmp_path, "fedsrv", *words)

    served = front()
    until(lambda: forks.typed(tmp_path, "fedsrv", "status", place)[0] == 0, "the front listens")
    for run in runs:
        words = ("submit", run.config, "--queue", place, "--name", run.experiment.method.name)
        assert forks.typed(tmp_path, "fedsrv", *words)[0] == 0
    site = forks.begun(
        tmp_path, "fedcli", "join", "--stay", "--client-id", "0-2", "--device", "cpu",
        "--server", place, "--data", runs[0].partition, "--state-dir", tmp_path / "states",
    )  # fmt: skip

    def lines(run: QueuedRun) -> int:
        rows = run.run / "rounds.jsonl"
        return len(rows.read_text().splitlines()) if rows.exists() else 0

    def both_stand_at(rows: int) -> bool:
        return all(lines(run) >= rows for run in runs_of(queue))

    until(lambda: both_stand_at(1), "the first commits")
    said = forks.typed(tmp_path, "fedsrv", "status", place)[1]
    assert f"0001-held: running at {place}.1" in said
    assert f"0002-held-whole: running at {place}.2" in said
    os.kill(_process_of(runs_of(queue)[0]), signal.SIGKILL)
    until(lambda: "0001-held: goes on" in served.output(), "the run goes on")
    assert "0002-held-whole: goes on" not in served.output()
    served.kill()
    served = front()
    (steer / "train-1-1").unlink()
    until(lambda: [run.state for run in runs_of(queue)] == ["over"] * 2, "both runs")
    for queued, run in zip(runs_of(queue), runs, strict=True):
        assert summary_of(queued.run)["state_sha256"] == run.alone["state_sha256"]
    for process in (site, served):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM


def _process_of(run: QueuedRun) -> int:
    """Return the process that serves a run, by the files that it holds open."""
    for place in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(file.readlink().is_relative_to(run.run) for file in place.iterdir()):
                return int(place.parent.name)
    raise AssertionError(f"nobody serves {run.place.name}")


def test_a_relay_that_stays_takes_up_new_certificates(loopback, tmp_path, steer):
    """Its own is revoked in a run and issued anew: the site behind it works on, and in the next."""
    schedule = {"rounds": 1, "clients": 3}
    runs = [loopback(tables(name, schedule=schedule), name) for name in ("held", "fedavg")]
    queue, log, certs = tmp_path / "queue", tmp_path / "relay.log", tmp_path / "certs"
    init_authority(certs)
    for identity in ("server", "relay:0-2", "0-2"):
        issue(certs, identity)
    lists = ["--tls-crl", certs / "crl.pem"]
    own = [certs / f"relay-0-2.{kind}" for kind in ("pem", "key")]
    issue(certs, "7")
    revoke(certs, "7")  # so that there is a list
    for run in runs:
        submit(run.experiment, queue, "wards")
    (steer / "train-1-1").touch()
    forks, place = runs[0].fork_server, f"127.0.0.1:{free_port()}"
    served = forks.begun(
        tmp_path, "fedsrv", "serve", queue, "--listen", place, *server_options(certs), *lists
    )
    below = ["--tls-cert", own[0], "--tls-key", own[1], "--tls-client-ca", certs / "ca.pem"]
    above = ["--up-ca", certs / "ca.pem", "--up-cert", own[0], "--up-key", own[1]]
    words = [*map(str, (*below, *above, *lists)), "--up-crl", str(certs / "crl.pem"), "--stay"]
    relay = Relay(forks, log, place, "0-2", *words)
    site = forks.begun(
        tmp_path, "fedcli", "join", "--stay", "--client-id", "0-2", "--device", "cpu",
        "--server", f"127.0.0.1:{relay.port}", "--data", runs[0].partition,
        *client_options(certs, "clients-0-2"), *lists,
    )  # fmt: skip
    reached(steer / "train-1-1.reached")
    serial = next(facts["serial"] for facts in Authority.read(certs).issued()
                  if facts["identity"] == "fedtide:relay:0-2")  # fmt: skip
    for path in own:
        path.rename(path.with_suffix(".old"))
    issue(certs, "relay:0-2")
    revoke(certs, serial)
    until(lambda: "was revoked on" in relay.output(), "the end of the old certificate")
    (steer / "train-1-1").unlink()
    until(lambda: [run.state for run in runs_of(queue)] == ["over", "over"], "both runs")
    for found, run in zip(runs_of(queue), runs, strict=True):
        assert summary_of(found.run)["state_sha256"] == run.alone["state_sha256"]
    for process in (site, relay.process, served):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    relay.process.close()
