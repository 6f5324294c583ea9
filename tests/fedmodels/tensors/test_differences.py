"""How far an upload is from what its client was given: norms by hand, projections against the
differences themselves."""

import math

import pytest
import torch

from fedmodels.tensors.bundle import Bundle, GeneratorState, Prototypes
from fedmodels.tensors.differences import SKETCH, TrainingBase, cosines
from fedmodels.tensors.packed_weights import PackedWeights, names_and_layout

LARGE = 300_000
"""More elements than are measured at a time."""


def packed(weights):
    names, layout = names_and_layout(weights)
    block = layout.empty()
    for name, place in zip(names, layout.views(block), strict=True):
        place.copy_(weights[name])
    return PackedWeights(names, layout, layout.clear(block))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(one, other):
    return float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0))


def test_norms_by_hand():
    """Parameters move by (3, 4), statistics by 12, and a counter does not count."""
    before = {
        "base/w": torch.tensor([1.0, 2.0]),
        "base/n.running_var": torch.tensor([1.0]),
        "base/n.num_batches_tracked": torch.tensor(3),
    }
    after = {
        "base/w": torch.tensor([4.0, 6.0]),
        "base/n.running_var": torch.tensor([13.0]),
        "base/n.num_batches_tracked": torch.tensor(10**12),
    }
    found = TrainingBase(Bundle(packed(before))).measured(Bundle(packed(after)))
    assert found.norms == {"weights": 5.0, "statistics": 12.0}
    assert found.given == {"weights": pytest.approx(5**0.5), "statistics": 1.0}
    assert found.norm == 5.0


def test_other_parts_by_hand():
    rows = Prototypes.of({2: (torch.tensor([3.0, 4.0]), 1), 0: (torch.tensor([0.0, 1.0]), 1)}, 2)
    known = Prototypes.of({2: (torch.tensor([3.0, 0.0]), 1)}, 2)
    nets = {"3": GeneratorState(1, {"w": torch.tensor([6.0, 8.0])}),
            "1": GeneratorState(1, {"w": torch.tensor([1.0])})}  # fmt: skip
    upload = Bundle(prototypes={"class": rows}, generators=nets)
    found = TrainingBase(Bundle(prototypes={"class": known})).measured(upload)
    assert found.norms == {"prototypes/class": 5.0, "generators": 10.0}
    assert found.norm == pytest.approx(math.sqrt(4.0**2 + 1.0**2)), "of what changed"
    assert TrainingBase(Bundle()).measured(Bundle()).norm is None


def test_what_only_scores_need_is_measured_apart():
    upload = Bundle({"base/w": torch.ones(1), "eval/w": torch.full((1,), 7.0)})
    found = TrainingBase(Bundle({"base/w": torch.zeros(1)})).measured(upload)
    assert found.norms == {"weights": 1.0, "evaluation": 7.0}


def test_the_personal_part_counts_where_both_parts_hold_a_weight():
    common, own = (Bundle({"w": torch.full((2,), value)}) for value in (1.0, 5.0))
    upload = Bundle({"w": torch.tensor([5.0, 6.0]), "v": torch.tensor([2.0])})
    assert TrainingBase(common, own).measured(upload).norm == pytest.approx(5**0.5)


@pytest.mark.parametrize("length", [10, SKETCH, SKETCH + 1, LARGE])
@pytest.mark.parametrize("form", ["packed", "others order", "double"])
def test_the_form_of_weights_makes_no_difference(length, form):
    before = {"a": normal(length, seed=1), "b": normal(3, seed=2)}
    after = {name: tensor + normal(*tensor.shape, seed=3) for name, tensor in before.items()}
    given = TrainingBase(Bundle(packed(before)))
    expected = given.measured(Bundle(packed(after)))
    other = {
        "packed": lambda: packed(after),
        "others order": lambda: {"b": after["b"], "a": after["a"]},
        "double": lambda: {name: tensor.double() for name, tensor in after.items()},
    }[form]()
    found = given.measured(Bundle(other))
    assert found.norms == expected.norms
    assert torch.equal(found.sketch, expected.sketch)
    moved = torch.cat([after[n] - before[n] for n in before]).double()
    assert found.norm == pytest.approx(float(moved.norm()), rel=1e-5)


@pytest.mark.parametrize("length", [SKETCH - 64, LARGE])
def test_cosines_are_those_of_the_differences(length):
    """Exactly, where a projection has room for all elements; else about within 1/64."""
    given, moves = TrainingBase(Bundle({"w": torch.zeros(length)})), {}
    towards = normal(length)
    for client, noise in enumerate((0.1, 1.0, 10.0)):
        moves[client] = towards + noise * normal(length, seed=client + 1)
    moves[3] = -5 * towards
    sketches = {c: given.measured(Bundle({"w": m})).sketch for c, m in moves.items()}
    counts = {0: 1.0, 1: 2.0, 2: 3.0}
    mean = sum(count * moves[client] for client, count in counts.items())
    others = {c: sketches[c] for c in counts}
    found = cosines(others, counts, {3: sketches[3]})
    tolerance = 1e-5 if length < SKETCH else 4 / 64
    for client, move in moves.items():
        assert found[client] == pytest.approx(exact(move, mean), abs=tolerance)


@pytest.mark.parametrize("kind", ["constant", "low rank", "one row"])
def test_projections_bear_structure(kind):
    """Weights are no white noise: rows of a layer are alike, and some layers move alone."""
    given, n = TrainingBase(Bundle({"w": torch.zeros(LARGE)})), LARGE
    one, other = normal(n, seed=1), normal(n, seed=2)
    if kind == "constant":
        one, other = torch.ones(n), torch.ones(n) + other
    elif kind == "low rank":
        one = torch.outer(one[:300], one[:1000]).flatten()
        other = one + torch.outer(other[:300], other[:1000]).flatten()
    else:
        one[512:], other[512:] = 0.0, 0.0
    held = {c: given.measured(Bundle({"w": m})).sketch for c, m in enumerate((one, other))}
    found = cosines({0: held[0]}, {0: 1.0}, {1: held[1]})[1]
    assert found == pytest.approx(exact(one, other), abs=4 / 64)


def test_prototypes_are_compared_by_label():
    given = TrainingBase(Bundle())
    rows = {0: torch.tensor([1.0, 0.0]), 7: torch.tensor([0.0, 2.0])}
    one, other = (
        given.measured(
            Bundle(prototypes={"class": Prototypes.of({k: (rows[k], 1) for k in labels}, 2)})
        ).sketch
        for labels in ((0, 7), (7,))
    )
    assert cosines({0: one}, {0: 1.0}, {1: other})[1] == pytest.approx(2 / 5**0.5)


def test_nothing_that_moved_has_no_direction():
    still, moved = torch.zeros(SKETCH), torch.ones(SKETCH)
    assert cosines({0: still, 1: moved}, {0: 1.0, 1: 1.0}, {}) == {1: pytest.approx(1.0)}
    assert cosines({0: moved}, {0: 0.0}, {}) == {}
