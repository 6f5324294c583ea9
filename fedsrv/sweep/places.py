"""Where the runs of a sweep go: this machine, a Ray cluster, or Slurm.

A place is a context. In it, ``each(call, runs)`` calls a function for each of several runs, and
yields the results in the order of the runs. The machines of a cluster share the sweep's directory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError, RunFailed
from fedsrv.ray_cluster import RAY, connected
from fedsrv.sweep.plan import PlannedRun

Say = Callable[[str], None]
Call = Callable[[PlannedRun, Say], str]
"""Runs one run to its end; returns why it failed, or an empty text."""
Each = Callable[[Call, Sequence[PlannedRun]], Iterable[str]]
Resources = Mapping[str, str | int | float]
SLURM = "slurm"
SLURM_MINUTES = 24 * 60
"""Time of one run under Slurm unless resources say ``timeout_min``."""


def place_of(
    on: str | None, jobs: int | None, given: Sequence[str], out: Path, say: Say
) -> AbstractContextManager[Each]:
    """Return the place that options of ``fedsrv sweep`` name.

    Args:
        on: ``ray``, ``ray://HEAD:PORT`` or ``slurm``; this machine unless given.
        jobs: runs at a time.
        given: what one run takes of a cluster, as ``KEY=VALUE``.
        out: the sweep's directory.
        say: told what is run.

    Raises:
        ConfigError: the options do not go together.
    """
    resources = dict(map(_resource, given))
    if on is None:
        if resources:
            raise ConfigError("--resource needs --on ray or --on slurm")
        return this_machine(jobs or 1, say)
    if on == SLURM:
        return slurm_jobs(out / "slurm", jobs, resources, say)
    if not on.startswith(RAY):
        raise ConfigError(f"--on {on!r} is neither slurm, ray nor ray://HEAD:PORT")
    if jobs is not None:
        raise ConfigError("--jobs does not go with --on ray, which runs as many as there is room")
    return ray_tasks(on, resources, say)


def _resource(text: str) -> tuple[str, str | int | float]:
    """Return KEY and VALUE of ``KEY=VALUE``, as a number where it is one."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--resource {text!r} is not KEY=VALUE, such as num_cpus=2")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value


@contextmanager
def this_machine(jobs: int, say: Say) -> Iterator[Each]:
    """Run ``jobs`` runs at a time on this machine."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield lambda call, runs: pool.map(lambda run: call(run, say), runs)
        except BaseException:  # Ctrl-C has ended the runs under way; no further one begins
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def ray_tasks(place: str, resources: Resources, say: Say) -> Iterator[Each]:
    """Run each as a task of a Ray cluster; a task waits until the cluster has room for it.

    A task whose node dies is started again elsewhere, and resumes its run.

    Raises:
        ConfigError: Ray is not installed, or knows no such resource.
        RunFailed: the cluster cannot be reached.
    """
    with connected(place) as ray:
        try:
            remote = ray.remote(**{"max_retries": 3, **resources})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--resource: {error}") from None

        def each(call: Call, runs: Sequence[PlannedRun]) -> Iterator[str]:
            task = remote(_called)
            for run, ref in [(run, task.remote(call, run)) for run in runs]:
                say(f"{run.directory.name} is a task of {place}")
                try:
                    yield ray.get(ref)
                except ray.exceptions.RayError as error:
                    yield f"{run.directory.name} failed: {_in_a_line(error)}"

        yield each


@contextmanager
def slurm_jobs(
    folder: Path, jobs: int | None, resources: Resources, say: Say, cluster: str = SLURM
) -> Iterator[Each]:
    """Run each as a job of a Slurm array; a run that is preempted resumes.

    Args:
        folder: for batch scripts and logs.
        jobs: how many of an array run at a time; as many as Slurm allows unless given.
        resources: as ``submitit.AutoExecutor.update_parameters`` takes them.
        say: told what is run.
        cluster: ``local`` runs jobs as processes here, for tests.

    Raises:
        ConfigError: submitit is not installed or knows no such resource, or this is no machine
            that submits jobs.
    """
    try:
        submitit: Any = importlib.import_module("submitit")
    except ImportError:
        raise ConfigError("--on slurm needs a package more: pip install 'fedtide[slurm]'") from None
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster)
        defaults: dict[str, Any] = {"name": "fedtide", "timeout_min": SLURM_MINUTES}
        if jobs is not None:
            defaults["slurm_array_parallelism"] = jobs
        executor.update_parameters(**{**defaults, **resources})
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"--resource: {_in_a_line(error)}") from None
    except RuntimeError as error:
        raise ConfigError(f"--on slurm: {_in_a_line(error)}") from None
    submitted: list[Any] = []

    def each(call: Call, runs: Sequence[PlannedRun]) -> Iterator[str]:
        try:
            array = executor.map_array(SlurmJob(call), runs) if runs else []
        except submitit.core.utils.FailedJobError as error:
            raise RunFailed(f"sbatch took no job: {_in_a_line(error)}") from None
        submitted.extend(array)
        for run, job in zip(runs, array, strict=True):
            say(f"{run.directory.name} is job {job.job_id} (logs in {folder})")
        for run, job in zip(runs, array, strict=True):
            try:
                yield job.result()
            except (
                submitit.core.utils.FailedJobError,
                submitit.core.utils.UncompletedJobError,
            ) as e:
                yield f"{run.directory.name} failed: {_in_a_line(e)} (see {job.paths.stderr})"

    try:
        yield each
    except BaseException:  # Ctrl-C: what waits or runs is not left behind
        for job in submitted:
            job.cancel(check=False)
        raise


@dataclass(frozen=True)
class SlurmJob:
    """A call as submitit makes it."""

    call: Call

    def __call__(self, run: PlannedRun) -> str:
        """Run one to its end."""
        return _called(self.call, run)

    def checkpoint(self, run: PlannedRun) -> Any:
        """Return what Slurm is to run after it takes the node away: the same run, which resumes."""
        return importlib.import_module("submitit").helpers.DelayedSubmission(self, run)


def _called(call: Call, run: PlannedRun) -> str:
    """Make a call on a cluster; what it says goes to the job's own log."""
    return call(run, print)


def _in_a_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__
