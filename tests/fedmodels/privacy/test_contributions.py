"""What a client contributes to a private sum: by hand, and however it lies."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.config.privacy import Privacy
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.contributions import Contributions
from fedmodels.privacy.mechanism import clipped, leaving, noise_stds, noised
from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec, scalar_spec

PRIVACY = Privacy(
    level="client", clip=1.0, prototype_clip=6.0, histogram_clip=4.0, noise_multiplier=2.0,
    delta=1e-3,
)  # fmt: skip
GIVEN = {"base/w": torch.tensor([1.0, 2.0])}
SPEC = (
    BundleSpec.of(Bundle(GIVEN, histogram=Histogram(*torch.zeros(2, 2, dtype=torch.int32))))
    | prototype_spec("class", 2, 2)
    | scalar_spec("num_examples")
)
OF = Contributions(PRIVACY, SPEC, num_classes=2)
BOUND = sum(clip**2 for clip in OF.clips.values()) ** 0.5


def upload(w, rows, counts=(0, 0)):
    histogram = Histogram(*[torch.tensor(counts, dtype=torch.int32)] * 2)
    vectors = {k: (torch.tensor(row), 3) for k, row in rows.items()}
    return Bundle(
        {"base/w": torch.tensor(w)}, {"class": Prototypes.of(vectors, 2)}, {}, histogram,
        {"num_examples": 7.0},
    )  # fmt: skip


def test_vectors_and_their_bounds_by_hand():
    """The change (3, 4) has norm 5 and is scaled to 1. The mark is 6 / (2 sqrt 2) = 2.1213; class 1
    has the row (3, 4, 2.1213) of norm sqrt(29.5) = 5.43, within 6. Counts (3, 4, 3, 4) have norm
    sqrt(50) and are scaled to 4."""
    found = clipped(OF.vectors(upload([4.0, 6.0], {1: [3.0, 4.0]}, (3, 4)), GIVEN), OF.clips)
    assert found["weights"].tolist() == pytest.approx([0.6, 0.8])
    assert found["prototypes/class"].tolist() == pytest.approx([0, 0, 0, 3, 4, 2.12132])
    assert found["histogram"].tolist() == pytest.approx(
        [4 / math.sqrt(50) * n for n in (3, 4, 3, 4)]
    )


def test_a_mean_becomes_an_upload_by_hand():
    """Two clients, changes (0.6, 0.8) and (0, 0): the mean is (1.3, 2.4). Both have class 1 at
    (3, 4) and (1, 0): the mean is (2, 2). Only one has class 0: it is that one's."""
    both = {0: [1.0, 1.0], 1: [1.0, 0.0]}
    sent = [upload([4.0, 6.0], {1: [3.0, 4.0]}), upload([1.0, 2.0], both)]
    each = [clipped(OF.vectors(one, GIVEN), OF.clips) for one in sent]
    mean = {part: (each[0][part] + each[1][part]) / 2 for part in each[0]}
    found = OF.upload(mean, GIVEN, {})
    assert found.weights["base/w"].tolist() == pytest.approx([1.3, 2.4])
    assert found.prototypes["class"].labels.tolist() == [0, 1]
    assert found.prototypes["class"].vectors.flatten().tolist() == pytest.approx([1, 1, 2, 2])
    assert found.scalars == {"num_examples": 1.0}


def test_a_client_beyond_the_bound_counts_less_and_does_not_shrink_prototypes():
    """Rows of norm 1000 are scaled to 6 with their marks, and come back as they were."""
    sent = [upload([1.0, 2.0], {0: [1000.0, 0.0]}) for _ in range(2)]
    each = [clipped(OF.vectors(one, GIVEN), OF.clips) for one in sent]
    mean = {part: (each[0][part] + each[1][part]) / 2 for part in each[0]}
    found = OF.upload(mean, GIVEN, {}).prototypes["class"]
    assert found.vectors[0].tolist() == pytest.approx([1000.0, 0.0])


def test_a_class_that_does_not_stand_out_of_the_noise_is_left_out():
    mean = {part: torch.zeros_like(v) for part, v in OF.zeros().items()}
    mean["prototypes/class"][2], mean["prototypes/class"][5] = 0.1, 0.5
    found = OF.upload(mean, GIVEN, {"prototypes/class": 0.2})
    assert found.prototypes["class"].labels.tolist() == [1]


floats = st.floats(-1e6, 1e6, width=32)
pairs = st.lists(floats, min_size=2, max_size=2)
anything = st.builds(
    upload,
    pairs,
    st.dictionaries(st.integers(0, 1), pairs),
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)


@given(others=st.lists(anything, max_size=3), one=anything)
def test_one_client_moves_the_sum_by_at_most_the_bound(others, one):
    """Whatever it sends: each part by its clip, the joint vector by the root of their number."""

    def summed(uploads):
        total = OF.zeros()
        for each in uploads:
            found = clipped(OF.vectors(each, GIVEN), OF.clips)
            total = {part: total[part] + found[part] for part in total}
        return total

    without, having = summed(others), summed([*others, one])
    moved = {part: float((having[part] - without[part]).norm()) for part in having}
    assert all(moved[part] <= clip * (1 + 1e-9) for part, clip in OF.clips.items())
    joint = math.hypot(*(moved[part] / clip for part, clip in OF.clips.items()))
    assert joint <= math.sqrt(3) * (1 + 1e-9)


@pytest.mark.parametrize("label", [-1, 2])
def test_a_prototype_of_no_class_has_no_place(label):
    with pytest.raises(PayloadError, match="'class' name a class that does not exist"):
        OF.vectors(upload([1.0, 2.0], {label: [0.0, 0.0]}), GIVEN)


def test_nan_has_no_bound():
    with pytest.raises(PayloadError, match="NaN"):
        clipped(OF.vectors(upload([math.nan, 0.0], {}), GIVEN), OF.clips)


def test_the_noise_has_its_deviation_and_is_keyed_by_its_content():
    """Three parts at z = 2: each has a deviation of 2 sqrt(3) times its bound."""
    stds = noise_stds(OF.clips, 2.0)
    assert stds["weights"] == pytest.approx(2 * math.sqrt(3))
    assert stds["prototypes/class"] == pytest.approx(6 * stds["weights"])
    sums, secret = {"weights": torch.zeros(20_000, dtype=torch.float64)}, Secret(b"s" * 32)
    drawn = noised(sums, stds, secret, "3")["weights"]
    assert float(drawn.std()) == pytest.approx(stds["weights"], rel=0.02)
    assert float(drawn.mean()) == pytest.approx(0, abs=4 * stds["weights"] / math.sqrt(20_000))
    again, later = noised(sums, stds, secret, "3"), noised(sums, stds, secret, "4")
    other = noised({"weights": sums["weights"] + 1}, stds, secret, "3")["weights"] - 1
    assert torch.equal(again["weights"], drawn)
    assert not torch.allclose(later["weights"], drawn)
    assert not torch.allclose(other, drawn)


def test_an_upload_with_noise_travels_as_weights_and_comes_back():
    sent = leaving(OF, upload([1.3, 2.4], {1: [3.0, 4.0]}, (1, 0)), Bundle(GIVEN), 1e-9,
                   Secret(b"s" * 32), "0")  # fmt: skip
    OF.sent_spec.check({k: (t.dtype, tuple(t.shape)) for k, t in sent.by_key().items()})
    back = OF.upload(OF.received(sent, GIVEN), GIVEN, {})
    assert back.weights["base/w"].tolist() == pytest.approx([1.3, 2.4])
    assert back.prototypes["class"].vectors.flatten().tolist() == pytest.approx([3, 4], abs=1e-4)
    assert back.histogram.total.tolist() == [1, 0]
    assert "num_examples" not in sent.scalars


def test_what_is_not_covered_has_names():
    """Generators, statistics of batches and scalars are found in the specification."""
    more = Bundle(
        {"base/bn.running_mean": torch.zeros(2)},
        {"sets": Prototypes.by_position(torch.zeros(2, 2))},
        {"3": GeneratorState(1, {"w": torch.zeros(1)})},
        None,
        {"variance": 0.0},
    )
    wide = Contributions(PRIVACY, SPEC | BundleSpec.of(more), 2)
    assert OF.uncovered == []
    assert wide.uncovered == [
        "generators", "prototypes/sets", "scalars/variance", "weights/base/bn.running_mean",
    ]  # fmt: skip


def test_prototypes_need_a_bound():
    without = PRIVACY.model_copy(update={"prototype_clip": None})
    with pytest.raises(ConfigError, match="prototype_clip is needed: the method sends prototypes"):
        assert Contributions(without, SPEC, 2).clips
