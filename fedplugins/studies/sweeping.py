"""A whole sweep: where its runs go, its tables, its page, and the settings that are best.

A place of runs is this machine, a Ray cluster, or Slurm. It is a context, in which ``each(call,
runs)`` calls a function for each of several runs, and yields each result as it comes. The machines
of a cluster share the sweep's directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console

from fedmodels.errors import ArchiveError, ConfigError, RunFailed
from fedmodels.facts.config_file import parse_experiment
from fedmodels.host import processes
from fedmodels.host.files import write_atomically
from fedmodels.numerics.metric_tables import metric
from fedplugins.studies.columns import Watch, check_names, faults
from fedplugins.studies.execution import Call, Each, Grave, Say, execute, warm_runs
from fedplugins.studies.fairness import fairness
from fedplugins.studies.outcome import (
    ForPapers,
    Outcome,
    outcome_of,
    read_numbers,
    to_json,
    unit_of,
)
from fedplugins.studies.plan import Cell, PlannedRun, Sweep, plan
from fedplugins.studies.progress import SweepProgress
from fedplugins.studies.ray_runs import ray_runs
from fedplugins.studies.slurm import slurm_jobs
from fedplugins.studies.tables import draw, page, section_of, write_csv
from fedsrv.ray.ray_cluster import RAY, address_in
from fedsrv.report.comparison import headline, least_of
from fedsrv.report.frame import SeedGroup, group_runs
from fedsrv.report.tables import write_html
from fedsrv.state.run_directory import make_directory
from fedsrv.state.run_record import RunRecord, read_run


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
    show: Callable[[Outcome], None] | None = None,
    console: Console | None = None,
) -> None:
    """Run a sweep and write ``report.html``, tables, a picture and the record.

    These are ``table.md``, ``table.tex``, ``table.csv``, ``runs.csv``, ``differences.csv``,
    ``record.json``, ``picture.svg`` (where there are curves or lengths).

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
        show: given the tables, in place of ``say``.
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
    if said := fairness(sweep, runs):
        say(Grave(f"fairness: {said}"))
    if chooses:
        check_chooses(runs)
    _refuse_other_configs(runs)
    make_directory(out, out)
    with place_of(on, jobs, resources, out, say) as each:
        failed = _executed(sweep, runs, each, say, console)
    damaged = [run for run in runs if run.is_finished and not _is_sound(run, sweep, say)]
    failed += damaged
    ended = [run for run in runs if run not in failed]
    with _writing_tables(out):
        outcome = _write_all(sweep, runs, len(seeds), damaged, ended, out, say, show)
    if chooses:
        for line in choices(ended):
            say(line)
    if failed:
        names = ", ".join(run.directory.name for run in failed)
        raise RunFailed(f"{len(failed)} of {len(runs)} runs failed and are left out: {names}")
    for fault in faults(sweep, outcome.runs, ended[0].directory) if outcome else ():
        raise fault


def _executed(
    sweep: Sweep, runs: Sequence[PlannedRun], each: Each, say: Say, console: Console | None
) -> list[PlannedRun]:
    """Run to its end what is not finished, and show how far it is; return what failed."""
    watch = Watch(sweep, runs, say)
    with SweepProgress(runs, say, console) as progress:

        def ended_one(run: PlannedRun) -> None:
            progress.end(run)
            watch()

        return execute(runs, sweep.launch, sweep.reference, each, say, ended_one)


def _write_all(
    sweep: Sweep,
    runs: Sequence[PlannedRun],
    seeds: int,
    damaged: Collection[PlannedRun],
    ended: Sequence[PlannedRun],
    out: Path,
    say: Say,
    show: Callable[[Outcome], None] | None,
) -> Outcome | None:
    """Show the tables of a sweep, and write them and its page; return what it came to.

    Without columns, those of a report's first table are shown; None where no run has ended.
    """
    records = [replace(read_run(run.directory), called=run.cell.title) for run in ended]
    groups = group_runs(records)
    if not sweep.columns:
        if not records:
            return None
        names = headline(groups, list(dict.fromkeys(n for one in records for n in one.metrics())))
        chosen = {metric(name).label: f"metrics.{name}" for name in names}
        sweep = sweep.model_copy(update={"columns": {**chosen, "MB up": "bytes.up"}})
    outcome = outcome_of(sweep, runs, seeds, damaged)
    if ended:
        outcome = replace(outcome, paper=_for_papers(outcome, records, ended))
    (show or (lambda outcome: say(page(outcome))))(outcome)
    _tabulate(outcome, out)
    if ended:
        write_html(records, out / "report.html", [section_of(outcome)], private=True)
        say(f"report: {out / 'report.html'}")
    return outcome


def _for_papers(
    outcome: Outcome, records: Sequence[RunRecord], ended: Sequence[PlannedRun]
) -> ForPapers:
    """Return seeds and rounds in words, and what accuracies have to be better than."""
    seeds = sorted({run.seed for run in ended})
    rounds = sorted({record.rounds for record in records})
    extent = f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'} ({', '.join(map(str, seeds))}), "
    extent += f"after {' or '.join(map(str, rounds))} round{'' if rounds == [1] else 's'}"
    of_cell = dict[Cell, list[RunRecord]]()
    for run, record in zip(ended, records, strict=True):
        of_cell.setdefault(run.cell, []).append(record)
    least = {
        (cell, path): unit_of(path)[0] * found
        for cell, own in of_cell.items()
        for path in outcome.columns.values()
        if (found := least_of([SeedGroup("", tuple(own))], path.removeprefix("metrics.")))
        is not None
    }
    return ForPapers(extent, least)


def _tabulate(outcome: Outcome, out: Path) -> None:
    """Write all files that are made of a sweep's columns."""
    write_atomically(out / "table.md", page(outcome))
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
        line = f"{run.directory.name} is left out: {error}; remove its directory to run it again"
        say(Grave(line))
        return False
    return True


def _refuse_other_configs(runs: Sequence[PlannedRun]) -> None:
    """Refuse to tabulate what an earlier sweep ran with another config."""
    for run in runs:
        if run.is_finished:
            with suppress(ArchiveError):  # told of when the others have run
                run.check_config()


def check_chooses(runs: Sequence[PlannedRun]) -> None:
    """Check that every run of a sweep keeps a part for validation; ConfigError if one does not."""
    for run in runs:
        data = parse_experiment(run.config).data
        if data is None or data.validation_share is None:
            raise ConfigError(
                f"{run.cell.title} has no validation part to choose by: give [data] "
                "validation_share"
            )


def choices(runs: Sequence[PlannedRun]) -> Iterator[str]:
    """Yield a line for each row: its best setting by the mean over seeds of validation scores."""
    for row in dict.fromkeys(run.cell.row for run in runs):
        mine = [run for run in runs if run.cell.row == row]
        settings = list(dict.fromkeys(run.cell.setting for run in mine))
        means = {each: _mean([r for r in mine if r.cell.setting == each]) for each in settings}
        known = {each: mean for each, mean in means.items() if mean is not None}
        if known:
            best = max(known, key=lambda each: known[each])  # of equal ones the first
            by = parse_experiment(mine[0].config).chosen_by
            yield (
                f"{row}: {best or 'its only setting'} is the best of {len(settings)} on "
                f"validation parts ({by} = {known[best]:.4f})"
            )


def _mean(runs: Sequence[PlannedRun]) -> float | None:
    """Return the mean over runs of the validation score of each one's best round."""
    found = []
    for run in runs:
        by = parse_experiment(run.config).chosen_by
        metrics = json.loads((run.directory / "summary.json").read_text("utf-8"))["metrics"]
        found.append(metrics.get(f"chosen_{by}"))
    scores = [score for score in found if score is not None]
    return fmean(scores) if scores and len(scores) == len(found) else None


SLURM = "slurm"


def place_of(
    on: str | None, jobs: int | None, given: Sequence[str], out: Path, say: Say
) -> AbstractContextManager[Each]:
    """Return the place that options of ``fedsrv sweep`` name.

    ``given`` is what one run takes of a cluster, as ``KEY=VALUE``.

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
    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:

        def each(call: Call, runs: Sequence[PlannedRun]) -> Iterator[tuple[PlannedRun, str]]:
            if len(runs) > 1 and processes.warm is None:
                stack.enter_context(warm_runs())
            futures = {pool.submit(call, run, say): run for run in runs}
            for ended in as_completed(futures):
                yield futures[ended], ended.result()

        try:
            yield each
        except BaseException:  # Ctrl-C has ended the runs under way; no further one begins
            pool.shutdown(cancel_futures=True)
            raise
