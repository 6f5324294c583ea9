import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedmodels.errors import ConfigError, DataError, PayloadError
from fedmodels.numerics.algebra import (
    class_means,
    nnls_simplex,
    replay_volumes,
    simplex_projection,
)
from fedmodels.numerics.clustering import cluster, kmeans, nearest
from fedmodels.numerics.metrics import as_one
from fedmodels.tensors import weighted_mean as mean_module
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.weighted_mean import weighted_mean

SMALL = st.floats(-1e3, 1e3, width=32)


def vector(length: int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, length, elements=SMALL)


# --- the weighted mean ---------------------------------------------------------------------------


def test_weighted_mean_of_two():
    uploads = [{"base/w": torch.tensor([1.0, 4.0])}, {"base/w": torch.tensor([3.0, 8.0])}]
    assert weighted_mean(uploads, [0.75, 0.25])["base/w"].tolist() == [1.5, 5.0]


def test_weighted_mean_takes_bundles_and_iterables():
    uploads = [Bundle({"w": torch.tensor([x])}, scalars={"a": 1.0}) for x in (1.0, 2.0)]
    assert weighted_mean(iter(uploads), [0.5, 0.5])["w"].tolist() == [1.5]


@given(
    hnp.arrays(
        np.float32, (3, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    )
)
def test_equal_inputs_come_out_as_themselves(values):
    w = torch.from_numpy(values)
    mean = weighted_mean([{"w": w.clone()} for _ in range(7)], [0.1, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1])
    assert torch.equal(mean["w"], w)


@given(st.lists(vector(4), min_size=1, max_size=6), st.data())
def test_one_hot_returns_that_input_bitwise(rows, data):
    chosen = data.draw(st.integers(0, len(rows) - 1))
    p = [float(i == chosen) for i in range(len(rows))]
    mean = weighted_mean([{"w": torch.from_numpy(r)} for r in rows], p)["w"]
    assert mean.numpy().tobytes() == rows[chosen].tobytes()


@given(st.lists(vector(3), min_size=2, max_size=6))
def test_order_matters_only_in_rounding(rows):
    p = np.arange(1, len(rows) + 1) / sum(range(1, len(rows) + 1))
    there = weighted_mean([{"w": torch.from_numpy(r)} for r in rows], p)["w"]
    back = weighted_mean([{"w": torch.from_numpy(r)} for r in rows[::-1]], p[::-1])["w"]
    torch.testing.assert_close(there, back, rtol=1e-6, atol=1e-4)
    exact = (p[:, None] * np.stack(rows).astype(np.float64)).sum(0)
    np.testing.assert_allclose(there, exact, rtol=1e-6, atol=1e-4)


def test_weighted_mean_across_chunks_and_strides(monkeypatch):
    monkeypatch.setattr("fedmodels.tensors.weighted_mean.CHUNK", 7)
    a, b = torch.randn(5, 9).t(), torch.randn(9, 5)
    mean = weighted_mean([{"w": a}, {"w": b}], [0.25, 0.75])["w"]
    torch.testing.assert_close(mean, (a.double() * 0.25 + b.double() * 0.75).float())


@pytest.mark.parametrize("length", [0, 1, 7, 21, 22, 100])
def test_weighted_mean_by_several_threads_is_that_of_one(length, monkeypatch):
    uploads = [{"w": torch.randn(length)} for _ in range(3)]
    alone = weighted_mean(uploads, [0.2, 0.3, 0.5])["w"]
    monkeypatch.setattr("fedmodels.tensors.weighted_mean.CHUNK", 7)
    monkeypatch.setattr("fedmodels.tensors.weighted_mean.PER_THREAD", 3)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    ranges = mean_module._ranges(length, 3)
    assert [i for each in ranges for i in each] == list(range(length))
    assert len(ranges) == {0: 1, 1: 1, 7: 1, 21: 3, 22: 4, 100: 4}[length]
    assert torch.equal(weighted_mean(uploads, [0.2, 0.3, 0.5])["w"], alone)


def test_weighted_mean_sums_in_float64():
    values = [1.0] + [2.0**-24] * 8  # float32 would drop each summand
    uploads = [{"w": torch.tensor([v * 9])} for v in values]
    assert float(weighted_mean(uploads, [1 / 9] * 9)["w"]) == pytest.approx(1 + 2**-21, abs=1e-8)
    assert float(weighted_mean(uploads, [1 / 9] * 9)["w"]) > 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weighted_mean_keeps_the_dtype(dtype):
    mean = weighted_mean(
        [{"w": torch.ones(2, dtype=dtype)}, {"w": torch.zeros(2, dtype=dtype)}], [0.5, 0.5]
    )
    assert mean["w"].dtype == dtype
    assert mean["w"].tolist() == [0.5, 0.5]


def test_weighted_mean_of_counters_flags_scalars_and_nothing():
    def upload(n: int, flag: bool) -> dict[str, torch.Tensor]:
        return {"n": torch.tensor(n), "f": torch.tensor([flag, False]), "e": torch.zeros(0, 3)}

    mean = weighted_mean([upload(3, False), upload(5, True)], [0.9, 0.1])
    assert int(mean["n"]) == 5
    assert mean["n"].dtype == torch.int64
    assert mean["f"].tolist() == [True, False]
    assert mean["e"].shape == (0, 3)


def test_weighted_mean_of_no_tensors_is_none():
    assert weighted_mean([{}, Bundle()], [0.5, 0.5]) == {}
    with pytest.raises(PayloadError, match="'w' is in some uploads only"):
        weighted_mean([{}, {"w": torch.zeros(2)}], [0.5, 0.5])


def test_weighted_mean_leaves_its_inputs_alone():
    only = {"w": torch.tensor([1.0]), "n": torch.tensor(1)}
    mean = weighted_mean([only], [1.0])
    mean["w"].fill_(9)
    mean["n"].fill_(9)
    assert float(only["w"]) == 1
    assert int(only["n"]) == 1


def test_weighted_mean_refuses_what_does_not_fit():
    a = {"w": torch.zeros(2)}
    with pytest.raises(PayloadError, match="2 uploads but 1"):
        weighted_mean([a, a], [1.0])
    with pytest.raises(PayloadError, match="nothing to average"):
        weighted_mean([], [])
    with pytest.raises(PayloadError, match="'v' is in some"):
        weighted_mean([a, {"v": torch.zeros(2), **a}], [0.5, 0.5])
    with pytest.raises(PayloadError, match="'w' differs"):
        weighted_mean([a, {"w": torch.zeros(3)}], [0.5, 0.5])
    with pytest.raises(PayloadError, match="'w' differs"):
        weighted_mean([a, {"w": torch.zeros(2, dtype=torch.float64)}], [0.5, 0.5])


# --- k-means -------------------------------------------------------------------------------------


def test_kmeans_anchor():
    # fedali.md, anchor 4: clients of n = 30 and n = 10
    points = torch.tensor([[0.0, 0], [4, 0], [0, 2], [6, 0]])
    assert kmeans(points, torch.tensor([[0.0, 0.5], [4.5, 0]])).tolist() == [[0, 1], [5, 0]]


def test_kmeans_refills_an_empty_cluster():
    # fedali.md, anchor 5
    points = np.array([[0, 0], [4, 0], [4.2, 0], [0.2, 0]])
    centres = kmeans(points, np.array([[2.1, 0], [2.1, 0]]))
    np.testing.assert_allclose(sorted(centres.tolist()), [[0.1, 0], [4.1, 0]], atol=1e-12)


def test_kmeans_needs_a_point_per_centre():
    with pytest.raises(ConfigError, match="2 points for 3 centres"):
        kmeans(torch.zeros(2, 1), 3)


def test_kmeans_plus_plus():
    # fedmlp.md, anchor 4
    points = torch.tensor([[0.0], [1], [10], [11]])
    centres, labels = cluster(points, 2, seed=3)
    assert sorted(centres.flatten().tolist()) == [0.5, 10.5]
    assert labels.dtype == torch.int64
    assert labels[0] == labels[1] != labels[2] == labels[3]
    assert torch.equal(nearest(points, centres), labels)
    assert torch.equal(cluster(points, 2, seed=3)[0], centres)


def test_kmeans_returns_equal_prototypes_unchanged():
    rows = torch.randn(16, 12)
    assert torch.equal(kmeans(rows.repeat(5, 1), rows), rows)
    assert torch.equal(kmeans(rows, rows), rows)


def test_kmeans_never_loses_a_row():
    points = torch.tensor([[1.0, 2], [1, 2], [3, 4], [3, 4]])
    centres = kmeans(points, torch.tensor([[1.0, 2], [1, 2], [3, 4], [9, 9]]))
    assert centres.shape == (4, 2)
    assert bool(torch.isfinite(centres).all())
    with pytest.raises(ConfigError, match="2 points for 3"):
        kmeans(points[:2], points[:3])


@settings(max_examples=25)
@given(hnp.arrays(np.float64, (12, 2), elements=st.integers(-20, 20).map(float)))
def test_kmeans_centres_are_means_of_their_points(points):
    centres, labels = cluster(points, points[:4])
    for g in set(labels.tolist()):
        np.testing.assert_allclose(centres[g], points[labels == g].mean(0), atol=1e-12)


def test_kmeans_stops_at_max_iter():
    points = np.concatenate([np.linspace(0, 1, 40), np.linspace(2, 9, 40)])[:, None]
    init = np.array([[0.0], [0.1]])
    short, full = (cluster(points, init, max_iter=n) for n in (1, 300))
    assert not np.allclose(short[0], full[0])


# --- the simplex ---------------------------------------------------------------------------------


@given(hnp.arrays(np.float64, st.integers(1, 8), elements=st.floats(-5, 5)))
def test_projection_is_the_nearest_point(point):
    nearest_point = simplex_projection(point)
    assert (nearest_point >= 0).all()
    assert nearest_point.sum() == pytest.approx(1)
    # variational inequality: no corner lies on the far side
    for corner in np.eye(len(point)):
        assert (point - nearest_point) @ (corner - nearest_point) <= 1e-9


def test_projection_by_hand():
    assert simplex_projection(torch.tensor([0.2, 0.8])).tolist() == pytest.approx([0.2, 0.8])
    assert simplex_projection(np.array([3.0, 0.0])).tolist() == [1, 0]
    assert simplex_projection(torch.zeros(4)).tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ([1e17, 0.0], [1, 0]),
        ([-1e17, -1e17], [0.5, 0.5]),
        ([1e300, -1e300, 0.0], [1, 0, 0]),
        ([1e308, 1e308], [0.5, 0.5]),
        ([2e6 + 0.5, 2e6], [0.75, 0.25]),
    ],
)
def test_projection_of_large_coordinates(point, expected):
    """A sum of them has no place for the 1; the collaboration graph's are 1 / alpha."""
    assert simplex_projection(np.array(point)).tolist() == expected


def test_nnls_by_hand():
    # diagonal P = (1, 4): alpha is proportional to 1/P
    alpha = nnls_simplex(np.diag([1.0, 2.0]))
    np.testing.assert_allclose(alpha, [0.8, 0.2], atol=1e-12)
    np.testing.assert_allclose(nnls_simplex(np.diag([1e6, 2e6])), [0.8, 0.2], atol=1e-9)
    np.testing.assert_allclose(nnls_simplex(np.diag([1e-9, 2e-9])), [0.8, 0.2], atol=1e-9)
    assert nnls_simplex(torch.zeros(3, 2)).tolist() == [0.5, 0.5]
    assert nnls_simplex(torch.ones(3, 1)).tolist() == [1]


@given(hnp.arrays(np.float64, (5, 3), elements=st.floats(-3, 3)))
def test_nnls_beats_every_grid_point(factor):
    alpha = nnls_simplex(factor)
    assert (alpha >= 0).all()
    assert alpha.sum() == pytest.approx(1)
    value = np.square(factor @ alpha).sum()
    for i, j in itertools.product(range(11), repeat=2):
        if i + j <= 10:
            other = np.array([i, j, 10 - i - j]) / 10
            assert value <= np.square(factor @ other).sum() + 1e-7


# --- replay volumes and class means --------------------------------------------------------------

VOLUMES = [
    ([600, 600, 600, 600], [0, 0, 200, 200], [200, 200, 0, 0]),
    ([600] * 4 + [200, 200], [0] * 4 + [200, 200], [200] * 4 + [0, 0]),
    ([200, 200, 1000, 1000], [0, 0, 200, 200], [40, 40, 0, 0]),
    ([400, 100, 150, 300], [0, 0, 50, 200], [200, 66, 50, 0]),
    ([1200, 600, 300], [200, 200, 0], [0, 0, 100]),
    ([2000, 200, 100], [0, 0, 100], [100, 100, 0]),
]


@pytest.mark.parametrize(("total", "current", "want"), VOLUMES)
def test_replay_volumes_of_the_card(total, current, want):
    assert replay_volumes(np.array(total), np.array(current)).tolist() == want
    assert replay_volumes(torch.tensor(total), torch.tensor(current)).tolist() == want


def test_replay_volumes_cap_generated():
    assert replay_volumes(
        np.array([1200, 600, 300]), np.array([200, 200, 0]), cap="generated"
    ).tolist() == [200, 0, 100]
    with pytest.raises(ConfigError, match="'all' must be"):
        replay_volumes(np.array([1]), np.array([1]), cap="all")


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 200)), min_size=1, max_size=6))
def test_replay_volumes_invariants(rows):
    earlier, current = (np.array(column) for column in zip(*rows, strict=True))
    volumes = replay_volumes(earlier + current, current)
    assert (volumes >= 0).all()
    assert (volumes <= current.max()).all()
    assert (volumes[earlier + current == 0] == 0).all()


def test_replay_volumes_refuse_a_history_that_forgot():
    with pytest.raises(DataError, match="history"):
        replay_volumes(np.array([3]), np.array([4]))
    assert replay_volumes(np.array([3, 4]), np.array([0, 0])).tolist() == [0, 0]


def test_read_only_arrays_are_welcome():
    frozen = np.array([[0.0, 1], [1, 0]])
    frozen.flags.writeable = False
    assert kmeans(frozen, frozen).tolist() == frozen.tolist()
    assert simplex_projection(frozen[0]).tolist() == [0, 1]


def test_class_means():
    features = torch.tensor([[1.0, 2], [3, 4], [5, 0]], requires_grad=True)
    means = class_means(features, torch.tensor([2, 0, 2]), 4)
    assert {k: (v.tolist(), n) for k, (v, n) in means.items()} == {0: ([3, 4], 1), 2: ([3, 1], 2)}
    assert not means[0][0].requires_grad
    assert class_means(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 3) == {}
    with pytest.raises(DataError, match="label 2 is out of range"):
        class_means(features, torch.tensor([2, 0, 2]), 2)


def test_classes_that_are_one_have_their_probabilities_together():
    logits = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]).log()
    found = as_one(logits, [(0, 2), (5, 1)])
    assert torch.allclose(found.exp(), torch.tensor([[0.0, 0.2, 0.8], [0.0, 0.3, 0.7]]))
    assert torch.allclose(as_one(logits, [(0, 2), (1, 2)]).exp()[:, 2], torch.ones(2))
    assert torch.isfinite(logits).all(), "the argument stays as it is"
