"""What a page says first: a few sentences, each computed from the runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

from fedmodels.console.printable import bytes_text, printable
from fedmodels.numerics.metric_names import OF_FIGURE
from fedmodels.numerics.metric_tables import metric
from fedsrv.report import quantities as q
from fedsrv.report.comparison import (
    best_group,
    guesses_text,
    is_no_better,
    least_of,
    main_metrics,
    who_chooses,
)
from fedsrv.report.frame import MIN_SEEDS, SeedGroup, rare_classes
from fedsrv.report.panels import lines_of_plugins, listed
from fedsrv.report.quantities import view_name
from fedsrv.report.sites import how_apart
from fedsrv.state.record import change_text
from fedsrv.state.run_record import RunRecord, number, table

MAX_SAID = 4
"""Groups that a sentence calls by name."""
ALIKE = 1.25
"""Weights whose largest is no more than so many times the smallest say nothing of who helped."""


def story(groups: Sequence[SeedGroup]) -> list[str]:
    """Return how good, how good on rare and old classes, what was forgotten, who helped, what cost.

    A question that the runs do not answer is left out.
    """
    name = main_metrics(groups)[0]
    parts = (
        _how_good,
        lambda groups, name: how_apart(groups),
        _on_rare_classes,
        _on_old_tasks,
        _who_helped,
        _whose_uploads_stood_out,
        _whose_data_moved,
        _at_what_cost,
        _what_was_spent,
        _what_came_again,
    )
    return [sentence for part in parts for sentence in part(groups, name)]


def _what_came_again(groups: Sequence[SeedGroup], name: str) -> Iterator[str]:
    values = {group.label: float(max(run.again for run in group.runs)) for group in groups}
    if any(values.values()):
        texts = {label: f"{value:.0f}" for label, value in values.items()}
        yield (
            "Examples of new tasks that earlier tasks of their clients have, which are left out "
            f'unless [data] repeats = "keep": {_each(texts, values)}.'
        )


def _how_good(groups: Sequence[SeedGroup], name: str) -> Iterator[str]:
    values = _of(groups, name)
    if not values:
        return
    what = metric(name)
    texts = {k: f"{100 * v:.1f} %" if what.unit else f"{v:.4g}" for k, v in values.items()}
    yield f"{what.title[:1].upper()}{what.title[1:]}: {_each(texts, values)}."
    for group in groups:
        scored, missing = group.runs[0].in_means
        over = f"{scored} client{'' if scored == 1 else 's'}"
        if missing:
            said = (
                f"{', '.join(missing[:MAX_SAID])}{'' if len(missing) <= MAX_SAID else ' and more'}"
            )
            yield f"{group.label}: these scores are means over {over}, without client {said}."
        if changes := group.runs[0].population:
            said = "; ".join(change_text(*one) for one in changes[-MAX_SAID:])
            yield (
                f"{group.label}: the mean is over other clients than before {said}. What it gained "
                f"or lost there may be theirs; it is over {over} now."
            )
    if without_model := guesses_text(groups, name):
        yield f"Without a model: {without_model}."
    least = least_of(groups, name)
    if least is not None and all(is_no_better(name, v, least) for v in values.values()):
        yield "No model here is better than that."
        return
    if len(values) < 2 or not what.better:
        return
    first = best_group(groups, name)
    if first is not None:
        yield f"{first} is better than every other in a paired test over seeds."
        if OF_FIGURE.fullmatch(name) is None:
            chosen = who_chooses([(group.label, group.runs[0].chooses_among) for group in groups])
            yield from filter(None, [chosen])
    elif all(len(group.runs) == 1 for group in groups):
        yield "With one seed each, no test says whether such differences are chance."
    elif _seeds_of_all(groups) < MIN_SEEDS:
        yield (
            f"With fewer than {MIN_SEEDS} seeds that all have, no test says whether such "
            "differences are chance."
        )
    else:
        yield "No one of them is better than every other in a paired test over seeds."


def _seeds_of_all(groups: Sequence[SeedGroup]) -> int:
    """Return how many seeds every group has a run of."""
    return len(set.intersection(*({str(run.seed) for run in group.runs} for group in groups)))


def _on_rare_classes(groups: Sequence[SeedGroup], name: str) -> Iterator[str]:
    rare, every = _of(groups, f"{name}_minority"), _of(groups, name)
    classes = rare_classes(groups)
    if rare and classes != []:
        texts = {
            label: f"{100 * value:.1f} % ({_beside_all(value - every[label])})"
            for label, value in rare.items()
            if label in every
        }
        yield f"On the rare classes{listed(classes)}: {_each(texts, rare)}."


def _on_old_tasks(groups: Sequence[SeedGroup], name: str) -> Iterator[str]:
    view = q.comparable_view([run for group in groups for run in group.runs])
    when = view_name(view)
    ends = dict[str, float]()
    for group in groups:
        found = group.merge(partial(q.final_task_accuracy, view=view))
        if earlier := [spread.mean for task, spread in found.items() if task < max(found)]:
            ends[group.label] = fmean(earlier)
    if ends:
        texts = {label: f"{100 * value:.1f} %" for label, value in ends.items()}
        yield f"On earlier tasks, models at the end ({when}): {_each(texts, ends)}."
    lost = {g.label: g.merge(partial(q.lost_by_task, view=view)).values() for g in groups}
    gains = {label: -fmean(s.mean for s in found) for label, found in lost.items() if found}
    if gains:
        texts = {label: _change(value) for label, value in gains.items()}
        said = _each(texts, gains)
        yield f"From the best accuracy on each earlier task to the end ({when}): {said}."


def _who_helped(groups: Sequence[SeedGroup], name: str) -> Iterator[str]:
    for group in groups:
        matrices = q.weight_matrices(group.runs[0])
        if not matrices:
            continue
        cells, names = matrices[max(matrices)], group.runs[0].client_names
        own = [weight for (i, j), weight in cells.items() if i == j]
        others = {pair: weight for pair, weight in cells.items() if pair[0] != pair[1]}
        if own and others:
            low, high = min(cells.values()), max(cells.values())
            if 0 < high <= ALIKE * low:
                yield f"{group.label}: all weights are much alike, from {low:.2f} to {high:.2f}."
                return
            (to, by), most = max(others.items(), key=lambda item: item[1])
            yield (
                f"{group.label}: clients gave their own model a mean weight of {fmean(own):.2f}. "
                f"Most help went to client {names.get(to, to)}, from client {names.get(by, by)} "
                f"({most:.2f})."
            )
            return


def _whose_uploads_stood_out(groups: Sequence[SeedGroup], name: str) -> Iterator[str]:
    for group in groups:
        run = group.runs[0]
        often = sorted(q.warnings_of_client(run).items(), key=lambda item: -item[1])[:MAX_SAID]
        if often:
            called = [f"client {run.client_names.get(c, c)} ({n:.0f} times)" for c, n in often]
            yield f"{group.label}: uploads stood out of their cohorts: {', '.join(called)}."


def _whose_data_moved(groups: Sequence[SeedGroup], name: str) -> Iterator[str]:
    for group in groups:
        if lines := lines_of_plugins(group.runs[0]):
            more = f"; and {len(lines) - MAX_SAID} earlier ones" if len(lines) > MAX_SAID else ""
            said = "; ".join(printable(line) for line in lines[:MAX_SAID])
            yield f"{group.label}: data moved: {said}{more}."


def _at_what_cost(groups: Sequence[SeedGroup], name: str) -> Iterator[str]:
    texts, sizes = dict[str, str](), dict[str, float]()
    for group in groups:
        moved = group.merge(partial(RunRecord.totals, part="bytes"))
        spent = group.merge(partial(RunRecord.totals, part="seconds"))
        if "up" in moved and "wall" in spent:
            sent, took = moved["up"].mean, spent["wall"].mean
            texts[group.label] = f"{bytes_text(sent)} in {took:.1f} s"
            sizes[group.label] = sent
    if texts:
        yield f"Clients sent: {_each(texts, sizes)}."


def _what_was_spent(groups: Sequence[SeedGroup], name: str) -> Iterator[str]:
    assumed = dict[str, list[str]]()
    for group in groups:
        privacy = table(group.runs[0].summary.get("privacy"))
        epsilon, delta = number(privacy.get("epsilon")), number(privacy.get("delta"))
        if epsilon is not None and delta is not None:
            renyi = number(privacy.get("epsilon_renyi"))
            coarser = "" if renyi is None else f" ({renyi:.3g} by Rényi accounting)"
            said = f"{group.label} epsilon {epsilon:.3g}{coarser} at delta {delta:g}"
            assumed.setdefault(printable(str(privacy.get("assumes", ""))), []).append(said)
    for assumes, spent in assumed.items():
        yield f"Privacy spent: {', '.join(spent)}. Each {assumes}."


def _of(groups: Sequence[SeedGroup], name: str) -> dict[str, float]:
    merged = {group.label: group.merge(RunRecord.metrics).get(name) for group in groups}
    return {label: spread.mean for label, spread in merged.items() if spread is not None}


def _each(texts: Mapping[str, str], values: Mapping[str, float]) -> str:
    """Return the text of each group, of many the least and the largest; one alone has no name."""
    if len(texts) == 1:
        return next(iter(texts.values()))
    if len(texts) > MAX_SAID and len({*texts.values()}) == 1:
        return f"{next(iter(texts.values()))} each"
    if len(texts) > MAX_SAID:
        low, high = (pick(texts, key=values.__getitem__) for pick in (min, max))
        return f"from {low} {texts[low]} to {high} {texts[high]}"
    return ", ".join(f"{label} {text}" for label, text in texts.items())


def _beside_all(gap: float) -> str:
    """Return how far an accuracy lies above that on all classes, in points as they are shown."""
    points = round(100 * gap, 1)
    if not points:
        return "as on all classes"
    return f"{abs(points):.1f} points {'more' if points > 0 else 'less'} than on all classes"


def _change(gain: float) -> str:
    """Return what an accuracy gained or lost, in points as they are shown."""
    points = round(100 * gain, 1)
    if not points:
        return "lost nothing"
    return f"{'gained' if points > 0 else 'lost'} {abs(points):.1f} points"
