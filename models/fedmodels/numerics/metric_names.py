"""What metrics are called, and what the tables say of a name.

:mod:`fedmodels.numerics.metric_tables` has the tables.
"""

from __future__ import annotations

from dataclasses import replace

from fedmodels.numerics.metric_tables import (
    ACCURACY,
    COHORT,
    ENDINGS,
    EVERYONE,
    FIGURES,
    LESS_IS_BETTER,
    METRICS,
    OF_FIGURE,
    REPORTED,
    SCORERS,
    SCORES,
    VIEWS,
    Metric,
    family_of,
)

__all__ = [
    "ENDINGS",
    "EVERYONE",
    "FIGURES",
    "METRICS",
    "REPORTED",
    "SCORES",
    "VIEWS",
    "Metric",
    "is_known",
    "metric",
    "with_population",
]


def metric(name: str) -> Metric:
    """Return what the tables say of a name; a method's own metric is a plain number."""
    if found := METRICS.get(name):
        return found
    if match := ACCURACY.fullmatch(name):
        base = METRICS[match[2]]
        titles, meanings = zip(*(words for _, words in _parts(match[3])), strict=True)
        title, meaning = ", ".join([base.title, *titles]), "; ".join([base.meaning, *meanings])
        better = -1 if match[3].endswith(LESS_IS_BETTER) else base.better
        return replace(base, name=name, title=title, meaning=meaning, better=better)
    if match := OF_FIGURE.fullmatch(name):
        return _figure(name, *match.groups())
    family = METRICS.get(family_of(name))
    if family is not None:
        which = "after task" if family.name.endswith("_task") else "class"
        title = f"{family.title}, {which} {name.rpartition('_')[2]}"
        return replace(family, name=name, title=title)
    return Metric(name, name, "a metric of the method's own", better=0, unit="", range="real")


def _figure(name: str, chosen: str, part: str, figure: str, model: str, balanced: str) -> Metric:
    """Return the figure of targets of this name, which says the model and the test set."""
    base, of_model = FIGURES[figure], METRICS[f"a_{model}"] if model else None
    title = f"{base.title}, {of_model.title}" if of_model else base.title
    words = f"{base.meaning}; of the model that `a_{model}` is of" if of_model else base.meaning
    population = of_model.population if of_model else SCORERS
    if balanced:
        title, population = f"{base.title}, {ENDINGS['balanced'][0]}", EVERYONE
    for said, more in ((part, "validation part"), (chosen, "round chosen on validation parts")):
        title += f", {more}" if said else ""
    return replace(base, name=name, title=title, meaning=words, population=population)


def with_population(name: str, selected: str, told: str = "") -> str:
    """Return what stands above a metric in a table, with its clients where they are not all.

    Args:
        name: of the metric.
        selected: how many clients a cohort has, such as ``10 of 20 clients``; empty where all that
            score train for the score.
        told: the heading that a user gave; by default the metric's label.
    """
    found = metric(name)
    told = told or found.label
    return f"{told} ({selected})" if selected and found.population == COHORT else told


def is_known(name: str) -> bool:
    """Tell whether the tables have a name, with every one of its endings."""
    match = ACCURACY.fullmatch(name)
    if name not in METRICS and match:
        return all(title != f"by {rule}" for rule, (title, _) in _parts(match[3]))
    return metric(name).meaning != "a metric of the method's own"


def _parts(text: str) -> list[tuple[str, tuple[str, str]]]:
    """Return the endings of a name; what no entry knows is the rule of a custom method."""
    found = []
    while text:
        known = [e for e in ENDINGS if text == e or text.startswith(f"{e}_")]
        ending = max(known, key=len, default=text)
        unknown = (f"by {ending}", f"by the method's rule {ending}")
        found.append((ending, ENDINGS.get(ending, unknown)))
        text = text.removeprefix(ending).removeprefix("_")
    return found
