"""Intervals in the prose of the results: each is that of a paired difference behind that prose.

A section's prose is looked up in the records of its page and of the pages that it links, a line of
the overview in those of the pages that it links. Among the intervals of all records together a
wrong one would often find its like.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import t

from benchmarks.papers.table import tables_of
from benchmarks.papers.views import ALL, CLASSES, MET, OWN, WHOLE, in_the_papers_view
from benchmarks.records import MARKED, PAGES, RECORDS, ROOT
from fedplugins.studies.outcome import Outcome, read_record, values_of
from fedplugins.studies.plan import Cell
from fedsrv.report.frame import CONFIDENCE

Values = Mapping[Cell, Mapping[int, float | None]]

TEXTS = [*sorted(PAGES.glob("*.md")), ROOT / "docs" / "results.md"]
DOCSTRING = re.compile(r'^ +""".*?"""$', flags=re.DOTALL | re.MULTILINE)
NUMBER = r"[+−]?\d+(?:\.\d+)?"
STATED = re.compile(rf"({NUMBER})[^\d\[\]|;]{{0,45}}\[({NUMBER}),\s*({NUMBER})\](†?)")
"""A difference and its interval, such as ``3.9 [+1.0, +6.8]``."""
PARTS: dict[str, slice] = {
    "all": slice(None), "first": slice(1), "but the first": slice(1, None),
    "last": slice(-1, None), "last three": slice(-3, None),
}  # fmt: skip
"""Of a curve's rounds, what pages take the mean of."""
AMONG_ALL = ("metrics.a_glo", "metrics.a_loc_received", "metrics.a_loc_received_all_classes")
OF_SUMS = {"5.6 [+2.4, +8.9]"}
"""Differences of differences between rows of two kinds, calculated by hand."""


def _columns(study: str, outcome: Outcome) -> Iterator[Values]:
    """Yield every column of a record, and those that follow from several.

    These are A_glo among all classes, A_loc in the papers' view, and means of parts of its curves.
    """
    columns = {path: values_of(path, outcome.runs) for path in outcome.columns.values()}
    yield from columns.values()
    if set(AMONG_ALL) <= columns.keys():
        yield _among_all(*map(columns.__getitem__, AMONG_ALL))
    for test_set in (OWN, CLASSES, WHOLE):
        if (found := in_the_papers_view(study, outcome, test_set)) is not None:
            yield found
    for name in outcome.curves.values():
        curves = {(run.row, run.seed): run.curves.get(name) for run in outcome.runs}
        for part in PARTS.values():
            found: dict[Cell, dict[int, float | None]] = {}
            for (cell, seed), curve in curves.items():
                if known := [value for value in curve or () if value is not None]:
                    found.setdefault(cell, {})[seed] = 100 * float(np.mean(known[part]))
            yield found


def _among_all(a_glo: Values, received: Values, unmasked: Values) -> Values:
    """Return A_glo among all classes.

    Where clients hold no more than everyone's model, A_glo is their A_loc by either rule. Other
    methods predict by it among all classes.
    """
    return {
        cell: {
            seed: unmasked[cell].get(seed) if value == received[cell].get(seed) else value
            for seed, value in found.items()
        }
        for cell, found in a_glo.items()
    }


def _differences(column: Values) -> Iterator[NDArray[np.float64]]:
    """Yield all paired differences of a column, and by how much one changes with the setting."""
    by_rows: dict[tuple[str, str], list[dict[int, float]]] = {}
    for one, other in permutations(column, 2):
        pairs = {
            seed: value - base
            for seed, value in column[one].items()
            if value is not None and (base := column[other].get(seed)) is not None
        }
        yield np.array(list(pairs.values()))
        if one.setting == other.setting:
            by_rows.setdefault((one.row, other.row), []).append(pairs)
    for found in by_rows.values():
        for first, second in permutations(found, 2):
            yield np.array([first[seed] - second[seed] for seed in first.keys() & second.keys()])


@cache
def quantile(count: int, p: float = 1 - CONFIDENCE) -> float:
    """Return how many standard errors from zero a mean of so many pairs is at this p-value."""
    return float(t.isf(p / 2, count - 1))


@cache
def intervals(record: str) -> NDArray[np.float64]:
    """Return every paired difference of a record, (n, 4): mean, both ends, and whether it stays.

    It stays where its p-value is none above those that stay among the study's own comparisons.
    """
    found, outcome = [], read_record(RECORDS / f"{record}.json")
    columns = map(_differences, _columns(record, outcome))
    for pairs in chain(chain.from_iterable(columns), _of_views(outcome)):
        if len(pairs) > 1:
            mean, error = pairs.mean(), pairs.std(ddof=1) / np.sqrt(len(pairs))
            half = quantile(len(pairs)) * error
            least = (1 - 1e-6) * quantile(len(pairs), outcome.kept_up_to)
            stays = not error or abs(mean) / error >= least
            found.append((mean, mean - half, mean + half, stays))
    return np.array(found).reshape(-1, 4)


def _of_views(outcome: Outcome) -> Iterator[NDArray[np.float64]]:
    """Yield what each row has more in one view, test set or set of classes than in another.

    And what its clients' models have on own classes over everyone's model on the whole set, and
    what GLDP's local prototypes have over its global ones.
    """
    views, masks = ("received", "trained"), ("", MET, ALL)
    names = {
        (view, test_set, mask): values_of(f"metrics.a_loc_{view}{test_set}{mask}", outcome.runs)
        for view in views
        for test_set in (OWN, CLASSES, WHOLE)
        for mask in masks
    }
    whole = values_of("metrics.a_glo_balanced", outcome.runs)
    both = [
        (names[one], names[other])
        for one, other in permutations(names, 2)
        if sum(a != b for a, b in zip(one, other, strict=True)) == 1
    ]
    local = values_of("metrics.a_loc_gldp_lp", outcome.runs), names["received", OWN, ""]
    for found, bases in [*both, (names["received", CLASSES, ""], whole), local]:
        for cell, seeds in found.items():
            base = bases.get(cell, {})
            yield np.array(
                [
                    v - b
                    for s, v in seeds.items()
                    if v is not None and (b := base.get(s)) is not None
                ]
            )


def stated(text: str) -> Iterator[tuple[int, tuple[str, str, str, str]]]:
    """Yield the line of each interval in a page's prose: its mean, its ends, and † or nothing."""
    prose = MARKED.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in STATED.finditer(prose):
        yield prose[: found.start()].count("\n") + 1, found.groups()


def shown_on(page: str) -> frozenset[str]:
    """Return the names of the studies' records that a page of ``docs/results`` shows."""
    marks = (mark[2] for mark in MARKED.finditer((PAGES / page).read_text()))
    return frozenset(name for name in marks if (RECORDS / f"{name}.json").exists())


def linked_on(text: str) -> frozenset[str]:
    """Return the names of the records behind the pages of results that a text links."""
    pages = set(re.findall(r"\((?:results/)?([\w-]+\.md)", text))
    there = {page for page in pages if (PAGES / page).exists()}
    return frozenset[str]().union(*map(shown_on, there))


def passages(page: Path) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Yield the parts of a page: the line above each, its text, and the records behind it.

    These are the sections of a page, and the lines of the overview.
    """
    text = page.read_text()
    if page.stem == "results":
        for number, line in enumerate(text.splitlines()):
            yield number, line, linked_on(line)
        return
    starts = [0, *(found.start() for found in re.finditer(r"^##+ ", text, flags=re.MULTILINE))]
    for start, end in pairwise([*starts, len(text)]):
        section = text[start:end]
        yield text[:start].count("\n"), section, shown_on(page.name) | linked_on(section)


def is_recorded(numbers: Sequence[str], records: Iterable[str]) -> bool:
    """Tell whether a record has this difference, in the digits given; its sign may be in words."""
    return bool(len(matching(numbers, records)))


def matching(numbers: Sequence[str], records: Iterable[str]) -> NDArray[np.float64]:
    """Return the recorded differences that are these in the digits given, (n, 4)."""
    mean, low, high = (float(number.replace("−", "-")) for number in numbers)
    room = [0.51 * 10 ** -len(number.partition(".")[2]) for number in numbers]
    found = np.concatenate([np.zeros((0, 4)), *map(intervals, sorted(records))])
    apart = np.abs(np.abs(found[:, 0]) - abs(mean)) <= room[0]
    ends = np.abs(found[:, 1:3] - [low, high]) <= room[1:]
    return found[apart & ends.all(axis=1)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_intervals_of_the_prose_are_those_of_the_records(page):
    unknown = [
        f"line {above + line}: {mean} [{low}, {high}]"
        for above, text, records in passages(page)
        for line, (mean, low, high, _) in stated(text)
        if not is_recorded((mean, low, high), records) and f"{mean} [{low}, {high}]" not in OF_SUMS
    ]
    assert not unknown


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_verdicts_say_which_intervals_do_not_stay_after_correction(page):
    """A dagger stands behind each interval without zero that stays in none of its records."""
    wrong = [
        f"line {above + line}: {mean} [{low}, {high}]{mark}"
        for above, text, records in passages(page)
        for line, (mean, low, high, mark) in stated(text)
        if (low[0] == "−") == (high[0] == "−")
        and f"{mean} [{low}, {high}]" not in OF_SUMS
        and (mark == "†") == bool(matching((mean, low, high), records)[:, 3].any())
    ]
    assert not wrong


def test_code_states_no_interval():
    """What studies came to lives on the results' pages, which are made from records."""
    stating = [
        f"{file.relative_to(ROOT)}: {numbers}"
        for package in ("models", "fedsrv", "fedcli", "fedtide")
        for file in sorted((ROOT / package).rglob("*.py"))
        for docstring in DOCSTRING.findall(file.read_text())
        for _, numbers in stated(docstring)
    ]
    assert not stating


@pytest.mark.parametrize("page", ["gldp", "why-the-tables-differ"])
def test_figures_without_an_interval_are_of_the_pages_tables_or_of_a_paper(page):
    """More seeds move the means that a sentence names, and not the sentence."""
    text = (PAGES / f"{page}.md").read_text()
    tables = " ".join(found[0] for found in MARKED.finditer(text))
    known = {abs(float(number)) for number in re.findall(r"(?<![\w.])\d+\.\d+|\d+", tables)}
    for table in tables_of():
        known |= {figure for row in table.table.figures.values() for figure in row}
    prose = STATED.sub(" ", MARKED.sub("", text))
    prose = re.sub(r"\[[^\]]*\]", " ", prose)  # words of links, which have figures of other pages
    unknown = {
        number
        for number in re.findall(r"(?<![\w.=`])\d+\.\d+(?![\w.]*[\w`])", prose)
        if not any(abs(one - float(number)) <= 0.501 * 10 ** -len(number.partition(".")[2])
                   for one in known)
    }  # fmt: skip
    assert not unknown


EQUIVALENT = re.compile(r"(?i:equivalent) within (\d+(?:\.\d+)?)\b(?! and )([^|;]*)")
WIDEST = 3.0
"""Points: a wider margin is not what a reader calls equal; say which effect is excluded."""


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_equivalence_is_said_of_intervals_within_a_small_margin(page):
    """``+3.7 [−6.5, +13.8]`` excludes a gain of 20 points; it was called equivalent within 20."""
    text = page.read_text()
    assert "equivalent within 20 and" not in text.lower()
    for found in EQUIVALENT.finditer(text):
        margin = float(found[1])
        ends = [
            float(end.replace("−", "-")) for _, *both, _ in STATED.findall(found[2]) for end in both
        ]
        assert margin <= WIDEST, found[0]
        assert all(abs(end) <= margin for end in ends), found[0]


@pytest.mark.parametrize("file", sorted(RECORDS.glob("*.json")), ids=lambda file: file.stem)
def test_seeds_that_were_added_after_a_look_are_said(file):
    """Later seeds that share no commit with the first three ran after these had been read."""
    commits: dict[bool, set[str]] = {True: set(), False: set()}
    for run in read_record(file).runs:
        commits[run.seed < 3].add(str(run.environment.get("git_commit")))
    if not commits[False] or commits[True] & commits[False]:
        return
    section = (PAGES / "open-questions.md").read_text().partition("## Seeds added after a look")[2]
    assert f"[`{file.stem}`]" in section.partition("\n## ")[0]
