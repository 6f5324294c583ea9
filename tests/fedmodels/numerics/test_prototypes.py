import pytest
import torch

from fedmodels.errors import PayloadError
from fedmodels.methods.variants.gldp import LatestEmbeddings
from fedmodels.methods.variants.heads import (
    as_scored,
    trained_part,
)
from fedmodels.numerics.prototypes import (
    ByClass,
    moved,
    nearest_scores,
    only,
    released,
    uncounted,
)
from fedmodels.numerics.secrecy import Secret
from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec
from fedmodels.tensors.prototype_means import mean_prototypes
from fedmodels.training.stepped import Batch
from fedtide.inprocess import transported


def prototypes(rows):
    width = len(next(iter(rows.values()))[0])
    return Prototypes.of({k: (torch.tensor(v), n) for k, (v, n) in rows.items()}, width)


SOME = prototypes({1: ((3.0, 4.0), 5), 4: ((0.3, 0.4), 1)})


def normal(key=0):
    return Secret(bytes([key] * 32)).normal


def vectors(found):
    return {int(k): v.tolist() for k, v in zip(found.labels, found.vectors, strict=True)}


def _visiting(*examples):
    index = torch.tensor(examples)
    return Batch(index, index, index)


def test_latest_embeddings_are_those_of_this_epoch():
    """Examples 0, 1 and 3 of four: class 0 has (2, 0) and (4, 2), class 1 has (1, 1)."""
    latest = LatestEmbeddings.of(4, 2, torch.device("cpu"))
    z = torch.tensor([[2.0, 0.0], [4.0, 2.0]], requires_grad=True)
    latest.keep(_visiting(0, 1), z)
    assert not latest.vectors.requires_grad
    latest.keep(_visiting(3), torch.ones(1, 2))
    found = latest.means(torch.tensor([0, 0, 1, 1]), 2)
    assert found.rows()[0][0].tolist() == [3, 1]
    assert found.rows()[1][0].tolist() == [1, 1]
    assert found.counts.tolist() == [2, 1]
    latest.forget_visits()
    assert not latest.means(torch.tensor([0, 0, 1, 1]), 2).labels.numel()


@pytest.mark.parametrize("nothing", [None, Prototypes.of({}, 2)])
def test_a_class_without_a_prototype_is_laid_out_as_zeros(nothing):
    found = ByClass.of(nothing, 3, 2, torch.device("cpu"))
    assert not found.vectors.any()
    assert not found.known.any()
    found = ByClass.of(SOME, 5, 2, torch.device("cpu"))
    assert found.known.tolist() == [False, True, False, False, True]
    assert [bool(row.any()) for row in found.vectors] == found.known.tolist()


def test_release_changes_nothing_unless_asked():
    found = released(SOME, normal())
    assert torch.equal(found.vectors, SOME.vectors)
    assert torch.equal(found.labels, SOME.labels)
    assert torch.equal(found.counts, SOME.counts)


def test_clipping_scales_what_is_longer():
    found = vectors(released(SOME, normal(), clip_norm=1.0))
    assert found[1] == pytest.approx([0.6, 0.8])
    assert found[4] == pytest.approx([0.3, 0.4])


def test_rare_classes_stay():
    assert vectors(released(SOME, normal(), min_count=2)).keys() == {1}
    nothing = released(SOME, normal(), min_count=6)
    assert nothing.vectors.shape == (0, 2)


def test_noise_has_its_deviation_and_its_secret():
    wide = prototypes({0: ((0.0,) * 20_000, 3)})
    found = released(wide, normal(), noise_std=0.5, clip_norm=1.0).vectors
    assert found.std().item() == pytest.approx(0.5, rel=0.05)
    assert torch.equal(found, released(wide, normal(), noise_std=0.5).vectors)
    assert not torch.equal(found, released(wide, normal(1), noise_std=0.5).vectors)


def test_moving_average():
    new = prototypes({1: ((1.0, 0.0), 2), 7: ((0.1, 0.2), 1)})
    found = moved(SOME, new, 0.5)
    assert vectors(found)[1] == [2.0, 2.0]
    assert vectors(found)[4] == vectors(SOME)[4]
    assert vectors(found)[7] == vectors(new)[7]
    assert found.counts.tolist() == [2, 1, 1]
    assert torch.equal(moved(None, new, 0.5).vectors, new.vectors)
    assert moved(uncounted(SOME), new, 0.5).counts.shape == (0,)


def test_mean_over_those_that_report():
    other = prototypes({1: ((1.0, 0.0), 15)})
    sets = {0: SOME, 3: other}
    assert vectors(mean_prototypes(sets, 5, 2, uniform=True))[1] == [2.0, 2.0]
    assert vectors(mean_prototypes(sets, 5, 2, uniform=False))[1] == [1.5, 1.0]
    assert len(mean_prototypes({}, 5, 2, uniform=True).labels) == 0
    with pytest.raises(PayloadError, match="client 0 reports a prototype of class 4"):
        mean_prototypes(sets, 4, 2, uniform=True)


def test_only_the_classes_of_another_set():
    found = only(SOME, like=prototypes({4: ((9.0, 9.0), 8), 6: ((9.0, 9.0), 1)}))
    assert vectors(found) == {4: vectors(SOME)[4]}
    assert found.counts.tolist() == [8]


def test_nearest_falls_back_when_no_candidate_has_a_prototype():
    z = torch.tensor([[0.0, 0.0]])
    table = ByClass.of(SOME, 6, 2, torch.device("cpu"))
    none = torch.zeros(6, dtype=torch.bool)
    assert nearest_scores(z, table, ~none).argmax() == 4
    assert nearest_scores(z, table, none).argmax() == 4
    scores = nearest_scores(z, table, ~none)[0]
    assert scores[[1, 4]].tolist() == pytest.approx([-5.0, -0.5])
    assert scores[[0, 2, 3, 5]].isneginf().all()
    empty = ByClass.of(None, 6, 2, torch.device("cpu"))
    assert nearest_scores(z, empty, ~none).tolist() == [[0.0] * 6]


def test_counts_travel_only_where_they_are_told():
    secret, spec = uncounted(SOME), prototype_spec("class", 2, 10, counted=False)
    bundle = Bundle(prototypes={"class": secret})
    assert vectors(transported(bundle, spec).prototypes["class"]) == vectors(SOME)
    assert bundle.num_bytes() == 2 * (4 + 8)
    with pytest.raises(PayloadError, match="unequal"):
        transported(bundle, prototype_spec("class", 2, 10))
    with pytest.raises(PayloadError, match="counts"):
        transported(Bundle(prototypes={"class": SOME}), spec)


def test_weights_for_evaluation_are_kept_apart():
    weights = {"base/a": torch.ones(2), "head/b": torch.ones(3)}
    sent = Bundle({"base/a": weights["base/a"], "eval/head/b": weights["head/b"]})
    assert trained_part(sent).weights.keys() == {"base/a"}
    assert as_scored(sent).weights.keys() == weights.keys()
    assert sent.num_bytes() == 8
    assert sent.num_evaluation_bytes() == 12
    plain = Bundle({"base/a": weights["base/a"]})
    assert trained_part(plain) is plain
    assert BundleSpec.of(plain) == BundleSpec.of(trained_part(sent))


def test_what_is_sent_for_evaluation_stands_in():
    payload = Bundle({"base/a": torch.zeros(2), "eval/base/a": torch.ones(2)})
    assert as_scored(payload).weights["base/a"].tolist() == [1.0, 1.0]
