"""Runs of a queue, served one after the other, and a site that stays for all of them."""

from __future__ import annotations

import os
import signal

import pytest

from fedsrv.run_queue import runs_of, submit
from tests.integration.conftest import tables
from tests.integration.harness import summary_of, until

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
    assert "joined" not in served.output().partition("0003-other: begins")[2]
    assert len([*(tmp_path / "states").glob("*/0")]) == 2
    for process in (site, served):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
