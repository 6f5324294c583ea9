"""The runs of a sweep as jobs of Slurm, each followed to its end.

submitit writes the batch scripts and queues a job again that nears its time limit. Slurm queues a
job again that it preempts, that a user requeues, or whose node fails. A job that Slurm takes away
leaves no result: its next start resumes the run. The sweep asks ``squeue`` where a job is, which
needs no accounting.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError, RunFailed, pip_line
from fedmodels.host.machine import set_by_sigterm
from fedmodels.times import JOBS_LOOK_S, SLURM_ANSWER_S, SLURM_ASK_S
from fedplugins.studies.execution import Call, Each, Grave, Resources, Say
from fedplugins.studies.plan import PlannedRun

MINUTES = 24 * 60
"""Time of one run unless resources say ``timeout_min``."""
MAX_SUBMISSIONS = 4
"""How often one run is submitted at most, where Slurm takes its jobs away and queues none again."""
TAKEN_AWAY = {"BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "TIMEOUT"}
"""States of a job that ended through no fault of its run."""
ENDED = {*TAKEN_AWAY, "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "REVOKED"}
USUAL_REASONS = {"", "None", "BeginTime", "Cleaning", "JobArrayTaskLimit", "Priority", "Resources"}
"""Why a job waits in Slurm's queue, where nobody has to do anything about it."""


@contextmanager
def slurm_jobs(folder: Path, jobs: int | None, resources: Resources, say: Say) -> Iterator[Each]:
    """Run each as a job of a Slurm array; a run that is preempted resumes.

    Args:
        folder: for batch scripts and logs.
        jobs: how many of an array run at a time; by default as many as Slurm allows.
        resources: as ``submitit.AutoExecutor.update_parameters`` takes them; a further
            ``slurm_NAME`` is an option of ``sbatch``.
        say: told what is run.

    Raises:
        ConfigError: submitit is not installed or knows no such resource, or this is no machine
            that submits jobs.
        RunFailed: Slurm's controller does not answer.
    """
    executor, queue = _executor(folder, jobs, resources), Queue(say)
    if problem := queue.ask():
        raise RunFailed(f"--on slurm: {problem}")
    followed: list[SubmittedRun] = []

    def each(call: Call, runs: Sequence[PlannedRun]) -> Iterator[tuple[PlannedRun, str]]:
        array = _submitted(executor.map_array, call, runs) if runs else []
        left = [SubmittedRun(run, job) for run, job in zip(runs, array, strict=True)]
        followed.extend(left)
        for one in left:
            say(f"{one.run.directory.name} is job {one.job.job_id} (logs in {folder})")
        while left:
            queue.look([one for one in left if not one.has_result])
            for one in list(left):
                if one.is_taken_away and one.submissions < MAX_SUBMISSIONS:
                    before = f"job {one.job.job_id} ended as {one.state}"
                    one.begin_again(_submitted(executor.submit, call, one.run))
                    say(f"{one.run.directory.name} continues as job {one.job.job_id}: {before}")
                elif one.has_result or one.is_over:
                    left.remove(one)
                    yield one.run, one.failure()
            if left:
                time.sleep(JOBS_LOOK_S)

    try:
        yield each
    except BaseException:  # Ctrl-C: what waits or runs is not left behind
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _cancel([one.job.job_id for one in followed if not (one.has_result or one.is_over)])
        raise


def _executor(folder: Path, jobs: int | None, resources: Resources) -> Any:
    """Return what submits jobs."""
    try:
        submitit: Any = importlib.import_module("submitit")
    except ImportError:
        raise ConfigError(f"--on slurm needs a package more: {pip_line('slurm')}") from None
    given: dict[str, Any] = {"name": "fedtide", "timeout_min": MINUTES}
    if jobs is not None:
        given["slurm_array_parallelism"] = jobs
    options: dict[str, Any] = {"requeue": True}
    try:
        executor = submitit.AutoExecutor(folder, cluster="slurm")
        for name, value in {**given, **resources}.items():
            try:
                executor.update_parameters(**{name: value})
            except NameError:
                if not name.startswith("slurm_"):
                    raise
                options[name.removeprefix("slurm_").replace("_", "-")] = value
        executor.update_parameters(slurm_additional_parameters=options)
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"--resource: {_in_a_line(error)}") from None
    except RuntimeError as error:
        raise ConfigError(f"--on slurm: {_in_a_line(error)}") from None
    return executor


def _submitted(submit: Callable[..., Any], call: Call, runs: object) -> Any:
    """Submit one or several runs; RunFailed, with what ``sbatch`` prints, if Slurm takes none."""
    submitit: Any = importlib.import_module("submitit")
    try:
        with redirect_stderr(io.StringIO()):
            return submit(SlurmJob(call), runs)
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise RunFailed(f"sbatch took no job: {_in_a_line(error)}") from None


def _cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs; ``scancel`` passes over those that have ended meanwhile."""
    if jobs:
        _answer("scancel", *jobs)


def _answer(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm; one that is missing or takes too long has failed."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    try:
        return subprocess.run(
            [command, *words], capture_output=True, text=True, timeout=SLURM_ANSWER_S, env=plain
        )
    except subprocess.TimeoutExpired:
        why = f"{command} has no answer after {SLURM_ANSWER_S:.0f} s"
    except OSError as error:
        why = f"{command}: {error.strerror}"
    return subprocess.CompletedProcess(command, 1, "", why)


class SubmittedRun:
    """A run, and the job that runs it now."""

    def __init__(self, run: PlannedRun, job: Any) -> None:
        self.run, self.submissions = run, 0
        self.begin_again(job)

    def begin_again(self, job: Any) -> None:
        """Follow another job of the run."""
        self.job, self.state, self.reason = job, "", ""
        self.submissions += 1
        self._looks = 0

    def take(self, state: str, reason: str) -> None:
        """Take in what the controller says of the job; an empty state if it knows none."""
        self._looks = self._looks + 1 if state == self.state else 1
        self.state, self.reason = state, reason

    @property
    def has_result(self) -> bool:
        """Whether the job has left a result."""
        return bool(self.job.paths.result_pickle.exists())

    @property
    def is_over(self) -> bool:
        """Whether the job has ended without a result; its files may come late, and it may too."""
        return self._looks > 1 and (not self.state or self.state in ENDED)

    @property
    def is_taken_away(self) -> bool:
        """Whether Slurm has ended the job, and will not run it again."""
        return self.is_over and self.state in TAKEN_AWAY and not self.has_result

    def failure(self) -> str:
        """Return why the run failed, or nothing."""
        submitit: Any = importlib.import_module("submitit")
        name, log = self.run.directory.name, self.job.paths.stderr
        if not self.has_result:
            how = f"ended as {self.state}" if self.state else "is not known to Slurm any more"
            return f"{name} failed: job {self.job.job_id} {how} (see {log})"
        try:
            return str(self.job.result())
        except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as e:
            lines = [line for line in str(e).splitlines() if line.strip(" -")]
            errors = [line for line in lines if line.startswith("submitit.")]
            return f"{name} failed: {(errors or lines)[-1].strip()} (see {log})"


class Queue:
    """What Slurm's controller says of this user's jobs; it is asked ever more rarely."""

    def __init__(self, say: Say) -> None:
        self._say, self._jobs = say, dict[str, tuple[str, str]]()
        self._interval, self._next = SLURM_ASK_S[0], 0.0
        self._is_silent = False
        self._told: set[str] = set()

    def ask(self) -> str:
        """Ask for all jobs; return why there is no answer, or nothing."""
        options = ["--noheader", "--all", "--array", "--states=all", "--format=%i|%T|%r"]
        done = _answer("squeue", *options, f"--user={os.getuid()}")
        if done.returncode:
            said = done.stderr.strip().partition("\n")[0] or "it says nothing"
            return f"Slurm's controller does not answer: {said}"
        found = (line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") > 1)
        self._jobs = {job: (state, reason) for job, state, reason in found}
        return ""

    def look(self, followed: Sequence[SubmittedRun]) -> None:
        """Tell jobs how they are, if it is time to ask again."""
        if not followed or time.monotonic() < self._next:
            return
        problem = self.ask()
        self._next = time.monotonic() + self._interval
        self._interval = min(2 * self._interval, SLURM_ASK_S[1])
        if problem and not self._is_silent:
            self._say(Grave(f"{problem}; the sweep waits for it, and the jobs run on"))
        self._is_silent = bool(problem)
        if problem:
            return
        for one in followed:
            before = one.state
            one.take(*self._jobs.get(one.job.job_id, ("", "")))
            if one.state != before:
                self._interval = SLURM_ASK_S[0]
            if before == "RUNNING" and one.state == "PENDING":
                name = one.run.directory.name
                line = f"{name}: Slurm has queued job {one.job.job_id} again; its run resumes"
                self._say(Grave(line))
        self._tell_of_waits(followed)

    def _tell_of_waits(self, followed: Sequence[SubmittedRun]) -> None:
        """Say once for each job why it does not start, where that is not the queue alone."""
        waiting = defaultdict[str, list[str]](list)
        for one in followed:
            key = f"{one.job.job_id} {one.reason}"
            unusual = one.reason not in USUAL_REASONS and key not in self._told
            if one.state == "PENDING" and unusual:
                self._told.add(key)
                waiting[one.reason].append(one.job.job_id)
        for reason, jobs in waiting.items():
            some = ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
            who = f"job {some} waits" if len(jobs) == 1 else f"jobs {some} wait"
            self._say(Grave(f"{who} in Slurm's queue: {reason}"))


@dataclass(frozen=True)
class SlurmJob:
    """A call as submitit makes it, on a node."""

    call: Call

    def __call__(self, run: PlannedRun) -> str:
        """Run one to its end; leave no result if Slurm takes the job away before."""
        taken = set_by_sigterm()
        failure = self.call(run, print)
        if failure and taken.is_set():
            raise SystemExit(failure)
        return failure

    def checkpoint(self, run: PlannedRun) -> Any:
        """Return what Slurm is to run after it takes the node away: the same run, which resumes."""
        return importlib.import_module("submitit").helpers.DelayedSubmission(self, run)


def _in_a_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__
