"""Where the runs of a sweep go; jobs of Slurm are processes here, by stand-ins for its commands."""

from __future__ import annotations

import importlib.util
import json
import os
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from fedmodels.errors import ConfigError, RunFailed
from fedplugins.studies import slurm
from fedplugins.studies.plan import Cell, PlannedRun, Sweep
from fedplugins.studies.slurm import slurm_jobs
from fedplugins.studies.sweeping import place_of, run_sweep
from tests.conftest import TABLES

NEEDS_SUBMITIT = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None,
    reason="needs submitit: pip install 'fedtide[slurm]'",
)


@pytest.mark.parametrize(
    ("on", "jobs", "given", "line"),
    [
        (None, 1, ["num_cpus=1"], "--resource needs --on ray or --on slurm"),
        ("ray", None, ["num_cpus"], r"--resource 'num_cpus' is not KEY=VALUE"),
        ("ray", 2, [], "--jobs does not go with --on ray"),
        ("rya", None, [], "--on 'rya' is neither slurm, ray nor ray://HEAD:PORT"),
        ("ray://head", None, [], "--on ray:// 'head' is not HOST:PORT"),
    ],
)
def test_options_that_do_not_go_together_are_refused(on, jobs, given, line, tmp_path):
    with pytest.raises(ConfigError, match=line), place_of(on, jobs, given, tmp_path, print):
        pass


@pytest.mark.parametrize(("on", "extra"), [("ray", "ray"), ("slurm", "slurm")])
def test_a_missing_extra_is_one_line(on, extra, tmp_path, monkeypatch):
    def missing(name: str) -> None:
        raise ImportError

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("importlib.import_module", missing)
    with (
        pytest.raises(ConfigError, match="needs a package more: pip install '"),
        place_of(on, None, [], tmp_path, print),
    ):
        pass


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Return a sweep of one method with two seeds, a round each."""
    tables = {**TABLES, "schedule": {**TABLES["schedule"], "rounds": 1}}
    (tmp_path / "preset.toml").write_text(tomli_w.dumps(tables))
    file = {"preset": "preset.toml", "methods": {"FedAvg": "fedavg"}, "seeds": [0, 1]}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps({**file, "columns": {"A": "metrics.a_loc"}}))
    return Sweep.read(tmp_path / "sweep.toml")


class Stopped(BaseException):
    """Takes the place of Ctrl-C."""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put commands before Slurm's that start jobs as processes here; return where they write.

    ``calls`` has a line for each command, and ``queue`` is what squeue says.
    """
    monkeypatch.setattr(slurm, "SLURM_ASK_S", (0.0, 0.0))
    monkeypatch.setattr(slurm, "JOBS_LOOK_S", 0.05)
    here = tmp_path / "slurm"
    here.mkdir()
    scripts = {
        "scancel": "",
        "squeue": f"cat {here}/queue",
        "srun": 'while [[ $1 = -* ]]; do [ "$1" = --unbuffered ] || shift; shift; done; "$@"',
        "sbatch": f"""
            job=$(grep -c ^sbatch {here}/calls)
            last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
            for task in $(seq 0 "${{last:-0}}"); do
                export SLURM_JOB_ID=$job
                [ -z "$last" ] || export SLURM_ARRAY_JOB_ID=$job SLURM_ARRAY_TASK_ID=$task
                [ -e {here}/starts-nothing ] || (bash "$1" >> {here}/log 2>&1 </dev/null &)
            done
            echo Submitted batch job $job""",
    }
    for name, script in scripts.items():
        text = f'#!/bin/bash\necho {name} "$@" >> {here}/calls\n{textwrap.dedent(script)}\n'
        (here / name).write_text(text)
        (here / name).chmod(0o755)
    (here / "queue").touch()
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    return here


@NEEDS_SUBMITIT
@pytest.mark.loopback
@pytest.mark.timeout(300)
def test_a_sweep_under_slurm_submits_what_is_not_finished(sweep, tmp_path, fake):
    """What is finished is not submitted again."""
    out, said = tmp_path / "out", list[str]()
    (fake / "queue").write_text("1|RUNNING|None\n")
    run_sweep(sweep, out, on="slurm", say=said.append, seeds=[0])
    submitted = [line.partition(" is job ")[0] for line in said if " is job " in line]
    assert submitted == ["fedavg-seed0"]
    assert json.loads((out / "fedavg-seed0" / "summary.json").read_text())["rounds"] == 1
    assert "$ fedsrv launch " in (fake / "log").read_text()
    assert any(line.startswith("| | A |") for line in said)

    def stop(line: str) -> None:
        if " is job " in line:
            raise Stopped(line)

    with pytest.raises(Stopped, match=r"^fedavg-seed1 is job 2 "):
        run_sweep(sweep, out, on="slurm", say=stop)
    assert (out / "data-seed1").is_dir()


@NEEDS_SUBMITIT
def test_slurm_gets_the_resources_and_keeps_no_job_of_a_sweep_that_ended(sweep, tmp_path, fake):
    """An array of the seeds; and nothing that was submitted is left when the sweep ends."""
    (fake / "starts-nothing").touch()

    def stop(line: str) -> None:
        if " is job " in line:
            raise Stopped

    resources = ["slurm_partition=gpu", "gpus_per_node=1", "mem_gb=16", "timeout_min=90"]
    resources += ["slurm_reservation=night"]
    with pytest.raises(Stopped):
        run_sweep(sweep, tmp_path / "out", on="slurm", jobs=8, resources=resources, say=stop)
    (script,) = (tmp_path / "out" / "slurm").glob("*_submission.sh")
    lines = script.read_text().splitlines()
    assert {
        "#SBATCH --array=0-1%2",
        "#SBATCH --job-name=fedtide",
        "#SBATCH --partition=gpu",
        "#SBATCH --gpus-per-node=1",
        "#SBATCH --mem=16GB",
        "#SBATCH --time=90",
        "#SBATCH --requeue",
        "#SBATCH --reservation=night",
    } <= set(lines)
    calls = (fake / "calls").read_text().splitlines()
    assert [line.split()[0] for line in calls] == ["squeue", "sbatch", "scancel"]
    assert calls[-1] == "scancel 1_0 1_1"


def a_run(tmp_path: Path) -> PlannedRun:
    return PlannedRun(Cell("", "one"), 0, "", tmp_path / "one-seed0", tmp_path / "data", False)


def followed(tmp_path: Path, fake: Path, *states: str) -> tuple[list[str], list[str]]:
    """Submit one run whose jobs never start; return its outcome, and what is said.

    Args:
        tmp_path: for all files.
        fake: of the commands.
        states: what squeue says, one after the other, and the last one from then on.
    """
    (fake / "starts-nothing").touch()
    left, said = list(states), list[str]()

    def asks(command: str, *words: str) -> Any:
        if command == "squeue":
            state = left.pop(0) if len(left) > 1 else left[0]
            return SimpleNamespace(returncode=state == "?", stdout=state, stderr="it is away\nno")
        return answer(command, *words)

    answer = slurm._answer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "_answer", asks)
        with slurm_jobs(tmp_path / "jobs", None, {}, said.append) as each:
            ended = list(each(lambda run, say: "", [a_run(tmp_path)]))
    return [failure for _, failure in ended], said[1:]


@NEEDS_SUBMITIT
@pytest.mark.parametrize(
    ("states", "why"),
    [
        (["", "1|FAILED|NonZeroExitCode"], "job 1 ended as FAILED"),
        (["", "1|RUNNING|None", "1|CANCELLED|None"], "job 1 ended as CANCELLED"),
        (["", "1|COMPLETED|None"], "job 1 ended as COMPLETED"),
        (["", "1|RUNNING|None", "2|RUNNING|None"], "job 1 is not known to Slurm any more"),
        (["", ""], "job 1 is not known to Slurm any more"),
        (["", "1|RUNNING|None", "1|FAILED|None", "1|RUNNING|None", "1|TIMEOUT|TimeLimit"], "4"),
    ],
)
def test_a_job_that_ends_without_a_result_is_one_line(states, why, tmp_path, fake):
    """Without accounting, and not at the first look: a result may come late to a shared disk."""
    if why == "4":  # each of the four jobs of one run
        states[-1] = "\n".join(f"{job}|TIMEOUT|TimeLimit" for job in range(1, 5))
        why = "job 4 ended as TIMEOUT"
    (line,), said = followed(tmp_path, fake, *states)
    assert line.startswith(f"one-seed0 failed: {why} (see {tmp_path}/jobs/")
    expected = [
        f"one-seed0 continues as job {job + 1}: job {job} ended as TIMEOUT" for job in (1, 2, 3)
    ]
    assert said == (expected if "TIMEOUT" in why else [])


@NEEDS_SUBMITIT
def test_a_controller_that_is_away_is_waited_for_and_named_once(tmp_path, fake):
    with pytest.raises(RunFailed, match=r"^--on slurm: Slurm's controller does not answer: it is"):
        followed(tmp_path, fake, "?")
    _, said = followed(tmp_path, fake, "", "?", "?", "1|RUNNING|", "?", "1|FAILED|")
    line = "Slurm's controller does not answer: it is away; the sweep waits for it, and the jobs"
    assert said == [f"{line} run on"] * 2


@NEEDS_SUBMITIT
def test_why_a_job_does_not_start_is_said_once(tmp_path, fake):
    held = "1|PENDING|launch failed requeued held"
    _, said = followed(
        tmp_path, fake, "", "1|PENDING|Priority", "1|RUNNING|None", held, held, "1|CANCELLED|None"
    )
    assert said == [
        "one-seed0: Slurm has queued job 1 again; its run resumes",
        "job 1 waits in Slurm's queue: launch failed requeued held",
    ]


@NEEDS_SUBMITIT
def test_what_sbatch_says_is_one_line(tmp_path, fake, capfd):
    (fake / "sbatch").write_text("#!/bin/sh\necho sbatch: error: no such\necho two >&2\nexit 1\n")
    with pytest.raises(RunFailed, match=r"^sbatch took no job: two$"):
        followed(tmp_path, fake, "")
    assert capfd.readouterr() == ("", "")


@NEEDS_SUBMITIT
@pytest.mark.parametrize(
    ("there", "given", "line"),
    [
        (True, {"num_cpu": 1}, "--resource: .*num_cpu"),
        (True, {"timeout_min": "long"}, "--resource: .*timeout_min"),
        (False, {}, "--on slurm: .*on a slurm cluster"),
    ],
)
def test_what_slurm_does_not_take_is_one_line(there, given, line, tmp_path, fake, monkeypatch):
    if not there:
        monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=line), slurm_jobs(tmp_path, None, given, print):
        pass
