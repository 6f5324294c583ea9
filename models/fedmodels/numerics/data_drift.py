"""Whether a client's examples moved since its earlier tasks, where examples depend on each other.

Examples of one recording resemble each other, so their number says little of how sure a difference
is. What is compared are means over *cells*: the examples of one class in one session. A task
without named sessions is one session; where that gives fewer than ``MIN_CELLS`` cells, examples of
a class that follow each other are cut into more.

1. *Within classes.* Of each watched number (:mod:`fedmodels.numerics.data_drift_numbers`), cells
   are modelled as a mean by class and a shift of the present task: a t-test of the shift, with
   cells less classes less 1 degrees of freedom. So a session that differs, one class at a time, is
   no shift; what moves in all classes together is one. The variance over cells is moderated by
   that of all numbers: Smyth, Linear Models and Empirical Bayes Methods for Assessing Differential
   Expression in Microarray Experiments, SAGMB 2004, section 6.2. It is at least what independent
   examples would have.
2. *Shares of classes.* Welch's t-test between the shares in sessions, or in ``BLOCKS`` blocks of
   examples that follow each other. The variance over blocks is at least the binomial one.
3. *Together.* The p-value of all numbers of a kind is Simes': the smallest level at which Benjamini
   and Hochberg's procedure finds one. It is doubled for the two kinds, and doubled again where two
   comparisons are made, with the reference and with the task before (Bonferroni).
4. *Columns.* Those that moved are found by Benjamini and Hochberg's procedure over all columns; the
   p-value of one is that of its numbers, put together in the same way.

Shapes: m cells and b blocks of a task, v watched values, q spreads, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MIN_CELLS, MAX_CELLS = 6, 48
"""m, where there are examples enough."""
BLOCKS, MAX_BLOCKS = 8, 16
"""b of a task without named sessions, and at most."""
MIN_EXAMPLES = 4
"""Of a cell, and of a block."""
MIN_DF = 2
"""Degrees of freedom below which nothing is said."""
MANY = 10
"""Numbers from which on their variances are moderated by each other."""
MAX_EXAMPLES = 1000
"""Examples of a task that are looked at."""
ALPHA = 0.01
"""Below this p-value a client says which number moved."""
DRIFT_PARTS = ("input", "prediction")
"""Whose drift clients report: ``…_drift``, and its p-value ``…_drift_p``."""
NAMES = tuple(f"{part}_drift{end}" for part in DRIFT_PARTS for end in ("", "_p"))
"""What a client reports, each from 0 to 1."""


class Watched(NamedTuple):
    """Examples of one task as they are watched."""

    values: Tensor  # (n, v)
    spreads: int
    """q: of so many values, the first ones, the spread is watched as well."""
    labels: Tensor  # (n,) the class, by which cells are made
    mixed: Tensor  # (n,) the class whose share is watched
    num_classes: int
    """K."""
    sessions: Tensor | None = None  # (n,)


@dataclass(frozen=True)
class Summary:
    """What is kept of the examples of a task, and no example."""

    task: Tensor  # ()
    cells: Tensor  # (m, v + q) float32: means, then logarithms of spreads
    classes: Tensor  # (m,)
    sizes: Tensor  # (m,) examples
    noise: Tensor  # (v,) float32: variance within cells
    mix: Tensor  # (b, K) examples of each class in each block
    apart: Tensor = torch.tensor(False)  # noqa: RUF009 - () whether each cell has its own sessions

    @classmethod
    def of(cls, task: int, x: Watched) -> Summary:
        """Summarise the examples of a task."""
        values = x.values.numpy().astype(np.float64)
        labels = x.labels.cpu().numpy()
        sessions = None if x.sessions is None else x.sessions.cpu().numpy()
        places, apart = _cells(labels, sessions)
        count = values.shape[1] + x.spreads
        cells, noise = np.zeros((len(places), count)), np.zeros(values.shape[1])
        for cell, place in zip(cells, places, strict=True):
            variance = values[place].var(axis=0, ddof=1)
            noise += variance / len(places)
            deviations = np.sqrt(variance[: x.spreads])
            cell[:] = [*values[place].mean(axis=0), *np.log(np.maximum(deviations, 1e-6))]
        mix = [
            np.bincount(x.mixed.cpu().numpy()[place], minlength=x.num_classes)
            for place in _blocks(len(labels), sessions)
        ]
        return cls(
            torch.tensor(task),
            torch.from_numpy(cells.astype(np.float32)),
            torch.tensor([int(labels[place[0]]) for place in places], dtype=torch.int64),
            torch.tensor([len(place) for place in places], dtype=torch.int64),
            torch.from_numpy(noise.astype(np.float32)),
            torch.from_numpy(np.array(mix, dtype=np.int64).reshape(-1, x.num_classes)),
            torch.tensor(apart),
        )

    def tensors(self, place: str) -> dict[str, Tensor]:
        """Return the summary as tensors under a place."""
        return {f"{place}/{field.name}": getattr(self, field.name) for field in fields(self)}

    def merged(self, parts: Iterable[tuple[int, int]]) -> Summary:
        """Return the summary once some classes are part of others: a label, and that of the other.

        Labels beyond K are passed over.
        """
        classes, mix = self.classes.clone(), self.mix.clone()
        for row, into in parts:
            classes[classes == row] = into
            if max(row, into) < mix.shape[1]:
                mix[:, into] += mix[:, row]
                mix[:, row] = 0
        return replace(self, classes=classes, mix=mix)

    @classmethod
    def under(cls, tensors: Mapping[str, Tensor], place: str) -> Summary | None:
        """Return the summary under a place, if there is one."""
        names = {field.name: f"{place}/{field.name}" for field in fields(cls)}
        kept = {field: tensors[name] for field, name in names.items() if name in tensors}
        return cls(**kept) if names.keys() - kept.keys() <= {"apart"} else None


def _cells(labels: Ints, sessions: Ints | None) -> tuple[list[Ints], bool]:
    """Return the places of the examples of each cell, by class and in their order.

    And whether no session has two cells of one class.
    """
    classes, counts = np.unique(labels, return_counts=True)
    classes = np.sort(classes[np.lexsort((classes, -counts))][:MAX_CELLS])
    found = list[Ints]()
    for label in classes:
        mine = np.flatnonzero(labels == label)
        several = _by_session(mine, sessions, max(MAX_CELLS // len(classes), 1))
        found += [place for place in several if len(place) >= MIN_EXAMPLES]
    pieces = -(-MIN_CELLS // max(len(found), 1))
    cut = [
        piece
        for place in found
        for piece in np.array_split(place, min(pieces, max(len(place) // MIN_EXAMPLES, 1)))
    ]
    return cut, sessions is not None and len(cut) == len(found)


def _by_session(places: Ints, sessions: Ints | None, most: int) -> list[Ints]:
    """Return places by session in the order of these; neighbours together where there are many."""
    if sessions is None:
        return [places]
    codes = np.unique(sessions[places])
    return [
        places[np.isin(sessions[places], some)]
        for some in np.array_split(codes, min(most, len(codes)))
    ]


def _blocks(count: int, sessions: Ints | None) -> list[Ints]:
    """Return the places of the examples of each block."""
    every = np.arange(count)
    named = _by_session(every, sessions, MAX_BLOCKS)
    if len(named) == 1:
        named = np.array_split(every, min(BLOCKS, max(count // MIN_EXAMPLES, 1)))
    return [place for place in named if len(place) >= MIN_EXAMPLES]


Kind = Callable[[Sequence[Summary], Summary, float], tuple[Floats, Floats]]
"""A kind of tests: of earlier tasks, the task and a resolution, p-values and amounts."""


@dataclass(frozen=True)
class Moved:
    """How far examples moved."""

    p: float
    """The chance of such a move of any number, where nothing moved."""
    number: int
    """Which number moved most surely."""
    amount: float
    """How far, from 0 to 1: the largest gap between two distributions, of normal ones where it is
    a mean or a spread; of a class the difference of shares."""
    task: int
    """The first of the tasks that were compared with."""
    others: tuple[int, ...] = ()
    """The surest number of each column that moved, ``number`` first."""


def moved(
    reference: Sequence[Summary],
    before: Summary | None,
    now: Summary,
    resolution: float = 1e-4,
    columns: Sequence[int] = (),
    more: Sequence[Kind] = (),
) -> Moved | None:
    """Compare a task with earlier ones; None where nothing can be compared.

    Args:
        reference: the tasks that slow drift is measured from.
        before: the task before, where there is one beside the reference.
        now: the task.
        resolution: a deviation over cells that is taken for none.
        columns: to which column each number belongs; each to one of its own, unless given.
        more: further kinds of tests.
    """
    several = [some for some in (reference, [before] if before else []) if some]
    tests = _within_classes, _shares, *more
    each = (
        _compared([test(some, now, resolution) for test in tests], some, columns, len(several))
        for some in several
    )
    return min(filter(None, each), key=lambda one: one.p, default=None)


def _compared(
    kinds: Sequence[tuple[Floats, Floats]], earlier: Sequence[Summary], columns: Sequence[int],
    times: int,
) -> Moved | None:  # fmt: skip
    """Return what kinds of tests say of a task and earlier ones, of so many comparisons."""
    p, amounts = (np.concatenate(parts) for parts in zip(*kinds, strict=True))
    kind = np.repeat(np.arange(len(kinds)), [len(one) for one, _ in kinds])
    column = np.array(columns) if columns else np.arange(len(p))
    of_kinds = _together(p, kind)
    if not of_kinds:
        return None
    times *= len(of_kinds)
    least, surest = min(of_kinds)
    by_column = dict[int, tuple[float, int]]()
    for one in _together(p, len(kinds) * column + kind):
        mine = int(column[one[1]])
        by_column[mine] = min(one, by_column.get(mine, one))
    ranked = sorted(by_column.values())
    beyond = [n for n, (one, _) in enumerate(ranked, 1) if one * times * len(ranked) / n <= ALPHA]
    places = [place for _, place in ranked[: max(beyond, default=0)]]
    others = [place for place in places if column[place] != column[surest]]
    return Moved(
        min(1.0, times * least), surest, float(amounts[surest]), int(earlier[0].task),
        (surest, *others) if places else (),
    )  # fmt: skip


def _together(p: Floats, groups: Ints) -> list[tuple[float, int]]:
    """Return Simes' p-value of the tests of each group, and the place of its surest one."""
    tested, found = np.flatnonzero(~np.isnan(p)), list[tuple[float, int]]()
    for group in np.unique(groups[tested]):
        order = tested[groups[tested] == group]
        order = order[np.argsort(p[order], kind="stable")]
        adjusted = p[order] * len(order) / np.arange(1, len(order) + 1)
        found.append((float(min(1.0, adjusted.min())), int(order[0])))
    return found


# --- within classes -----------------------------------------------------------------------------


def _within_classes(
    earlier: Sequence[Summary], now: Summary, resolution: float
) -> tuple[Floats, Floats]:
    """Return the p-value (v + q,) of each number's shift within classes, and its amount."""
    from scipy.special import stdtr

    a, b = (joined(some) for some in (earlier, [now]))
    both = np.intersect1d(a.classes, b.classes)
    width, values = a.cells.shape[1], len(a.noise)
    shifts, weights, left, sizes = [], [], np.zeros(width), list[float]()
    for label in both:
        x, y = a.cells[a.classes == label], b.cells[b.classes == label]
        shifts.append(y.mean(axis=0) - x.mean(axis=0))
        weights.append(len(x) * len(y) / (len(x) + len(y)))
        left += ((x - x.mean(axis=0)) ** 2).sum(axis=0) + ((y - y.mean(axis=0)) ** 2).sum(axis=0)
        sizes += [*a.sizes[a.classes == label], *b.sizes[b.classes == label]]
    df = len(sizes) - len(both) - 1
    if df < MIN_DF:
        return np.full(width, np.nan), np.zeros(width)
    weight = np.array(weights)[:, None]
    shift = (weight * shifts).sum(axis=0) / weight.sum()
    left += (weight * (np.array(shifts) - shift) ** 2).sum(axis=0)
    noise = (a.noise + b.noise) / 2
    least = np.concatenate([noise, np.full(width - values, 0.5)]) * np.mean(1 / np.array(sizes))
    variance, freedom = moderated(left / df, least, df)
    variance = np.maximum(np.maximum(variance, least), resolution**2)
    t = shift / np.sqrt(variance / weight.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        by = np.abs(shift[:values]) / np.sqrt(noise)
    amounts = [gap_of_means(np.nan_to_num(by, posinf=1e9)), gap_of_spreads(shift[values:])]
    return 2 * stdtr(freedom, -np.abs(t)), np.concatenate(amounts)


class Cells(NamedTuple):
    """The cells of several tasks."""

    cells: Floats
    classes: Ints
    sizes: Ints
    noise: Floats


def joined(several: Sequence[Summary]) -> Cells:
    """Return the cells of several tasks, and the mean of their variances within cells."""
    return Cells(
        np.concatenate([one.cells.numpy() for one in several]).astype(np.float64),
        np.concatenate([one.classes.numpy() for one in several]),
        np.concatenate([one.sizes.numpy() for one in several]),
        np.mean([one.noise.numpy() for one in several], axis=0, dtype=np.float64),
    )


def moderated(variance: Floats, least: Floats, df: int) -> tuple[Floats, float]:
    """Return variances (d,) drawn towards their common ratio to the least ones, and freedom.

    The ratios are taken for a scaled F distribution, whose two parameters come from the mean and
    the variance of their logarithms (Smyth 2004, section 6.2).
    """
    from scipy.special import digamma, polygamma

    used = (least > 0) & (variance > 0)
    if used.sum() < MANY:
        return variance, float(df)
    logs = np.log(variance[used] / least[used]) - digamma(df / 2) + math.log(df / 2)
    beyond = float(logs.var(ddof=1) - polygamma(1, df / 2))
    if beyond <= 0:  # no more than chance differs
        return math.exp(logs.mean()) * least, 1e6
    prior = 2 * _inverse_trigamma(beyond)
    ratio = math.exp(logs.mean() + digamma(prior / 2) - math.log(prior / 2))
    return (prior * ratio * least + df * variance) / (prior + df), prior + df


def _inverse_trigamma(x: float) -> float:
    """Return where the trigamma function is x > 0, by Newton's method (Smyth 2004, appendix)."""
    from scipy.special import polygamma

    if x > 1e7 or x < 1e-6:
        return 1 / math.sqrt(x) if x > 1 else 1 / x
    y = 0.5 + 1 / x
    for _ in range(50):
        found = float(polygamma(1, y))
        step = found * (1 - found / x) / float(polygamma(2, y))
        y += step
        if -step / y < 1e-8:
            break
    return y


def gap_of_means(deviations: Floats) -> Floats:
    """Return the largest gap between two normal distributions that lie so far apart."""
    from scipy.special import ndtr

    found: Floats = 2 * ndtr(deviations / 2) - 1
    return found


def gap_of_spreads(logs: Floats) -> Floats:
    """Return the same of two with one mean, given the logarithms of the ratio of deviations."""
    from scipy.special import ndtr

    ratio = np.exp(np.minimum(np.abs(logs), 30.0)) + 1e-9
    at = ratio * np.sqrt(2 * np.log(ratio) / (ratio**2 - 1))
    found: Floats = ndtr(at) - ndtr(at / ratio)
    return found


# --- shares of classes --------------------------------------------------------------------------


def _shares(earlier: Sequence[Summary], now: Summary, resolution: float) -> tuple[Floats, Floats]:
    """Return the p-value (K,) of each class's change of share, and the change."""
    from scipy.special import stdtr

    classes = now.mix.shape[1]
    before = np.concatenate([_wide(one.mix.numpy(), classes) for one in earlier])
    mixes = before, now.mix.numpy()
    if min(map(len, mixes)) < 2:
        return np.full(classes, np.nan), np.zeros(classes)
    total = before.sum(axis=0) / before.sum(), mixes[1].sum(axis=0) / mixes[1].sum()
    pooled = (before.sum(axis=0) + mixes[1].sum(axis=0)) / (before.sum() + mixes[1].sum())
    errors, freedom = list[Floats](), list[int]()
    for mix in mixes:
        sizes = mix.sum(axis=1, keepdims=True)
        variance = (mix / sizes).var(axis=0, ddof=1)
        variance = np.maximum(variance, pooled * (1 - pooled) * np.mean(1 / sizes))
        errors.append(variance / len(mix))
        freedom.append(len(mix) - 1)
    error = errors[0] + errors[1]
    change = total[1] - total[0]
    p = np.full(classes, np.nan)
    met = error > 0
    df = error[met] ** 2 / sum(e[met] ** 2 / f for e, f in zip(errors, freedom, strict=True))
    p[met] = 2 * stdtr(df, -np.abs(change[met]) / np.sqrt(error[met]))
    return p, np.abs(change)


def _wide(mix: Ints, classes: int) -> Ints:
    """Return counts (b, K) with zeros for classes that have come since."""
    return np.pad(mix, ((0, 0), (0, classes - mix.shape[1])))
