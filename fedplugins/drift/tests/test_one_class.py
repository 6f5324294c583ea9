"""Moves of one class alone: found where sessions are named, told by name, and rarely false."""

from __future__ import annotations

import numpy as np
import torch

from fedmodels.numerics.data_drift import Summary, Watched, moved
from fedplugins.drift.client import wide
from fedplugins.drift.columns import WatchedWords
from fedplugins.drift.one_class import in_one_class

ALARM = 0.00025
"""The level of the coordinator after a quiet time."""
UNLIKE = np.array([0.3, 0.3, 0.3, 1.0, 1.0, 2.0])
"""How much sessions of each class differ: some classes are calm."""
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(rng: np.random.Generator, sessions: int, d: int = 9, heavy: bool = False) -> Rows:
    """Return sessions of six classes, six examples of each class in each session."""
    y = np.repeat(np.tile(np.arange(6), sessions), 6)
    of = (sessions * 6, d)
    level = (rng.standard_t(4, of) if heavy else rng.standard_normal(of)) * np.tile(
        UNLIKE, sessions
    )[:, None]
    x = rng.standard_normal((len(y), d)) + np.repeat(level, 6, axis=0)
    session = np.repeat(np.arange(sessions * 6), 6)
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y), torch.from_numpy(session)


def summary(task: int, rows: Rows, named: bool = True) -> Summary:
    x, y, sessions = rows
    return Summary.of(task, Watched(x, x.shape[1], y, y, 6, sessions if named else None))


def p_of(earlier: Summary, now: Summary, *more: object) -> float:
    found = moved([earlier], None, now, more=more)  # type: ignore[arg-type]
    assert found is not None
    return found.p


def test_a_move_of_one_class_is_found_and_named():
    rng = np.random.default_rng(0)
    before, (x, y, sessions) = drawn(rng, 8), drawn(rng, 8)
    x[y == 1, 4] += 3
    earlier, now = summary(0, before), summary(1, (x, y, sessions))
    assert p_of(earlier, now) > 0.01, "what all classes share hardly moved"
    words = WatchedWords("input", (9,), 6, [f"c{n}" for n in range(9)], ["sit", "lie"])
    found = moved([earlier], None, now, columns=words.columns, more=[in_one_class])
    assert found is not None
    assert found.p < ALARM
    assert found.others == (found.number,)
    line = words.line(found.number, found.amount, found.p)
    assert line.startswith("the mean of 'c4', in class 'lie', by ")
    assert "standard deviations" in line
    assert words.column(found.number) == "c4"


def test_no_move_is_told_rarely_where_classes_vary_unlike_each_other():
    """With one variance for all classes, six of 400 such pairs were below the alarm's level."""
    for heavy in (False, True):
        rng = np.random.default_rng(1)
        p = np.array([
            p_of(summary(0, drawn(rng, 3, heavy=heavy)), summary(1, drawn(rng, 3, heavy=heavy)),
                 in_one_class)
            for _ in range(150)
        ])  # fmt: skip
        assert (p < ALARM).sum() == 0
        assert (p < 0.01).sum() <= 4


def test_without_named_sessions_it_is_as_before():
    """One session does not tell how sessions vary; nor do pieces of it."""
    rng = np.random.default_rng(2)
    before, (x, y, sessions) = drawn(rng, 3), drawn(rng, 3)
    x[y == 1, 4] += 9
    for named in ((False, False), (True, False), (False, True)):
        two = summary(0, before, named[0]), summary(1, (x, y, sessions), named[1])
        assert p_of(*two, in_one_class) == p_of(*two)
    few = summary(0, drawn(rng, 1)), summary(1, drawn(rng, 1))
    assert np.isnan(in_one_class([few[0]], few[1], 0.0)[0]).all(), "two sessions of each class"
    whole = torch.zeros(len(y), dtype=torch.int64)
    one = Summary.of(0, Watched(x[y == 1], 9, whole[y == 1], whole[y == 1], 6, whole[y == 1]))
    assert not one.apart, "its one session was cut"


def test_a_summary_of_a_version_before_is_compared_by_what_it_has():
    """It has no spectra, fewer classes, and does not say whether sessions were named."""
    rng = np.random.default_rng(3)
    (x, y, s), (u, v, t) = drawn(rng, 3), drawn(rng, 3)
    u[:, 2] += 2
    old, now = (
        Summary.of(n, Watched(one[:, :7], 4, label, label, 6, sessions))
        for n, (one, label, sessions) in enumerate([(x, y, s), (u, v, t)])
    )
    kept = {k: tensor for k, tensor in old.tensors("drift/0").items() if not k.endswith("apart")}
    again = Summary.under(kept, "drift/0")
    assert again is not None
    assert not again.apart
    full = Summary.of(1, Watched(u, 4, v, v, 8, t))
    found = moved([wide(again, 9, 8)], None, wide(full, 9, 8), more=[in_one_class])
    before = moved([old], None, now)
    assert found is not None
    assert before is not None
    assert (found.p, found.number) == (before.p, before.number)


def test_each_number_has_a_name_and_a_column():
    for part, shape in (("input", (64, 3)), ("input", (5,)), ("input", (1, 4, 4)),
                        ("input", (900,)), ("prediction", (5,))):  # fmt: skip
        words = WatchedWords(part, shape, 3)
        assert len({words.name(place) for place in range(words.count)}) == words.count
        assert len(words.columns) == words.count
        named: dict[int, set[str]] = {}
        for place, column in enumerate(words.columns):
            named.setdefault(column, set()).add(words.column(place))
        if shape not in ((900,), (1, 4, 4)):
            assert all(len(each) == 1 or part == "prediction" for each in named.values())
    windows = WatchedWords("input", (64, 3), 3, ("x", "y", "z"), ("sit",))
    assert [windows.column(n) for n in (0, 4, 6, 6 + 64, 2 * 3 + 3 * 64)] == [*"xyxyx"]
    assert windows.column(windows.of_all) == "the share of class 'sit'"
    assert windows.name(windows.count - 1).endswith("from example to example, in class 2")
