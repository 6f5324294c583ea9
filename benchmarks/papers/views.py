"""Records read in the papers' view, and what each choice of a reader moves.

GLDP's and FedMLP's tables have methods without private parts right after local training, and
methods with private parts as their clients receive them. A column of a study has one view for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from benchmarks.papers.page import STUDIES, interval, record_of
from fedmodels.errors import ConfigError
from fedplugins.studies.outcome import Outcome, values_of
from fedplugins.studies.plan import Cell, Sweep
from fedsrv.report.frame import difference

AS_TRAINED = {"fedavg", "fedprox", "apfl", "fedntd", "moon"}
"""Methods whose model right after training is the one of the papers' A_loc."""
Values = Mapping[Cell, Mapping[int, float | None]]
OWN, CLASSES, WHOLE = "", "_own_classes", "_balanced"
MET, ALL = "_seen_classes", "_all_classes"
TASKS, ACCUMULATED = "tasks alone", "accumulated"


def is_scored_trained(study: str, row: str) -> bool:
    """Tell whether a row of a study is of a method that the papers score just trained."""
    return Sweep.read(STUDIES / f"{study}.toml").methods[row].split()[0] in AS_TRAINED


def in_the_papers_view(study: str, outcome: Outcome, test_set: str = OWN) -> Values | None:
    """Return A_loc in the papers' view; None where a record lacks one of the two views."""
    both = [f"metrics.a_loc_{view}{test_set}" for view in ("received", "trained")]
    if not {*both} <= {*outcome.columns.values()}:
        return None
    received, trained = (values_of(path, outcome.runs) for path in both)
    found = {
        cell: (trained if is_scored_trained(study, cell.row) else received).get(cell, {})
        for cell in outcome.cells
    }
    return found if any(map(bool, found.values())) else None


def page(study: str) -> str:
    """Return, of a study of choices, what each moves, and the orders that come of them.

    Raises:
        ConfigError: there is no record of it.
    """
    outcome = record_of(study)
    if outcome is None:
        raise ConfigError(f"no record of {study}")
    return "\n\n".join(["\n".join(_effects(outcome)), "\n".join(_orders(study, outcome))]) + "\n"


def _column(outcome: Outcome, view: str, test_set: str, mask: str = "") -> Values:
    path = f"metrics.a_loc_{view}{test_set}{mask}"
    return values_of(path, outcome.runs) if path in outcome.columns.values() else {}


Choice = tuple[str, str, str, str]
"""View, test set, classes to choose among, and tasks."""
CHOICES: Mapping[str, tuple[Choice, Choice]] = {
    "view: received − just trained, own data": (
        ("received", OWN, "", TASKS), ("trained", OWN, "", TASKS),
    ),
    "test set: own classes − whole set, received": (
        ("received", CLASSES, "", TASKS), ("received", WHOLE, "", TASKS),
    ),
    "classes to choose among: those met − all, received": (
        ("received", OWN, MET, TASKS), ("received", OWN, ALL, TASKS),
    ),
    "tasks: accumulated − alone, just trained": (
        ("trained", OWN, "", ACCUMULATED), ("trained", OWN, "", TASKS),
    ),
    "tasks: accumulated − alone, received": (
        ("received", OWN, "", ACCUMULATED), ("received", OWN, "", TASKS),
    ),
}  # fmt: skip


def _effects(outcome: Outcome) -> Iterator[str]:
    """Yield a table: a choice a column, a method a row, the change that the choice makes."""
    rows = [cell.row for cell in outcome.cells if cell.setting == TASKS]
    table = {
        heading: [difference(_at(outcome, row, one), _at(outcome, row, other)) for row in rows]
        for heading, (one, other) in CHOICES.items()
    }
    shown = {heading: column for heading, column in table.items() if any(column)}
    yield "| A_loc, points | " + " | ".join(shown) + " |"
    yield "|---" * (len(shown) + 1) + "|"
    for place, row in enumerate(rows):
        cells = [interval(column[place]) for column in shown.values()]
        yield f"| {row} | " + " | ".join(cells) + " |"


def _at(outcome: Outcome, row: str, choice: Choice) -> Mapping[int, float | None]:
    view, test_set, mask, setting = choice
    return _column(outcome, view, test_set, mask).get(Cell(setting, row), {})


def _orders(study: str, outcome: Outcome) -> Iterator[str]:
    """Yield a table: means of A_loc in each combination of view, test set and tasks."""
    rows = [cell.row for cell in outcome.cells if cell.setting == TASKS]
    yield "| view | test set | tasks | " + " | ".join(rows) + " | A_glo of FedAvg |"
    yield "|---" * (len(rows) + 4) + "|"
    for test_set, name in ((OWN, "own data"), (CLASSES, "own classes"), (WHOLE, "whole set")):
        views = {
            "the paper's": in_the_papers_view(study, outcome, test_set) or {},
            "received": _column(outcome, "received", test_set),
        }
        for view, column in views.items():
            for setting in (TASKS, ACCUMULATED):
                found = [_mean(column.get(Cell(setting, row), {})) for row in rows]
                if any(found):
                    whole = values_of("metrics.a_glo_balanced", outcome.runs)
                    everyone = _mean(whole.get(Cell(setting, "FedAvg"), {}))
                    cells = [(text and f"{text:.1f}") or "–" for text in (*found, everyone)]
                    yield f"| {view} | {name} | {setting} | " + " | ".join(cells) + " |"


def _mean(seeds: Mapping[int, float | None]) -> float | None:
    known = [value for value in seeds.values() if value is not None]
    return fmean(known) if known else None
