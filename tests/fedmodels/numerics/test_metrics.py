import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fid import fid, frechet_distance
from fedmodels.errors import DataError
from fedmodels.numerics.metrics import (
    ClassCounts,
    average_forgetting_measure,
    best_round,
    forgetting,
    frequency_groups,
    iaa,
    last_rounds,
    macro_f1,
    mean_accuracy,
    mean_and_std,
)
from fedmodels.techniques.levels import minority_classes

PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30)


def counts(correct: int, total: int) -> ClassCounts:
    return ClassCounts.of([0] * correct + [1] * (total - correct), [0] * total, 2)


# --- counts --------------------------------------------------------------------------------------


@given(PAIRS, st.data())
def test_several_sets_at_once_count_as_each_alone(pairs, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pairs)), max_size=3)))
    guess, truth = (np.array(side) for side in zip(*pairs, strict=True))
    ends = [0, *cuts, len(pairs)]
    found = ClassCounts.each(guess, truth, np.diff(ends).tolist(), 6, confusion=True)
    for begin, end, counts in zip(ends, ends[1:], found, strict=False):
        alone = ClassCounts.of(guess[begin:end], truth[begin:end], 6, confusion=True)
        for part in ("support", "predicted", "correct", "confusion"):
            assert getattr(counts, part).tolist() == getattr(alone, part).tolist()


def test_counts_of_logits():
    logits = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 3, 0]])
    c = ClassCounts.of(logits, torch.tensor([0, 1, 2]), 3)
    assert c.support.tolist() == [1, 1, 1]
    assert c.predicted.tolist() == [1, 2, 0]
    assert c.correct.tolist() == [1, 1, 0]
    assert c.support.dtype == np.int64
    want = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2]))
    assert c.loss() == pytest.approx(float(want))
    assert c.accuracy() == pytest.approx(2 / 3)


def test_counts_of_nothing():
    for empty in (
        ClassCounts.zeros(3),
        ClassCounts.of(torch.zeros(0, 3), [], 3),
        ClassCounts.of([], [], 3),
    ):
        assert empty.total() == 0
        assert empty.accuracy() == empty.loss() == empty.macro_f1() == 0
        assert np.isnan(empty.per_class()).all()


def test_counts_refuse_what_is_out_of_range():
    with pytest.raises(DataError, match="a label lies outside of 0…2"):
        ClassCounts.of([0], [3], 3)
    with pytest.raises(DataError, match="a label lies outside of 0…2"):
        ClassCounts.of([0, 0], [0, 3], 3)
    with pytest.raises(DataError, match="a prediction lies outside"):
        ClassCounts.of([-1], [0], 3)
    with pytest.raises(DataError, match="2 predictions for 1"):
        ClassCounts.of([0, 1], [0], 3)


@given(PAIRS, st.integers(0, 30))
def test_counts_add_up_over_parts(pairs, cut):
    true, pred = zip(*pairs, strict=True)
    whole = ClassCounts.of(pred, true, 6)
    parts = ClassCounts.of(pred[:cut], true[:cut], 6) + ClassCounts.of(pred[cut:], true[cut:], 6)
    for name in ("support", "predicted", "correct"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    # a subset and the rest recombine with their weights
    few, rest = whole.subset([0, 3]), whole.subset([1, 2, 4, 5])
    both = few.accuracy() * few.total() + rest.accuracy() * rest.total()
    assert both == pytest.approx(whole.accuracy() * whole.total())
    assert few.total() + rest.total() == whole.total()


def test_a_confusion_adds_up_over_parts_and_to_its_counts():
    """Class 0 is taken for 0 and 1, class 1 for 1 twice, class 2 for 0."""
    whole = ClassCounts.of([0, 1, 1, 1, 0], [0, 0, 1, 1, 2], 3, confusion=True)
    assert whole.confusion.tolist() == [[1, 1, 0], [0, 2, 0], [1, 0, 0]]
    first = ClassCounts.of([0, 1], [0, 0], 3, confusion=True)
    rest = ClassCounts.of([1, 1, 0], [1, 1, 2], 3, confusion=True)
    assert (first + rest).confusion.tolist() == whole.confusion.tolist()
    assert whole.confusion.sum(1).tolist() == whole.support.tolist()
    assert whole.confusion.sum(0).tolist() == whole.predicted.tolist()
    assert (first + ClassCounts.of([1, 1, 0], [1, 1, 2], 3)).confusion is None


def test_counts_per_class():
    c = ClassCounts.of([0, 1, 1, 1], [0, 0, 1, 1], 3)
    assert c.per_class()[:2].tolist() == [0.5, 1.0]
    assert np.isnan(c.per_class()[2])
    assert c.subset([0]).accuracy() == 0.5


def test_a_constant_predictor_on_a_balanced_set():
    assert ClassCounts.of([2] * 40, list(range(4)) * 10, 4).accuracy() == 1 / 4


def test_counts_read_frozen_arrays():
    labels = np.array([0, 1])
    labels.flags.writeable = False
    assert ClassCounts.of(labels, labels, 2).accuracy() == 1


# --- F1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("true", "pred", "want"), [("0011", "0012", 0.555556), ("000112", "001110", 0.488889)]
)
def test_macro_f1_anchors(true, pred, want):
    y_true, y_pred = ([int(c) for c in word] for word in (true, pred))
    assert macro_f1(y_true, y_pred) == pytest.approx(want, abs=1e-6)
    assert ClassCounts.of(y_pred, y_true, 9).macro_f1() == pytest.approx(want, abs=1e-6)


@given(PAIRS)
def test_macro_f1_equals_scikit_learn(pairs):
    from sklearn.metrics import f1_score

    true, pred = zip(*pairs, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = f1_score(true, pred, average="macro", zero_division=0)
    assert macro_f1(true, pred) == pytest.approx(want)
    assert ClassCounts.of(pred, true, 6).macro_f1() == pytest.approx(want)
    assert (macro_f1(torch.tensor(true), np.array(pred)) == 1) == (true == pred)


# --- tasks ---------------------------------------------------------------------------------------

ACCURACY = [[0.9, 9, 9], [0.6, 0.8, 9], [0.7, 0.5, 0.6]]


def test_forgetting():
    # best earlier .9 and .8, now .7 and .5; just learned .9 and .8
    assert forgetting(ACCURACY) == pytest.approx((0.2 + 0.3) / 2)
    # the best need not be the first
    assert forgetting([[0.2, 0, 0], [0.9, 0.8, 0], [0.7, 0.9, 0.6]]) == pytest.approx(
        (0.2 - 0.1) / 2
    )
    assert forgetting([[0.5]]) == 0
    with pytest.raises(DataError, match=r"\(T, T\), not \[1, 2\]"):
        forgetting([[1, 2]])


# --- clients and rounds --------------------------------------------------------------------------


def test_iaa_and_afm_anchors():
    assert iaa([0.8, 0.6], [400, 1200]) == pytest.approx(0.65)
    series, reference = [0.5, 0.6, 0.7], [0.9, 0.9, 0.95]
    assert np.mean(series) == pytest.approx(0.6)
    assert average_forgetting_measure(series, reference) == pytest.approx(0.316667, abs=1e-6)
    assert average_forgetting_measure(reference, reference) == 0
    assert average_forgetting_measure(reference, series) < 0
    with pytest.raises(DataError, match="3 against 2"):
        average_forgetting_measure(series, reference[:2])


def test_mean_accuracy_is_unweighted():
    # GLDP: 30 of 40 and 45 of 50 -> 82.50, not 83.33
    clients = [counts(30, 40), counts(45, 50)]
    assert mean_accuracy(clients) == pytest.approx(0.825)
    assert sum(clients, ClassCounts.zeros(2)).accuracy() == pytest.approx(75 / 90)
    assert mean_accuracy([]) == 0


def test_minority_accuracy_leaves_out_clients_without_examples():
    one = ClassCounts.of([0, 1, 1], [0, 0, 1], 3)
    two = ClassCounts.of([2, 0], [2, 2], 3)
    assert mean_accuracy([one, two], [0]) == 0.5
    assert mean_accuracy([one, two], [1, 2]) == pytest.approx((1 + 0.5) / 2)


def test_minority_classes_anchor():
    # fedmlp.md, anchor 6
    totals = [5000, 4629, 4286, 3968, 3674, 3401, 3149, 2916, 2700, 2500]
    assert minority_classes(totals) == [5, 6, 7, 8, 9]
    assert minority_classes([3, 0, 1, 2]) == [2]  # three known classes: one of them
    assert minority_classes([0, 0]) == []


def test_frequency_groups():
    groups = frequency_groups([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert groups == {"many": [8, 9], "medium": [5, 6, 7], "minority": [0, 1, 2, 3, 4]}
    unseen = frequency_groups([0, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1] + [0] * 29)  # ten known classes
    assert unseen == {"many": [1, 2], "medium": [3, 4, 5], "minority": [6, 7, 8, 9, 10]}
    five = frequency_groups([5, 4, 3, 2, 1])  # 20 % are one class, and the lower half are two
    assert five == {"many": [0], "medium": [1, 2], "minority": [3, 4]}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([60, 60, 60], ([], [], [])),
        ([0, 0], ([], [], [])),
        ([7], ([], [], [])),
        ([9, 5, 5, 5], ([0], [1, 2, 3], [])),  # two of the 5s would be rare, and one not
        ([9, 9, 9, 2], ([], [0, 1, 2], [3])),
        ([9, 8, 7, 7, 7, 7, 3, 2, 1, 1], ([0, 1], [2, 3, 4, 5], [6, 7, 8, 9])),
    ],
)
def test_classes_that_are_equally_frequent_are_not_told_apart(counts, expected):
    assert tuple(frequency_groups(counts).values()) == expected


@given(st.lists(st.integers(0, 5), max_size=30))
def test_every_known_class_is_in_one_group(counts):
    groups = frequency_groups(counts).values()
    known = np.flatnonzero(counts).tolist()
    is_balanced = len({counts[k] for k in known}) < 2
    assert sorted(k for group in groups for k in group) == ([] if is_balanced else known)


def test_rules_over_rounds():
    assert last_rounds(list(range(20))) == pytest.approx(14.5)
    assert last_rounds([0.5, 0.7]) == pytest.approx(0.6)
    assert best_round([0.1, 0.7, 0.7, 0.2]) == 1
    assert best_round([0.1, 0.7, 0.7, 0.2, 0.6]) == 1
    assert mean_and_std([1.0, 3.0]) == (2, 1)
    assert mean_and_std([]) == (0, 0)


# --- FID -----------------------------------------------------------------------------------------


def test_frechet_anchors():
    assert frechet_distance(0, 1, 1, 4) == pytest.approx(2)
    assert frechet_distance([0, 0], np.diag([1, 4]), [1, 2], np.diag([4, 1])) == pytest.approx(7)
    correlated = [[2, 1], [1, 2]]
    assert frechet_distance([0, 0], correlated, [0, 0], np.eye(2)) == pytest.approx(
        0.535898, abs=1e-6
    )
    assert frechet_distance([0, 0], np.eye(2), [0, 0], correlated) == pytest.approx(
        0.535898, abs=1e-6
    )


def test_fid_of_features():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0, 1, (200, 4)), rng.normal(1, 2, (300, 4))
    assert fid(x, x) == pytest.approx(0, abs=1e-9)
    assert fid(x, y) == pytest.approx(fid(y, x))
    assert fid(torch.from_numpy(x), y) == pytest.approx(fid(x, y))
    assert fid(x[:, :1], x[:, :1] + 3) == pytest.approx(9)
    with pytest.raises(DataError, match="two sets"):
        fid(x, y[:, :2])
