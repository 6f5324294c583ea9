"""``fedsrv report``: tables of run directories, sentences, and a page where one is wanted."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fedmodels.errors import ArchiveError, ConfigError, FedtideError
from fedmodels.host.files import write_atomically
from fedsrv.report.comparison import comparison, one_column
from fedsrv.report.frame import group_runs
from fedsrv.report.panels import lines_of_plugins
from fedsrv.report.sites import sites_table
from fedsrv.report.story import story
from fedsrv.state.run_record import RunRecord, read_run
from fedsrv.state.verification import doubts

if TYPE_CHECKING:
    from fedsrv.report.page import Section

log = logging.getLogger(__name__)


def report_command(
    runs: list[Path], html: Path | None, everything: bool = False, *, as_json: bool = False
) -> None:
    """Print the tables of these run directories; write a page too where ``html`` says so.

    With ``as_json``, print a list of summaries, and of what moved, in place of all that.

    Raises:
        ConfigError: no run is given, or the page cannot be written.
        ArchiveError: a directory is no run's, or a file in it is damaged; the others are shown.
    """
    if not runs:
        raise ConfigError("fedsrv report needs at least one run directory")
    records, unread = _read(runs)
    differing = [f"note: {line}" for run in records for line in doubts(run.path)]
    for line in [*_given_again(runs), *_cut_short(records), *_mixed(records), *differing]:
        Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
    if not records:
        raise _unreadable(runs, unread[:1])
    console = Console(stderr=as_json)
    if as_json:
        moved = ({"moved": lines} if (lines := lines_of_plugins(run)) else {} for run in records)
        of = zip(records, moved, strict=True)
        print(json.dumps([{"run": str(r.path), **r.summary, **more} for r, more in of], indent=1))
    else:
        _tabulate(records, console, everything)
    if html is not None:
        try:
            write_html(records, html)
        except OSError as error:
            raise ConfigError(f"the page {html} cannot be written: {error.strerror}") from None
        console.print(f"report written to {html}")
    if unread:
        raise _unreadable(runs, unread)


def _tabulate(records: Sequence[RunRecord], console: Console, everything: bool) -> None:
    alone = len(records) == 1
    console.print(final_table(records[0], everything) if alone else compare(records, everything))
    groups = group_runs(records)
    if sites := sites_table(groups):
        console.print(sites.rich())
    for sentence in story(groups):
        console.print(sentence, markup=False, highlight=False)


def _read(runs: Sequence[Path]) -> tuple[list[RunRecord], list[ArchiveError]]:
    """Read run directories, each once; return also what is wrong with those that cannot be read."""
    found, unread = list[RunRecord](), list[ArchiveError]()
    for path in dict.fromkeys(path.resolve() for path in runs):
        try:
            found.append(read_run(path))
        except ArchiveError as error:
            unread.append(error)
    return found, unread


def _unreadable(runs: Sequence[Path], unread: Sequence[ArchiveError]) -> FedtideError:
    """Return what a command ends with: a place that is no directory is a mistake in its words."""
    kind = ArchiveError if all(path.is_dir() for path in runs) else ConfigError
    return kind("; ".join(map(str, unread)))


def _given_again(runs: Sequence[Path]) -> list[str]:
    """Return a note on each run directory that is given more than once."""
    times = Counter(path.resolve() for path in runs)
    return [
        f"note: {path} is given {n} times, and taken once" for path, n in times.items() if n > 1
    ]


def _cut_short(records: Sequence[RunRecord]) -> list[str]:
    """Return a note on each finished run whose record of rounds lacks the last ones."""
    return [
        f"note: {run.path / 'rounds.jsonl'} ends at round {run.recorded} of {run.rounds}: curves, "
        "and tables over rounds, lack the rest; fedsrv launch --resume of this run writes the file "
        "anew"
        for run in records
        if run.is_finished and run.recorded < run.rounds
    ]


def _mixed(records: Sequence[RunRecord]) -> list[str]:
    """Return a note on each run whose records hold metrics of several definitions."""
    return [
        f"note: {run.path}: its metrics changed their meaning from round {first + 1} on: they are "
        f"of definitions {before or 'without a number'} before and {after} after it"
        for run in records
        for before, after, first in run.changes_of_definitions()
    ]


def final_table(run: RunRecord | Path, everything: bool = False) -> Table:
    """Return the result of one run: the headline's numbers, or every one, and what it cost.

    Raises:
        ArchiveError: ``run`` is a directory that is no run's, or a file in it is damaged.
    """
    run = read_run(run) if isinstance(run, Path) else run
    seed = "" if run.seed is None else f", seed {run.seed}"
    return one_column(run, everything).rich(f"{run.title()}{seed}: {run.extent}")


def compare(runs: Sequence[RunRecord], everything: bool = False) -> Table:
    """Return runs side by side; runs that differ only in their seed stand in one column."""
    return comparison(group_runs(runs), everything).rich()


class PageNotWritten(Exception):
    """A page cannot be written; the line says how to write it later."""


def write_page(run: RunRecord) -> Path:
    """Write ``report.html`` into the directory of a run that has finished; return the file.

    Raises:
        PageNotWritten: that is not possible. The run is finished all the same.
    """
    page = run.path / "report.html"
    try:
        write_html([run], page, private=True)
    except Exception as error:  # whatever it is, the run has finished
        if not isinstance(error, OSError):
            log.exception("the page of %s", run.path)
        first = str(error).partition("\n")[0]
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {first}"
        raise PageNotWritten(
            f"the run has finished, but its page {page} cannot be written: {why}; "
            f"when that is mended: fedsrv report {run.path} --html {page}"
        ) from None
    return page


def write_html(
    runs: Sequence[RunRecord],
    path: Path,
    further: Sequence[Section] = (),
    *,
    private: bool = False,
) -> None:
    """Write one self-contained page about these runs, whole or not at all.

    With ``private`` nobody but its owner may read the file, which tells of single clients.

    The path may be one that takes a stream, such as ``/dev/stdout``.

    Raises:
        OSError: the file cannot be written.
    """
    from fedsrv.report.page import page  # imports jinja: only when a page is wanted

    text = page(group_runs(runs), further)
    if path.is_char_device() or path.is_fifo():
        path.write_text(text, encoding="utf-8")
    else:
        write_atomically(path, text, private=private)
