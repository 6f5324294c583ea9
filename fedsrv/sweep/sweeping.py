"""A whole sweep: its runs, its tables, its page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from fedmodels.errors import ArchiveError, ConfigError, RunFailed
from fedmodels.files import write_atomically
from fedsrv.report.run_record import read_run
from fedsrv.report.tables import report_command, write_html
from fedsrv.state.run_directory import make_directory
from fedsrv.sweep.choices import check_chooses, choices
from fedsrv.sweep.columns import Watch, check_names, faults
from fedsrv.sweep.execution import Say, execute
from fedsrv.sweep.outcome import Outcome, read_numbers
from fedsrv.sweep.places import place_of
from fedsrv.sweep.plan import PlannedRun, Sweep, plan
from fedsrv.sweep.progress import SweepProgress
from fedsrv.sweep.record import outcome_of, to_json
from fedsrv.sweep.tables import draw, page, section_of, write_csv


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    sets: Sequence[str] = (),
    jobs: int | None = None,
    on: str | None = None,
    resources: Sequence[str] = (),
    chooses: bool = False,
    say: Say = print,
    console: Console | None = None,
) -> None:
    """Run a sweep and write ``report.html``; of columns also tables, a picture and the record.

    These are ``table.md``, ``table.tex``, ``runs.csv``, ``differences.csv``, ``record.json``,
    ``picture.svg`` (where there are curves or lengths).

    Args:
        sweep: what to run.
        out: the directory of its runs.
        only: rows to run; by default all.
        seeds: in place of the sweep's.
        sets: set in all runs, as ``--set`` takes it.
        jobs: runs at a time; by default one.
        on: the cluster that runs them, as ``--on`` takes it; by default this machine.
        resources: what each takes of the cluster, as ``--resource`` takes it.
        chooses: say which setting of each row is the best on validation parts.
        say: told what is run, how far it is, what failed, and the tables.
        console: where the runs are shown live if it is a terminal.

    Raises:
        ConfigError: a row is none of the sweep's, no experiment comes of it, a finished run had
            another config, the directory cannot be used, or no run has a column or a curve.
        RunFailed: some runs failed or are damaged, and the tables of the others are written; or
            the disk is full.
    """
    first = next(iter(sweep.methods))
    rows = list(only) or list(sweep.methods)
    if sweep.reference and first not in rows:
        rows = [first, *rows]
    seeds = seeds or sweep.seeds
    out = out.resolve() if on else out
    runs = plan(sweep, out, rows, seeds, sets)
    check_names(sweep)
    if chooses:
        check_chooses(runs)
    _refuse_other_configs(runs)
    make_directory(out, out)
    watch = Watch(sweep, runs, say)
    with (
        place_of(on, jobs, resources, out, say) as each,
        SweepProgress(runs, say, console) as progress,
    ):

        def ended_one(run: PlannedRun) -> None:
            progress.end(run)
            watch()

        failed = execute(runs, sweep.launch, sweep.reference, each, say, ended_one)
    damaged = [run for run in runs if run.is_finished and not _is_sound(run, sweep, say)]
    failed += damaged
    ended = [run for run in runs if run not in failed]
    html = out / "report.html"
    further = []
    with _writing_tables(out):
        if sweep.columns:
            outcome = outcome_of(sweep, runs, len(seeds), damaged)
            _tabulate(outcome, out, say)
            further = [section_of(outcome)]
        elif ended:
            report_command([run.directory for run in ended], None)
        if ended:
            write_html([read_run(run.directory) for run in ended], html, further)
            say(f"report: {html}")
    if chooses:
        for line in choices(ended):
            say(line)
    if failed:
        names = ", ".join(run.directory.name for run in failed)
        raise RunFailed(f"{len(failed)} of {len(runs)} runs failed and are left out: {names}")
    if sweep.columns:
        for fault in faults(sweep, outcome.runs, ended[0].directory):
            raise fault


def _tabulate(outcome: Outcome, out: Path, say: Say) -> None:
    """Say the tables of a sweep, and write all files that are made of its columns."""
    text = page(outcome)
    say(text)
    write_atomically(out / "table.md", text)
    write_atomically(out / "table.tex", outcome.table().latex())
    write_atomically(out / "record.json", to_json(outcome))
    write_csv(outcome, out)
    draw(outcome, out / "picture.svg")


@contextmanager
def _writing_tables(out: Path) -> Iterator[None]:
    """Turn an error of writing what runs came to into one line.

    Raises:
        RunFailed: the disk is full, or fails.
    """
    try:
        yield
    except OSError as error:
        raise RunFailed(
            f"the tables in {out} cannot be written: {error.strerror}; the runs are kept: make "
            "room, and the same command writes the tables"
        ) from None


def _is_sound(run: PlannedRun, sweep: Sweep, say: Say) -> bool:
    """Tell whether a finished run can be read; say what is wrong with one that cannot."""
    try:
        run.changes()
        read_run(run.directory)
        if sweep.columns:
            read_numbers(run, [*sweep.columns.values()], [*sweep.curves.values()])
    except ArchiveError as error:
        say(f"{run.directory.name} is left out: {error}; remove its directory to run it again")
        return False
    return True


def _refuse_other_configs(runs: Sequence[PlannedRun]) -> None:
    """Refuse to tabulate what an earlier sweep ran with another config."""
    for run in runs:
        keys: list[str] = []
        with suppress(ArchiveError):  # told of when the others have run
            keys = run.changes() if run.is_finished else []
        if keys:
            raise ConfigError(
                f"{run.directory} was run with another config; it differs in {', '.join(keys)}. "
                "Give another --out, or remove that directory to run it again"
            )
