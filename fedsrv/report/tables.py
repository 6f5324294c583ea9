"""Tables of one run or of several side by side; seeds merged as mean ± standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedmodels.errors import ConfigError
from fedmodels.numerics.metric_names import metric
from fedsrv.report.comparison import SPENT, comparison, cost_text, metric_text
from fedsrv.report.run_record import RunRecord, Spread, group_runs, read_run

MOST_COLUMNS = 4
"""Beyond this many groups a comparison has one line, not one column, for each."""


def report_command(runs: list[Path], html: Path | None) -> None:
    """Print the tables of these run directories; write a page too where ``html`` says so.

    Raises:
        ConfigError: no run is given, or the page cannot be written.
        ArchiveError: a directory is no run's, or a file in it is damaged.
    """
    if not runs:
        raise ConfigError("fedsrv report needs at least one run directory")
    records = [read_run(path) for path in dict.fromkeys(path.resolve() for path in runs)]
    console = Console()
    console.print(final_table(records[0]) if len(records) == 1 else compare(records))
    if html is not None:
        write_html(records, html)
        console.print(f"report written to {html}")


def final_table(run: RunRecord | Path) -> Table:
    """Return the result of one run: its metrics, and what it cost.

    Raises:
        ArchiveError: ``run`` is a directory that is no run's, or a file in it is damaged.
    """
    run = read_run(run) if isinstance(run, Path) else run
    seed = "" if run.seed is None else f", seed {run.seed}"
    state = "" if run.is_finished else ", not finished"
    title = Text(f"{run.title()}{seed}: {run.rounds} rounds{state}")
    out = Table(title=title, title_justify="left", min_width=len(title))
    out.add_column("metric")
    out.add_column("value", justify="right")
    for name, value in run.metrics().items():
        out.add_row(Text(metric(name).label), metric_text(name, Spread(value, 0.0, 1)))
    out.add_section()
    for part, names in SPENT.items():
        totals = run.totals(part)
        for name, label in names.items():
            if name in totals:
                out.add_row(label, cost_text(part, totals[name]))
    return out


def compare(runs: Sequence[RunRecord]) -> Table:
    """Return runs side by side; runs that differ only in their seed stand in one column.

    With more than a few groups the table is turned: one line for each.
    """
    groups = group_runs(runs)
    cells = comparison(groups)
    is_merged = any(len(group.runs) > 1 for group in groups)
    out = Table(caption="± is the population standard deviation over runs" if is_merged else None)
    heads = [
        Text(f"{group}\n{note}") for group, note in zip(cells.groups, cells.notes, strict=True)
    ]
    body = [_styled(values, cells.best.get(name)) for name, values in cells.lines.items()]
    grid = [[Text(""), *heads]]
    grid += [[Text(name), *line] for name, line in zip(cells.lines, body, strict=True)]
    if len(heads) > MOST_COLUMNS:
        grid = [list(column) for column in zip(*grid, strict=True)]
    for index, head in enumerate(grid[0]):
        out.add_column(head, justify="right" if index else "left")
    for line in grid[1:]:
        out.add_row(*line)
    return out


def write_html(runs: Sequence[RunRecord], path: Path) -> None:
    """Write one self-contained page about these runs.

    Raises:
        ConfigError: the file cannot be written.
    """
    from fedsrv.report.page import page  # draws with matplotlib: only when a page is wanted

    groups = group_runs(runs)
    text = page(groups, comparison(groups))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}") from None


def _styled(values: Sequence[str], best: int | None) -> list[Text]:
    return [Text(value, "bold" if index == best else "") for index, value in enumerate(values)]
