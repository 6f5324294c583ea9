"""Where the runs of a sweep go: this machine, a Ray cluster, or Slurm.

A place is a context. In it, ``each(call, runs)`` calls a function for each of several runs, and
yields each result as it comes. The machines of a cluster share the sweep's directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from fedmodels.errors import ConfigError
from fedsrv.ray_cluster import RAY, address_in
from fedsrv.sweep.execution import Call, Each, Say
from fedsrv.sweep.plan import PlannedRun
from fedsrv.sweep.ray_runs import ray_runs
from fedsrv.sweep.slurm import slurm_jobs

SLURM = "slurm"


def place_of(
    on: str | None, jobs: int | None, given: Sequence[str], out: Path, say: Say
) -> AbstractContextManager[Each]:
    """Return the place that options of ``fedsrv sweep`` name.

    Args:
        on: ``ray``, ``ray://HEAD:PORT`` or ``slurm``; by default this machine.
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
    address_in(on)
    return ray_runs(on, out, resources, say)


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

        def each(call: Call, runs: Sequence[PlannedRun]) -> Iterator[tuple[PlannedRun, str]]:
            futures = {pool.submit(call, run, say): run for run in runs}
            for ended in as_completed(futures):
                yield futures[ended], ended.result()

        try:
            yield each
        except BaseException:  # Ctrl-C has ended the runs under way; no further one begins
            pool.shutdown(cancel_futures=True)
            raise
