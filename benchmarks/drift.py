r"""False alarms and power of the tests of drift, on recordings and on numbers that are drawn.

    python -m benchmarks.drift [--people 100] [--times 200] [--resume rows.jsonl] [--keep]

Recordings are those that ``FEDTIDE_DATA`` names: ``uci_har.npz``, ``motionsense.npz`` and
``wisdm.npz``; without them their rows are left out. A comparison is of two tasks of one person,
unless a row says otherwise. Columns are shares of comparisons: with a p-value below 0.01; at the
level of the coordinator's alarm (0.05 / 2 / 100, where nothing was found lately); and, beside them,
with the tests of earlier versions at 0.01: Kolmogorov-Smirnov tests of 32 random projections, with
Bonferroni's correction, which take examples for independent.

With ``--resume`` each row goes into a file when it is measured, and rows that are there are not
measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import ks_2samp

from benchmarks.measure import parser_of, tell
from benchmarks.measured import given_as, keep
from fedmodels.facts.position import Task
from fedmodels.numerics.alarm_levels import ALPHA, ETA
from fedmodels.numerics.data_drift import Summary, Watched, moved
from fedmodels.numerics.data_drift_numbers import Numbers
from fedplugins.drift.server import MEMORY, Seen

RECORDINGS = {"UCI HAR": "uci_har", "MotionSense": "motionsense", "WISDM": "wisdm"}
LEVEL = ALPHA * ETA / MEMORY
CLASSES, MONTHS, SLOPE, SITES = 6, 24, 0.15, 30
Given = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64] | None]
"""Inputs, labels, and sessions where these are named."""
Row = dict[str, Any]


def summary(task: int, given: Given) -> Summary:
    """Return what a client keeps of a task."""
    x, y, sessions = given
    numbers, labels = Numbers(x.shape[1:]), torch.from_numpy(y)
    named = None if sessions is None else torch.from_numpy(sessions)
    values = numbers.of(torch.from_numpy(x))
    return Summary.of(task, Watched(values, numbers.spreads, labels, labels, CLASSES, named))


def chance(earlier: Given, now: Given) -> float:
    """Return the p-value of a task beside one before."""
    found = moved([summary(0, earlier)], None, summary(1, now))
    return 1.0 if found is None else found.p


def chance_before(earlier: Given, now: Given) -> float:
    """Return the p-value that earlier versions gave."""
    parts: list[Any] = [x.reshape(len(x), -1) for x in (earlier[0], now[0])]
    if parts[0].shape[1] > 32:
        draw = np.random.default_rng(0).standard_normal((parts[0].shape[1], 32))
        parts = [x @ draw for x in parts]
    columns = zip(parts[0].T, parts[1].T, strict=True)
    least = min(ks_2samp(*two, method="asymp").pvalue for two in columns)
    return float(min(1.0, parts[0].shape[1] * least))


def shares(what: str, data: str, pairs: Iterator[tuple[Given, Given]]) -> Row:
    """Return a row of how often pairs of tasks are told apart."""
    found = [(chance(*pair), chance_before(*pair)) for pair in pairs]
    p, before = np.array(found).T
    return {
        "what": what, "data": data, "comparisons": len(found),
        "p_small": float((p < 0.01).mean()), "alarms": float((p <= LEVEL).mean()),
        "ks_tests": float((before < 0.01).mean()),
    }  # fmt: skip


# --- tasks --------------------------------------------------------------------------------------


def people(file: Path, most: int) -> Iterator[Given]:
    """Yield the recording of each person and device, standardised by channel; runs are sessions."""
    held = np.load(file)
    x = held["X"].astype(np.float32)
    x = (x - x.mean((0, 1))) / x.std((0, 1))
    who = held["subject"].astype(int) * 4 + held["device"].astype(int)
    for one in np.unique(who)[:most]:
        mine = who == one
        y = held["y"][mine].astype(np.int64)
        trial = held["trial"][mine] if "trial" in held.files else np.zeros(len(y), np.int64)
        begins = (np.diff(y, prepend=-1) != 0) | (np.diff(trial.astype(int), prepend=-1) != 0)
        yield x[mine], y, np.cumsum(begins).astype(np.int64)


def cut(given: Given, first: NDArray[np.bool_], named: bool = False) -> tuple[Given, Given]:
    """Return two tasks of one recording; sessions stay named where that is said."""
    x, y, sessions = given
    assert sessions is not None
    parts = [(x[some], y[some], sessions[some] if named else None) for some in (first, ~first)]
    return parts[0], parts[1]


def halves(given: Given) -> tuple[Given, Given]:
    """Return the first and the second half of each activity."""
    first = np.zeros(len(given[1]), dtype=bool)
    for label in np.unique(given[1]):
        mine = np.flatnonzero(given[1] == label)
        first[mine[: len(mine) // 2]] = True
    return cut(given, first)


def by_session(given: Given, rng: np.random.Generator) -> tuple[Given, Given]:
    """Return a person's sessions dealt out at random, those of each activity to both tasks."""
    _, y, sessions = given
    assert sessions is not None
    first = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        several = rng.permutation(np.unique(sessions[y == label]))
        first |= np.isin(sessions, several[: len(several) // 2 or int(rng.integers(2))])
    return cut(given, first, named=True)


def drawn(rng: np.random.Generator, n: int, d: int, weights: Any = None, run: int = 1) -> Given:
    """Return normal numbers of independent examples, whose labels come in runs."""
    y = np.repeat(rng.choice(CLASSES, n // run, p=weights), run)
    return rng.standard_normal((n, d)).astype(np.float32), y.astype(np.int64), None


def with_four(pair: tuple[Given, Given], rng: np.random.Generator) -> tuple[Given, Given]:
    """Return a pair whose second task has one number moved by four of its deviations."""
    (earlier, (x, y, sessions)) = pair
    flat = x.reshape(len(x), -1).copy()
    place = int(rng.integers(flat.shape[1]))
    flat[:, place] += 4 * flat[:, place].std()
    return earlier, (flat.reshape(x.shape), y, sessions)


def with_label(given: Given, rng: np.random.Generator) -> tuple[Given, Given]:
    """Return two tasks of windows in any order, of which the second has more of one activity.

    Of the other five, one window in five stays: so one of six comes to be one of two.
    """
    x, y, _ = given
    order = rng.permutation(len(y))
    first, second = order[: len(y) // 2], order[len(y) // 2 :]
    label = int(rng.choice(np.unique(y)))
    second = second[(y[second] == label) | (rng.random(len(second)) < 0.2)]
    return (x[first], y[first], None), (x[second], y[second], None)


# --- tables -------------------------------------------------------------------------------------


Pair = Callable[[Given, np.random.Generator], tuple[Given, Given]]
OF_RECORDINGS: dict[str, Pair] = {
    "nothing: windows at random": lambda t, r: cut(t, r.random(len(t[1])) < 0.5),
    "nothing: halves of a recording": lambda t, r: halves(t),
    "nothing: sessions at random": by_session,
    "one number of 768 by 4 σ, halves": lambda t, r: with_four(halves(t), r),
    "an activity from 1/6 to 1/2": with_label,
}
MORE = [0.5, *[0.1] * 5]
DRAWN: dict[tuple[str, str], Callable[[np.random.Generator], tuple[Given, Given]]] = {
    ("nothing", "drawn, 9 numbers"): lambda r: (drawn(r, 200, 9), drawn(r, 200, 9)),
    ("nothing", "drawn, 768 numbers"): lambda r: (drawn(r, 200, 768), drawn(r, 200, 768)),
    ("one number of 768 by 4 σ", "drawn, 768 numbers"): lambda r: with_four(
        (drawn(r, 200, 768), drawn(r, 200, 768)), r
    ),
    ("a class from 1/6 to 1/2", "drawn, 9 numbers"): lambda r: (
        drawn(r, 200, 9), drawn(r, 200, 9, MORE),
    ),
    ("a class from 1/6 to 1/2", "drawn, 9 numbers, labels in runs of 10"): lambda r: (
        drawn(r, 200, 9, run=10), drawn(r, 200, 9, MORE, 10),
    ),
}  # fmt: skip


def of_people(what: str, data: str, file: Path, most: int) -> Row:
    """Return a row on a recording's people."""
    rng = np.random.default_rng(0)
    return shares(what, data, (OF_RECORDINGS[what](one, rng) for one in people(file, most)))


def of_drawn(what: str, data: str, times: int) -> Row:
    """Return a row on numbers that are drawn."""
    rng = np.random.default_rng(0)
    return shares(what, data, (DRAWN[what, data](rng) for _ in range(times)))


def comparisons(place: Path | None, most: int, times: int) -> dict[str, Callable[[], Row]]:
    """Return what measures single comparisons, by name; WISDM has one session of each activity."""
    found = dict[str, Callable[[], Row]]()
    for what in OF_RECORDINGS if place else ():
        for data, name in RECORDINGS.items():
            if (what, data) != ("nothing: sessions at random", "WISDM"):
                file = Path(str(place), f"{name}.npz")
                found[f"{what}, {data}"] = partial(of_people, what, data, file, most)
    for what, data in DRAWN:
        found[f"{what}, {data}"] = partial(of_drawn, what, data, times)
    return found


def slow(reference: str, d: int, times: int) -> Row:
    """Return in how many of 23 months a drift of 0.15 σ a month is seen, and from when on."""
    rng, seen = np.random.default_rng(0), np.zeros((times, MONTHS), dtype=bool)
    before = np.zeros_like(seen)
    for run in range(times):
        kept, last = list[Summary](), None
        for month in range(MONTHS):
            task = drawn(rng, 200, d)
            task[0][:, 3] += SLOPE * month
            now = summary(month, task)
            window = kept[:3] if reference == "first" else kept[-12:]
            found = moved(window, kept[-1] if len(kept) > 1 else None, now)
            seen[run, month] = found is not None and found.p <= LEVEL
            before[run, month] = last is not None and chance_before(last, task) < 0.01
            kept, last = [*kept, now], task
    first = [int(row.argmax()) + 1 if row.any() else MONTHS + 1 for row in seen]
    return {
        "reference": "first 3 tasks" if reference == "first" else "last 12 tasks",
        "data": f"drawn, {d} numbers", "streams": times,
        "months": float(seen.sum(axis=1).mean()),
        "first_month": float(np.median(first)),
        "ks_tests": float(before.sum(axis=1).mean()),
    }  # fmt: skip


def year(d: int, times: int) -> Row:
    """Return the false lines of a year at thirty sites where nothing moves."""
    rng, lines, before = np.random.default_rng(0), 0, 0
    for _ in range(times):
        tasks = [[drawn(rng, 120, d) for _ in range(12)] for _ in range(SITES)]
        kept = [[summary(month, task) for month, task in enumerate(one)] for one in tasks]
        seen = Seen()
        for month in range(1, 12):
            rows = dict[str, dict[str, float]]()
            for site in range(SITES):
                mine = kept[site]
                earlier, last = mine[: min(month, 3)], mine[month - 1] if month > 1 else None
                found = moved(earlier, last, mine[month])
                if found is not None:
                    rows[str(site)] = {"input_drift": found.amount, "input_drift_p": found.p}
                before += chance_before(tasks[site][month - 1], tasks[site][month]) < 0.01
            lines += len(seen.see(rows, dict.fromkeys(rows, Task(month))))
    return {
        "sites": SITES, "data": f"drawn, {d} numbers", "years": times,
        "false_lines": lines / times, "ks_tests": before / times,
    }  # fmt: skip


def main() -> None:
    """Print the tables."""
    parser = parser_of("drift", __doc__, "drift")
    parser.add_argument("--people", type=int, default=100, help="of each recording, at most")
    parser.add_argument("--times", type=int, default=200, help="comparisons of drawn numbers")
    parser.add_argument("--resume", type=Path, help="a file that rows are kept in")
    options = parser.parse_args()
    held = os.environ.get("FEDTIDE_DATA")
    place = Path(held) if held and (Path(held) / "uci_har.npz").exists() else None
    few = max(options.times // 10, 1)
    tables: dict[str, dict[str, Callable[[], Row]]] = {
        "Two tasks": comparisons(place, options.people, options.times),
        "0.15 σ a month, for two years": {
            f"{reference}, {d}": partial(slow, reference, d, few)
            for reference, d in (("first", 9), ("first", 768), ("sliding", 9))
        },
        "A year of thirty sites where nothing moves": {"year, 9": partial(year, 9, few)},
    }
    done: dict[str, Row] = {}
    if options.resume and options.resume.exists():
        for line in options.resume.read_text().splitlines():
            done |= json.loads(line)
    found = dict[str, list[Row]]()
    for title, rows in tables.items():
        for name, measured in rows.items():
            key = f"{title}: {name}: {options.people}, {options.times}"
            if key not in done:
                done[key] = measured()
                if options.resume:
                    with options.resume.open("a") as file:
                        file.write(json.dumps({key: done[key]}) + "\n")
            found.setdefault(title, []).append(done[key])
        tell(title, found[title])
    if options.keep:
        keep(options.keep, given_as("drift"), found)


if __name__ == "__main__":
    main()
