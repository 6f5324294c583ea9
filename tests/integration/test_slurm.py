"""Sweeps under a real Slurm, whose jobs are taken away from them in every way."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedmodels.facts.resolution import experiment_of
from fedplugins.studies import slurm
from fedplugins.studies.plan import Cell, PlannedRun
from fedplugins.studies.slurm import slurm_jobs
from fedtide.inprocess import run_in_process
from tests.integration.conftest import tables
from tests.integration.harness import (
    PATH,
    environment,
    reached,
    summary_of,
    until,
    write_config,
)
from tests.integration.slurm_node import SlurmNode, missing, wait_for_a_word

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        bool(missing()), reason=f"needs Slurm: install slurm-wlm and munge; missing: {missing()}"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("submitit") is None,
        reason="needs submitit: pip install 'fedtide[slurm]'",
    ),
]


@pytest.fixture(scope="module")
def node() -> Iterator[SlurmNode]:
    found = SlurmNode()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _commands(node: SlurmNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the commands of this Slurm before others; what the jobs import is found as well."""
    monkeypatch.setenv("PATH", f"{node.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setattr(slurm, "SLURM_ASK_S", (0.2, 0.5))
    monkeypatch.setattr(slurm, "JOBS_LOOK_S", 0.1)


class Swept:
    """One run, followed in a thread."""

    def __init__(self, node: SlurmNode, place: Path, **resources: str | int) -> None:
        self.node, self.place, self.said = node, place, list[str]()
        self.directory = place / "one-seed0"
        run = PlannedRun(Cell("", "one"), 0, "", self.directory, place / "data", False)

        def follow() -> None:
            with slurm_jobs(place / "slurm", None, resources, self.said.append) as each:
                self.outcome = [failure for _, failure in each(wait_for_a_word, [run])]

        self._thread = threading.Thread(target=follow)
        self._thread.start()
        self.begun(1)

    def begun(self, times: int) -> None:
        """Wait until the run has begun so many times."""
        file = self.directory / "begun"
        until(lambda: file.exists() and len(file.read_text()) == times, f"{times} beginnings")

    @property
    def job(self) -> str:
        """The job that runs it now."""
        return re.findall(r" as job (\d+)|is job (\d+)", "\n".join(self.said))[-1][
            -1 if len(self.said) == 1 else 0
        ]

    def end(self, answers: bool = True) -> list[str]:
        """Let the run end; return the sweep's outcome."""
        if answers:
            (self.directory / "answer").touch()
        self._thread.join(60)
        assert not self._thread.is_alive(), self.said
        return self.outcome


def fail_its_node(node: SlurmNode, job: str) -> None:
    node.fail()


def preempt(node: SlurmNode, job: str) -> None:
    node.tell("sbatch", "--partition=urgent", "--exclusive", "--wrap=true", "--output=/dev/null")


def signal_its_time_limit(node: SlurmNode, job: str) -> None:
    node.tell("scancel", "--signal=USR2", job)


TAKING: dict[str, tuple[Callable[[SlurmNode, str], None], dict[str, Any]]] = {
    "its node fails": (fail_its_node, {}),
    "preempted": (preempt, {"slurm_exclusive": "user"}),
    "near its time limit": (signal_its_time_limit, {}),
}


@pytest.mark.parametrize("how", TAKING)
def test_a_job_that_is_taken_away_is_followed_to_its_end(how, node, tmp_path):
    """Slurm queues it again, and the sweep waits for it."""
    take, resources = TAKING[how]
    swept = Swept(node, tmp_path, **resources)
    job = swept.job
    take(node, job)
    until(lambda: node.state(job) == "PENDING", "it is queued")
    node.start_soon(job)
    swept.begun(2)
    assert swept.end() == [""]


def test_a_sweep_follows_a_requeued_run_to_the_same_digest(node, tmp_path, steer):
    """SIGTERM stops the run; the job's next start resumes it, and the sweep says what it is."""
    held = tables("held", schedule={"rounds": 3, "clients": 3})
    write_config(tmp_path / "preset.toml", experiment_of(held))
    file = {"preset": "preset.toml", "methods": {"held": "held"}, "seeds": [3]}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(file))
    for leftover in steer.iterdir():
        leftover.unlink()
    (steer / "train-0-3").touch()
    sweep = subprocess.Popen(
        [sys.executable, "-m", "fedsrv", "sweep", "sweep.toml", "--out", "out", "--on", "slurm"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=environment(HELD_DIR=str(steer)),
    )  # fmt: skip
    reached(steer / "train-0-3.reached")
    (job,) = node.tell("squeue", "-h", "-o", "%i").split()
    node.tell("scontrol", "requeue", job)
    log = tmp_path / "out" / "held-seed3.log"
    until(lambda: "stopping: clients have" in log.read_text(), "SIGTERM came")
    (steer / "train-0-3").unlink()
    until(lambda: node.state(job) == "PENDING", "it is queued")
    node.start_soon(job)
    said, errors = sweep.communicate(timeout=300)
    assert (sweep.returncode, errors) == (0, ""), said
    assert "stopped as asked; add --resume to continue" in log.read_text()
    alone = run_in_process(held, tmp_path / "out" / "data-seed3", tmp_path / "alone")
    swept = summary_of(tmp_path / "out" / "held-seed3")
    assert (swept["state_sha256"], swept["metrics"]) == (alone["state_sha256"], alone["metrics"])


def test_a_job_that_slurm_ends_for_good_is_submitted_again(node, tmp_path):
    """Where preemption cancels, the run goes on in another job."""
    swept = Swept(node, tmp_path, slurm_partition="spot", slurm_exclusive="user")
    preempt(node, swept.job)
    swept.begun(2)
    assert swept.end() == [""]
    assert any(
        re.search(r"continues as job \d+: job \d+ ended as PREEMPTED", x) for x in swept.said
    )


def test_a_cancelled_job_ends_its_run_in_one_line(node, tmp_path):
    swept = Swept(node, tmp_path)
    node.tell("scancel", job := swept.job)
    (line,) = swept.end(answers=False)
    assert re.fullmatch(rf"one-seed0 failed: job {job} ended as CANCELLED \(see .*log.err\)", line)
