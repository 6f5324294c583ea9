"""A whole sweep: its runs, its tables, its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedmodels.errors import RunFailed
from fedsrv.report.run_record import read_run
from fedsrv.report.tables import write_html
from fedsrv.sweep.execution import execute
from fedsrv.sweep.plan import Sweep, plan
from fedsrv.sweep.tables import Outcome, latex, page, write_csv


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    sets: Sequence[str] = (),
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Run a sweep and write ``table.md``, ``table.tex``, both CSV files and ``report.html``.

    Args:
        sweep: what to run.
        out: the directory of its runs.
        only: rows to run; all unless given.
        seeds: in place of the sweep's.
        sets: set in all runs, as ``--set`` takes it.
        jobs: runs at a time.
        say: told what is run, what failed, and the tables.

    Raises:
        ConfigError: a row is none of the sweep's, or no experiment comes of it.
        RunFailed: some runs failed; the tables of the others are written.
    """
    first = next(iter(sweep.methods))
    rows = list(only) or list(sweep.methods)
    if sweep.reference and first not in rows:
        rows = [first, *rows]
    seeds = seeds or sweep.seeds
    runs = plan(sweep, out, rows, seeds, sets)
    failed = execute(runs, sweep.launch, jobs, say)
    ended = [run for run in runs if run.is_finished]
    cells = list(dict.fromkeys(run.cell for run in runs))
    against = sweep.against or first
    outcome = Outcome(ended, cells, sweep.columns, against, len(seeds))
    text = page(outcome, sweep.curves)
    (out / "table.md").write_text(text)
    (out / "table.tex").write_text(latex(outcome))
    write_csv(outcome, out)
    say(text)
    if ended:
        write_html([read_run(run.directory) for run in ended], out / "report.html")
        say(f"report: {out / 'report.html'}")
    if failed:
        names = ", ".join(run.directory.name for run in failed)
        raise RunFailed(f"{len(failed)} of {len(runs)} runs failed and are left out: {names}")
