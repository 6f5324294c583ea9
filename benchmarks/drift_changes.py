r"""How many of the changes that people meet the tests of drift find, and how often they are wrong.

    python -m benchmarks.drift_changes [--people 100] [--times 10] [--keep]

Of the recordings that ``FEDTIDE_DATA`` names (``uci_har.npz``, ``motionsense.npz`` and
``wisdm.npz``), a client's last task changes: all values are turned by a quarter about one axis,
multiplied by 1.3, or taken at half the rate (two windows that follow each other, every other
value); labels of two classes are swapped, the gyroscope is at 0; or the task is somebody else's,
or of the watch after the phone.

- *1 person, 3 earlier tasks*: quarters of each activity, in their order, and no session is named;
- *1 person, 1 earlier task*: the last two of these;
- *several people*: as many as give about 1,000 rows in each of two tasks, to which the sessions of
  each activity are dealt at random. Sessions are named: one activity of one person without a break;
- *all people*: all rows, dealt in the same way, of which a client looks at 1,000;
- *no change*: sessions of one, two, or several people drawn at random, dealt in the same way.

A row has the share of comparisons that reach the level of the coordinator's alarm after a quiet
time (0.00025), with Wilson's interval of 95 %, by the tests as they are, and as they were without
spectra and single classes; and the share whose errors a detector finds changed. The errors are of
a ridge regression on the watched numbers, trained on the earlier data but the last quarter or half,
whose errors the detector sees first. ADWIN is river's, where that is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.drift import LEVEL, RECORDINGS
from benchmarks.measure import parser_of, tell
from benchmarks.measured import given_as, keep
from fedmodels.numerics.data_drift import MAX_EXAMPLES, Summary, Watched, moved
from fedmodels.numerics.data_drift_numbers import Numbers
from fedplugins.detectors.interface import DriftDetector, detections
from fedplugins.detectors.page_hinkley import PageHinkley
from fedplugins.drift.columns import WatchedWords
from fedplugins.drift.one_class import in_one_class

CLASSES, QUARTERS, ROWS, RIDGE = 6, 4, 1000, 100.0
Floats, Ints, Bools = NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]
ALARMS, BEFORE = "alarms", "alarms_before"


@dataclass(frozen=True)
class Rows:
    """Windows as they are watched."""

    values: Floats  # (n, v)
    y: Ints
    session: Ints
    client: Ints  # the person, and the device
    quarter: Ints  # of the time of an activity of a client

    def of(self, mine: Bools | Ints) -> Rows:
        """Return some of them."""
        return Rows(*(part[mine] for part in vars(self).values()))


def read(file: Path) -> dict[str, Rows]:
    """Return a recording as it is, and with each change that is made window by window."""
    held = np.load(file)
    x, y = held["X"].astype(np.float32), held["y"].astype(np.int64)
    client = held["subject"].astype(np.int64) * 4 + held["device"].astype(np.int64)
    trial = held["trial"].astype(np.int64) if "trial" in held.files else np.zeros(len(y), np.int64)
    breaks = [np.diff(part, prepend=-1) != 0 for part in (y, client, trial)]
    session, quarter = np.cumsum(np.any(breaks, axis=0)), np.zeros(len(y), np.int64)
    for one in np.unique(client):
        for label in np.unique(y[client == one]):
            parts = np.array_split(np.flatnonzero((client == one) & (y == label)), QUARTERS)
            for number, part in enumerate(parts):
                quarter[part] = number
    step = 2 if "uci" in file.name else 1  # its windows overlap by half
    first = np.flatnonzero(session[step:] == session[:-step])
    joined = np.concatenate([x[first], x[first + step]], axis=1)[:, ::2]
    turned = x[..., [1, 0, 2, 4, 3, 5]] * np.array([1, -1, 1, 1, -1, 1], np.float32)
    centre, scale, numbers = x.mean((0, 1)), x.std((0, 1)), Numbers(x.shape[1:])

    def watched(raw: Floats, mine: Any = slice(None)) -> Rows:
        values = numbers.of(torch.from_numpy((raw - centre) / scale)).numpy()
        return Rows(values, *(part[mine] for part in (y, session, client, quarter)))

    silent = x * np.array([1, 1, 1, 0, 0, 0], np.float32)
    return {
        "nothing": watched(x), "device turned by 90°": watched(turned),
        "gain × 1.3": watched(1.3 * x),
        "half the sampling rate": watched(joined, first), "gyroscope dead": watched(silent),
    }  # fmt: skip


# --- tests --------------------------------------------------------------------------------------


def summary(task: int, rows: Rows, named: bool) -> Summary:
    """Return what a client keeps of a task."""
    y = torch.from_numpy(rows.y)
    sessions = torch.from_numpy(rows.session) if named else None
    of = Watched(torch.from_numpy(rows.values), 6, y, y, CLASSES, sessions)
    return Summary.of(task, of)


def without_spectra(one: Summary, numbers: Numbers) -> Summary:
    """Return a summary as it was before spectra were watched."""
    v = len(one.noise)
    first = v - len(numbers.octaves) * numbers.channels
    cells = torch.cat([one.cells[:, :first], one.cells[:, v:]], 1)
    return replace(one, cells=cells, noise=one.noise[:first])


def alarms(earlier: list[Rows], now: Rows, named: bool) -> dict[str, bool]:
    """Return whether there is an alarm, by the tests as they are and as they were."""
    shape = 128, 6
    numbers, columns = Numbers(shape), WatchedWords("input", shape, CLASSES).columns
    *kept, last = (summary(n, rows, named) for n, rows in enumerate([*earlier, now]))
    found = moved(kept, None, last, columns=columns, more=[in_one_class])
    before = moved(
        [without_spectra(one, numbers) for one in kept], None, without_spectra(last, numbers)
    )
    pairs = (ALARMS, found), (BEFORE, before)
    return {name: one is not None and one.p <= LEVEL for name, one in pairs}


def detectors() -> dict[str, Callable[[], DriftDetector]]:
    """Return the detectors that are here."""
    here: dict[str, Callable[[], DriftDetector]] = {"page_hinkley": PageHinkley}
    with suppress(ImportError):
        from river.drift import ADWIN

        here["adwin"] = ADWIN
    return here


def errors_changed(learned: Rows, seen: Rows, now: Rows) -> dict[str, bool]:
    """Return which detectors find a change in a model's errors on a task after those before."""
    centre, scale = learned.values.mean(0), learned.values.std(0) + 1e-3
    x, u = ((rows.values - centre) / scale for rows in (learned, seen.of(np.arange(len(seen.y)))))
    z, targets = (now.values - centre) / scale, np.eye(CLASSES)[learned.y]
    weights = np.linalg.solve(x @ x.T + RIDGE * np.eye(len(x)), targets - targets.mean(0))

    def errors(at: Floats, y: Ints) -> list[float]:
        named = (at @ x.T @ weights + targets.mean(0)).argmax(1)
        return [float(wrong) for wrong in named != y]

    history = errors(u, seen.y)
    values = [*history, *errors(z, now.y)]
    return {
        name: any(place >= len(history) for place in detections(make, values))
        for name, make in detectors().items()
    }


# --- tasks --------------------------------------------------------------------------------------


def swapped(rows: Rows, rng: np.random.Generator) -> Rows:
    """Return rows whose labels of two classes are swapped."""
    one, other = rng.choice(np.unique(rows.y), 2, replace=False)
    turn = np.arange(CLASSES)
    turn[[one, other]] = other, one
    return replace(rows, y=turn[rows.y])


def sampled(rows: Rows, rng: np.random.Generator) -> Rows:
    """Return what a client looks at."""
    return rows.of(np.sort(rng.permutation(len(rows.y))[:MAX_EXAMPLES]))


def dealt(rows: Rows, rng: np.random.Generator) -> Bools:
    """Return the half of the sessions of each activity."""
    first = np.zeros(len(rows.y), dtype=bool)
    for label in np.unique(rows.y):
        several = rng.permutation(np.unique(rows.session[rows.y == label]))
        first |= np.isin(rows.session, several[: len(several) // 2])
    return first


Case = tuple[str, str, list[Rows], Rows, bool, tuple[Rows, Rows]]
"""Size, change, earlier tasks, task, whether sessions are named; learned and seen before."""


def of_one_person(data: dict[str, Rows], people: Ints, rng: np.random.Generator) -> Iterator[Case]:
    """Yield the comparisons of each person."""
    here = data["nothing"]
    beside = dict(zip(people, np.roll(people, -2), strict=True))  # not the watch of the same person
    for person in people:
        quarters = [here.of((here.client == person) & (here.quarter == n)) for n in range(QUARTERS)]
        cases = {what: rows.of((rows.client == person) & (rows.quarter == QUARTERS - 1))
                 for what, rows in data.items()}  # fmt: skip
        cases["labels of two classes swapped"] = swapped(quarters[-1], rng)
        others = {"another person": beside[person]}
        if person % 4 == 0 and person + 1 in here.client:
            others["from phone to watch"] = person + 1
        last = here.quarter == QUARTERS - 1
        cases |= {what: here.of((here.client == one) & last) for what, one in others.items()}
        learned = here.of((here.client == person) & (here.quarter < QUARTERS - 2))
        for what, now in cases.items():
            for count in (1, 3):
                size = f"1 person, {count} earlier task{'s' if count > 1 else ''}"
                earlier = quarters[-1 - count : -1]
                yield size, what, earlier, now, False, (learned, quarters[-2])


def of_several(
    size: str, data: dict[str, Rows], groups: list[Ints], rng: np.random.Generator
) -> Iterator[Case]:
    """Yield the comparisons of groups of people, whose sessions are dealt to two tasks."""
    here = data["nothing"]
    both = np.unique(here.client[np.isin(here.client + 1, here.client) & (here.client % 4 == 0)])
    for number, group in enumerate(groups):
        mine = here.of(np.isin(here.client, group))
        first = dealt(mine, rng)
        before, rest = sampled(mine.of(first), rng), np.unique(mine.session[~first])
        half = dealt(before, rng)
        known = before.of(half), before.of(~half)
        cases = {w: sampled(rows.of(np.isin(rows.session, rest)), rng) for w, rows in data.items()}
        cases["labels of two classes swapped"] = swapped(cases["nothing"], rng)
        if len(groups[0]) < len(np.unique(here.client)) / 2:
            other = here.of(np.isin(here.client, groups[number - 1]))
            cases["other people"] = sampled(other.of(dealt(other, rng)), rng)
        for what, now in cases.items():
            yield size, what, [before], now, True, known
    if len(both) and groups:
        phones = here.of(np.isin(here.client, both))
        watches = here.of(np.isin(here.client, both + 1))
        before = sampled(phones, rng)
        half = dealt(before, rng)
        known = before.of(half), before.of(~half)
        yield size, "from phone to watch", [before], sampled(watches, rng), True, known


def grouped(rows: Rows, people: Ints, times: int, rng: np.random.Generator) -> list[Ints]:
    """Return groups of people of about 2,000 rows, over and over."""
    each = max(round(2 * ROWS * len(people) / len(rows.y)), 1)
    count, found = len(people) // each, list[Ints]()
    while count and len(found) < times:
        found += np.split(rng.permutation(people)[: count * each], count)
    return found


def of_level(data: dict[str, Rows], times: int, rng: np.random.Generator) -> Iterator[Case]:
    """Yield comparisons without a change, of groups of people that are drawn at random."""
    here = data["nothing"]
    people = np.unique(here.client)
    for count in (1, 2, 6):
        what = f"{count} person" if count == 1 else f"{count} people"
        for _ in range(5 * times):
            mine = here.of(np.isin(here.client, rng.permutation(people)[:count]))
            first = dealt(mine, rng)
            if len(np.unique(mine.session)) < 2 * CLASSES:  # one session of each activity
                continue
            earlier, now = (sampled(mine.of(half), rng) for half in (first, ~first))
            yield "no change", what, [earlier], now, True, (earlier, now)


def interval(hits: int, n: int) -> str:
    """Return Wilson's interval of 95 % of a share."""
    z, share = 1.96, hits / n
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return f"{max(middle - half, 0):.2f}–{min(middle + half, 1):.2f}"


def table(place: Path, most: int, times: int) -> list[dict[str, Any]]:
    """Return the rows on all recordings."""
    found: dict[tuple[str, str, str], list[dict[str, bool]]] = {}
    sizes: dict[tuple[str, str, str], list[int]] = {}
    for name, file in RECORDINGS.items():
        rng, data = np.random.default_rng(0), read(place / f"{file}.npz")
        people = np.unique(data["nothing"].client)[:most]
        data = {what: rows.of(np.isin(rows.client, people)) for what, rows in data.items()}
        groups = grouped(data["nothing"], people, times, rng)
        cases = chain(
            of_one_person(data, people, rng),
            of_several("several people", data, groups, rng),
            of_several("all people", data, [people] * times, rng),
            of_level(data, times, rng),
        )
        for size, what, earlier, now, named, known in cases:
            key = size, what, name
            hits = alarms(earlier, now, named)
            if not (size.endswith("1 earlier task") or size == "no change"):
                hits |= errors_changed(*known, now)
            found.setdefault(key, []).append(hits)
            sizes.setdefault(key, []).append(len(now.y))
    return [
        {
            "size": size, "what": what, "data": name, "rows": int(np.median(sizes[key])),
            "comparisons": len(rows),
            ALARMS: float(np.mean([row[ALARMS] for row in rows])),
            "interval": interval(sum(row[ALARMS] for row in rows), len(rows)),
            BEFORE: float(np.mean([row[BEFORE] for row in rows])),
            **{one: float(np.mean([row[one] for row in rows]))
               for one in ("page_hinkley", "adwin") if one in rows[0]},
        }
        for key in sorted(found, key=lambda key: [*found].index(key))
        for (size, what, name), rows in [(key, found[key])]
    ]  # fmt: skip


def main() -> None:
    """Print the tables, one for each size."""
    parser = parser_of("drift_changes", __doc__, "drift-changes")
    parser.add_argument("--people", type=int, default=100, help="of each recording, at most")
    parser.add_argument("--times", type=int, default=10, help="groups of people, at least")
    options = parser.parse_args()
    held = Path(os.environ.get("FEDTIDE_DATA", ""), "uci_har.npz")
    rows = table(held.parent, options.people, options.times) if held.is_file() else []
    by_size: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_size.setdefault(row.pop("size"), []).append(row)
    for size, some in by_size.items():
        some.sort(key=lambda row: row["what"] != "nothing")
        tell(size, some)
    if options.keep:
        keep(options.keep, given_as("drift_changes"), by_size)


if __name__ == "__main__":
    main()
