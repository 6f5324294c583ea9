"""The runs of a sweep on a Ray cluster: each waits until a node has room for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError, RunFailed
from fedmodels.host.processes import Box, next_said
from fedplugins.studies.execution import Call, Each, Grave, Resources, RunCommand, Say
from fedplugins.studies.plan import Cell, PlannedRun
from fedsrv.ray.ray_cluster import RayCluster, lacking

MAX_STARTS = 4
"""How often one run is started at most, where its node dies."""


@contextmanager
def ray_runs(place: str, out: Path, resources: Resources, say: Say) -> Iterator[Each]:
    """Run each on a node of a Ray cluster; a run whose node dies resumes on another.

    All nodes see the sweep's directory. Resources are as ``ray.remote`` takes them.

    Raises:
        ConfigError: Ray is not installed, knows no such resource, or no node has so much of it.
        RunFailed: the cluster cannot be reached, or is gone.
    """
    box, log = Box(), out / "ray.log"
    takes = {"num_cpus": 1, **resources}
    cluster = RayCluster(place, log, "runs", box)
    try:
        if lack := lacking(takes, cluster.nodes):
            raise ConfigError(f"--resource: no node of the Ray cluster has {lack}")

        def each(call: Call, runs: Sequence[PlannedRun]) -> Iterator[tuple[PlannedRun, str]]:
            assert isinstance(call, RunCommand), "its fields travel, not itself"
            left, starts = {run.directory.name: run for run in runs}, Counter[str]()

            def start(name: str) -> None:
                starts[name] += 1
                given = {"call": asdict(call), "run": to_json(left[name])}
                cluster.start(name, remote_run, given, takes, log)

            for name in left:
                start(name)
            while left:
                said = next_said(box)
                assert said is not None, "without a limit it waits until something is said"
                if said.status is not None:
                    raise RunFailed(
                        f"the process that talks to Ray has ended with {said.status} (see "
                        f"{log}); the same command continues the sweep"
                    )
                fact = json.loads(said.line)
                name = fact["id"]
                if "refused" in fact:
                    raise ConfigError(f"--resource: {fact['refused']}")
                if "node" in fact:
                    say(f"{name} runs on {fact['node']}, of {place}")
                elif "waits" in fact:
                    say(Grave(f"{name} waits: {fact['waits']}"))
                elif "failure" in fact:
                    yield left.pop(name), fact["failure"]
                elif starts[name] < MAX_STARTS:
                    say(Grave(f"{name} is started again: {fact['why']}"))
                    start(name)
                else:
                    yield left.pop(name), f"{name} failed: {fact['why']} (see {log})"

        yield each
    finally:
        cluster.end()


def to_json(run: PlannedRun) -> dict[str, Any]:
    """Return a run for JSON."""
    return {**asdict(run), "directory": str(run.directory), "data": str(run.data)}


def from_json(facts: dict[str, Any]) -> PlannedRun:
    """Return the run that :func:`to_json` took."""
    cell, directory, data = Cell(**facts["cell"]), Path(facts["directory"]), Path(facts["data"])
    return PlannedRun(**{**facts, "cell": cell, "directory": directory, "data": data})


def remote_run(given: dict[str, Any]) -> Iterator[str | dict[str, Any]]:
    """Run a run on a node; yield what it says, and why it failed, or nothing."""
    said = list[str]()
    failure = RunCommand(**given["call"])(from_json(given["run"]), said.append)
    yield from (f"{line}\n" for line in said)
    yield {"failure": failure}
