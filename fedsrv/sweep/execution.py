"""The runs of a sweep, as processes, resumed where they were interrupted."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

from fedmodels.errors import Interrupted, reason_of
from fedsrv.sweep.places import Each, Say
from fedsrv.sweep.plan import PlannedRun

_LIBC = ctypes.CDLL(None)  # looked up before the fork
_PR_SET_PDEATHSIG = 1


def execute(
    runs: Sequence[PlannedRun], further: Sequence[str], each: Each, say: Say
) -> list[PlannedRun]:
    """Run to its end what is not finished; return what failed.

    The first row of each setting and seed comes first: it writes the partition that others share,
    and what they may refer to.

    Args:
        runs: of the sweep.
        further: options of ``fedsrv launch``.
        each: calls a function for each of several runs, wherever that is.
        say: told what is run, and what failed.

    Raises:
        Interrupted: Ctrl-C came.
    """
    first = {(run.cell.setting, run.seed): run for run in reversed(runs)}
    leading = [run for run in runs if run in first.values()]
    others = [run for run in runs if run not in leading]
    call = partial(to_its_end, further, str(Path.cwd()))
    try:
        for group in (leading, others):
            for failure in each(call, [run for run in group if not run.is_finished]):
                if failure:
                    say(failure)
    except KeyboardInterrupt:  # Ctrl-C has ended the runs under way, too; no further one begins
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise Interrupted("stopped; the same command goes on with the sweep") from None
    return [run for run in runs if not run.is_finished]


def to_its_end(further: Sequence[str], directory: str, run: PlannedRun, say: Say) -> str:
    """Run one experiment to its end, from where it is; return why it failed, or nothing.

    Args:
        further: options of ``fedsrv launch``.
        directory: from which relative paths go.
        run: a run of the sweep.
        say: told the command.
    """
    out, data = run.directory, run.data
    options = ["--out", str(out), "--set", f"seed={run.seed}", *further]
    options += ["--resume"] if (out / "config.toml").exists() else []
    options += ["--data", str(data)] if data.exists() and not run.own_data else []
    say(f"$ fedsrv launch {run.config_file} {' '.join(options)}")
    log = out.with_name(out.name + ".log")
    try:
        run.config_file.write_text(run.config)
        with log.open("a") as to_log:
            command = [sys.executable, "-m", "fedsrv", "launch", str(run.config_file), *options]
            done = subprocess.run(
                command,
                stdout=to_log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                preexec_fn=_end_with_parent,
            )
    except OSError as error:
        return f"{out.name} could not be started: {reason_of(error)}"
    if done.returncode == Interrupted.exit_code:
        return f"{out.name} was stopped"
    if done.returncode:
        return f"{out.name} failed: {_last_line(log)} (see {log})"
    if not run.own_data and not data.exists():
        try:
            _share(out / "data", data)
        except OSError as error:
            why = reason_of(error)
            say(f"{data} cannot be written, so that other runs deal out their own data: {why}")
    return ""


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent dies: the run stops where it can be resumed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _share(written: Path, data: Path) -> None:
    """Copy a run's partition to where others find it; another run may do so at the same time.

    Raises:
        OSError: it cannot be copied; nothing of it is left.
    """
    copy = Path(mkdtemp(prefix=f".{data.name}-", dir=data.parent))
    try:
        shutil.copytree(written, copy, dirs_exist_ok=True)
        with suppress(OSError):  # another run was first
            copy.rename(data)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    said = (line.strip("│╭╮╰╯─ ") for line in reversed(lines))  # a usage error stands in a box
    return next((line for line in said if line), "it said nothing")
