"""Checks whether runs have a sweep's columns and curves; tells early what no run can have.

A name that no run writes is refused before anything is run. A custom method may report what
it likes, so its metrics are looked up once every row has a finished run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fedmodels.errors import ArchiveError, ConfigError, suggestion
from fedmodels.methods import method_class
from fedmodels.numerics.metric_tables import METRICS, is_known
from fedplugins.studies.execution import Grave, Say
from fedplugins.studies.outcome import read_numbers, tables_of
from fedplugins.studies.plan import PlannedRun, Sweep
from fedsrv.report.comparison import SPENT
from fedsrv.report.frame import RunNumbers
from fedsrv.state.run_record import read_run

COMPUTE = ("macs_per_example", "training_macs", "peak_client_rss_bytes")
FIXED: Mapping[str, Iterable[str]] = {**SPENT, "compute": COMPUTE}
"""Tables of ``summary.json`` that hold the same in every run, and what they hold."""
OPEN = ("metrics", "clients")
"""Tables that hold what methods report, too."""


def check_names(sweep: Sweep) -> None:
    """Refuse columns and curves that no run can have, before anything is run: ConfigError."""
    from_elsewhere = not all(map(_is_from_here, sweep.methods.values()))
    paths = {f"{table}.{name}" for table, names in FIXED.items() for name in names}
    paths |= {f"metrics.{name}" for name in METRICS}
    for heading, path in sweep.columns.items():
        table, _, name = path.partition(".")
        own = table in OPEN and name and (from_elsewhere or table == "clients")
        if not own and path not in paths and not (table == "metrics" and is_known(name)):
            raise _missing("column", heading, path, paths)
    for heading, name in sweep.curves.items():
        if not from_elsewhere and not is_known(name):
            raise _missing("curve", heading, name, METRICS)


def _is_from_here(row: str) -> bool:
    """Tell whether the tables know every metric of a row's method."""
    return method_class(row.split()[0]).__module__.startswith("fedmodels.")


def _missing(kind: str, heading: str, name: str, known: Iterable[str]) -> ConfigError:
    word = name.removeprefix("metrics.")
    if kind == "column" and (word != name or "." not in name):
        word = f"metrics.{word}"
    return ConfigError(f"no run has the {kind} {heading!r}, {name!r}.{suggestion(word, known)}")


def faults(sweep: Sweep, runs: Sequence[RunNumbers], directory: Path) -> Iterator[ConfigError]:
    """Yield an error for each column and curve that no run has and no table of metrics knows.

    ``directory`` is that of one of the runs, for what it has.
    """
    for heading, path in sweep.columns.items():
        table, _, name = path.partition(".")
        known = table == "metrics" and is_known(name)
        if not known and all(run.values[path] is None for run in runs):
            tables = tables_of(read_run(directory))
            has = {f"{table}.{name}" for table, names in tables.items() for name in names}
            yield _missing("column", heading, path, {*has, *(f"metrics.{m}" for m in METRICS)})
    for heading, name in sweep.curves.items():
        if not is_known(name) and not any(run.curves[name] for run in runs):
            written = {key for row in read_run(directory).rows for key in row.get("metrics", {})}
            yield _missing("curve", heading, name, {*written, *METRICS})


class Watch:
    """Looks for columns and curves once every row has a finished run, and says what is missing."""

    def __init__(self, sweep: Sweep, runs: Sequence[PlannedRun], say: Say) -> None:
        """Watch the runs of a sweep; what is missing is said once."""
        self._sweep, self._runs, self._say = sweep, runs, say
        self._has_looked = False

    def __call__(self) -> None:
        """Look, if it is time to, after a run has ended; a damaged run is told of elsewhere."""
        ended = {run.cell.row: run for run in self._runs if run.is_finished}
        if self._has_looked or ended.keys() != {run.cell.row for run in self._runs}:
            return
        self._has_looked = True
        columns, curves = [*self._sweep.columns.values()], [*self._sweep.curves.values()]
        try:
            found = [read_numbers(run, columns, curves) for run in ended.values()]
            for fault in faults(self._sweep, found, next(iter(ended.values())).directory):
                line = f"note: so far {fault} Finished runs are kept: once the name is mended, the "
                self._say(Grave(line + "same command goes on"))
        except ArchiveError:
            return
