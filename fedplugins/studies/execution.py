"""The runs of a sweep, as processes, resumed where they were interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from fedcli.hosts import PRELOADED
from fedmodels.errors import Interrupted, RunStopped, reason_of
from fedmodels.host import processes
from fedmodels.host.files import write_atomically
from fedmodels.host.processes import Program, end_with_parent
from fedmodels.host.warm import kept
from fedmodels.times import POLL_S
from fedplugins.studies.plan import PlannedRun
from fedsrv.state.run_directory import may_hold_a_run

Say = Callable[[str], None]
"""Is told a line; :class:`Grave` where ``--quiet`` says it, too."""
Call = Callable[[PlannedRun, Say], str]
"""Runs one run to its end; returns why it failed, or nothing."""
Each = Callable[[Call, Sequence[PlannedRun]], Iterable[tuple[PlannedRun, str]]]
"""Calls a function for each of several runs; yields runs as they end, and why they failed."""
Until = Callable[[], bool]
"""Tells whether a run has run long enough."""
Resources = Mapping[str, str | int | float]
"""What one run takes of a cluster."""


class Grave(str):
    """A line of a sweep on which somebody may have to act."""


def execute(
    runs: Sequence[PlannedRun],
    further: Sequence[str],
    refers: bool,
    each: Each,
    say: Say,
    ended_one: Callable[[PlannedRun], None],
) -> list[PlannedRun]:
    """Run to its end what is not finished; return what failed.

    Data are dealt out here first, once for each setting and seed. Where runs refer to the first
    row, the first row of each setting and seed goes before the others.

    Raises:
        Interrupted: Ctrl-C came.
    """
    left = [run for run in runs if not run.is_finished]
    firsts = {(run.cell.setting, run.seed): run for run in reversed(runs)}.values()
    leading = [run for run in left if not refers or run in firsts]
    others = [run for run in left if run not in leading]
    here = str(Path.cwd())
    try:
        deal_out(left, further, here, say)
        for group in (leading, others):
            for run, failure in each(RunCommand(further, here), group):
                if failure:
                    say(Grave(failure))
                ended_one(run)
    except KeyboardInterrupt:  # Ctrl-C has ended the runs under way, too; no further one begins
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise Interrupted("stopped; the same command continues the sweep") from None
    return [run for run in runs if not run.is_finished]


def deal_out(runs: Sequence[PlannedRun], further: Sequence[str], directory: str, say: Say) -> None:
    """Deal out each partition of these runs that is not there yet, on this machine."""
    for run in _dealers(runs, further):
        _deal_out(run, directory, say)


def _dealers(runs: Sequence[PlannedRun], further: Sequence[str]) -> list[PlannedRun]:
    """Return a run for each partition that is still to be made."""
    if any(option.partition("=")[0] == "--data" for option in further):
        return []
    shared = {run.data: run for run in runs if not run.own_data and not run.data.exists()}
    return list(shared.values())


def _deal_out(run: PlannedRun, directory: str, say: Say) -> None:
    """Write the partition that a run shares with others, on this machine.

    A run whose data are not there deals them out for itself, and says what is wrong with them.
    """
    data = run.data
    config, log = (data.with_name(data.name + kind) for kind in (".toml", ".log"))
    command = ["partition", str(config), "--no-picture", "--set", f"seed={run.seed}", "--out"]
    say(f"$ fedcli {' '.join(command)} {data}")
    try:
        copy = Path(mkdtemp(prefix=f".{data.name}-", dir=data.parent))
        try:
            write_atomically(config, run.config)
            if not _run([sys.executable, "-m", "fedcli", *command, str(copy)], log, directory):
                with suppress(OSError):  # another sweep was first
                    copy.rename(data)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    except OSError as error:
        why = reason_of(error)
        line = f"{data} cannot be written, so every run makes its own partition: {why}"
        say(Grave(line))


@dataclass(frozen=True)
class RunCommand:
    """The command that runs one run of a sweep, on whichever machine it is called."""

    further: Sequence[str]
    """Options of ``fedsrv launch``."""
    directory: str
    """From which relative paths go."""

    def __call__(self, run: PlannedRun, say: Say, until: Until | None = None) -> str:
        """Run it to its end, from where it is, or until then; return why it failed, or nothing."""
        out, data = run.directory, run.data
        options = ["--out", str(out), "--set", f"seed={run.seed}", *self.further]
        options += ["--resume"] if may_hold_a_run(out) else []
        options += ["--data", str(data)] if data.exists() and not run.own_data else []
        say(f"$ fedsrv launch {run.config_file} {' '.join(options)}")
        log = out.with_name(out.name + ".log")
        try:
            write_atomically(run.config_file, run.config)
            words = [sys.executable, "-m", "fedsrv", "launch", str(run.config_file), *options]
            status = _run(words, log, self.directory, until)
        except OSError as error:
            return f"{out.name} could not be started: {reason_of(error)}"
        if status in (Interrupted.exit_code, RunStopped.exit_code):
            return f"{out.name} was stopped"
        return f"{out.name} failed: {_last_line(log)} (see {log})" if status else ""


def _run(command: Sequence[str], log: Path, directory: str, until: Until | None = None) -> int:
    """Run a command whose words go into a log; return its status.

    One that has run long enough, as ``until`` tells, stops where it can be resumed.
    """
    with log.open("ab") as to_log:
        pipes: dict[str, Any] = {"stdout": to_log, "stderr": subprocess.STDOUT, "cwd": directory}
        process = _started(command, pipes)
        try:
            while process.poll() is None and not (until is not None and until()):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(None if until is None else POLL_S)
        finally:
            process.terminate()  # of one that has ended, this does nothing
            status = process.wait()
        return status


def _started(command: Sequence[str], pipes: Mapping[str, Any]) -> Program:
    """Start a command; as a fork where this process keeps one warm."""
    if processes.warm is not None and command[1] == "-m":
        with suppress(OSError):
            return processes.warm.begin(command[2], command[3:], os.environ, False, pipes)
    return subprocess.Popen(command, preexec_fn=partial(_begin, os.getpid()), **pipes)


@contextmanager
def warm_runs() -> Iterator[None]:
    """Have the runs of this machine begin as forks of a process that has imported torch.

    There are no threads yet.
    """
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # which forks inherit; see _begin
    try:
        with kept([*PRELOADED, "fedsrv.cli", "fedsrv.coordinator", "fedsrv.launch.launcher"]):
            signal.signal(signal.SIGUSR2, before)
            yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def _begin(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent dies: the run stops where it can be resumed.

    Slurm sends SIGUSR2 to every process of a job. It concerns the parent alone.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    end_with_parent(signal.SIGTERM, parent)


def _last_line(log: Path) -> str:
    lines = log.read_text("locale", "replace").split("\n")
    said = (line.strip("│╭╮╰╯─ ") for line in reversed(lines))  # a usage error stands in a box
    return next((line for line in said if line), "it said nothing")
