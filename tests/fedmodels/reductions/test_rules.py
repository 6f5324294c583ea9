"""Robust rules: numbers by hand, what they promise, and the same bits however they are read."""

import mmap

import numpy as np
import pytest
import torch

from fedmodels.config.reduction import Reduction
from fedmodels.errors import TooFewClients
from fedmodels.reductions import coordinates, rows
from fedmodels.reductions.rule import RobustRule, rule_of
from fedmodels.tensors.aggregation_rule import MEAN, Facts
from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.tensors.packed_weights import PackedWeights, packed
from fedmodels.tensors.uploads import Uploads

RULES = {
    "median": {},
    "trimmed_mean": {"attackers": 2},
    "norm_clipped": {},
    "krum": {"attackers": 2},
    "multi_krum": {"attackers": 2},
    "bulyan": {"attackers": 2},
    "geometric_median": {"iterations": 50},
    "centered_clipping": {"iterations": 5},
}
EACH = [Reduction(reduce=name, **keys) for name, keys in RULES.items()]
MIXED = [
    *(one.model_copy(update={"mix": "nearest", "attackers": 2}) for one in EACH),
    *(one.model_copy(update={"mix": "bucketing"}) for one in EACH if one.fewest_uploads < 6),
]


def named(settings):
    return f"{settings.reduce}-{settings.mix or 'alone'}"


def of_numbers(settings, *values, given=0.0, counts=None):
    """Return what a rule makes of clients of one number each, and their shares."""
    sent = {c: {"w": torch.tensor([v])} for c, v in enumerate(values)}
    counted = dict(enumerate(counts or [1.0] * len(values)))
    facts = Facts(given=Bundle({"w": torch.tensor([given])}))
    found, shares = RobustRule(settings).weights(sent, counted, facts)
    return found["w"].item(), [round(share, 6) for share in shares.values()]


def drawn(count, seed=0, dtype=torch.float32):
    """Return uploads of a net with a counter, in client order."""
    draw = torch.Generator().manual_seed(seed)
    return {
        c: {
            "base/w": torch.randn(7, 5, generator=draw, dtype=dtype),
            "base/n": torch.tensor(c + 1),
            "head/b": torch.randn(3, generator=draw, dtype=dtype),
        }
        for c in range(count)
    }


def result(settings, sent, threads=None, given=None, seed=0):
    rule, counts = RobustRule(settings, threads), dict.fromkeys(sent, 1.0)
    found, _ = rule.weights(sent, counts, Facts(seed, 0, Bundle(given or {})))
    return found


def flat(weights):
    parts = [weights[name].double().flatten() for name in ("base/w", "head/b")]
    return torch.cat(parts)


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "values", "expected", "shares"),
    [
        ({"reduce": "median"}, (0, 1, 2, 10), 1.5, [0, 0.5, 0.5, 0]),
        ({"reduce": "median"}, (0, 1, 10), 1.0, [0, 1, 0]),
        # without 0 and 10: (1 + 2) / 2
        ({"reduce": "trimmed_mean", "attackers": 1}, (0, 1, 2, 10), 1.5, [0, 0.5, 0.5, 0]),
        # the two nearest squared: 5, 2, 2, 5, 113; the first of the lowest
        ({"reduce": "krum", "attackers": 1}, (0, 1, 2, 3, 10), 1.0, [0, 1, 0, 0, 0]),
        # the four lowest scores
        ({"reduce": "multi_krum", "attackers": 1}, (0, 1, 2, 3, 10), 1.5, [0.25] * 4 + [0]),
        # Krum takes 2, 3, 1, 4, 5; of these the three nearest to their median 3
        (
            {"reduce": "bulyan", "attackers": 1},
            (0, 1, 2, 3, 4, 5, 100),
            3.0,
            [0, 0, *[0.333333] * 3, 0, 0],
        ),
        # (1 + 2 + 2) / 3: 10 is shortened to 2
        (
            {"reduce": "norm_clipped", "clip_norm": 2.0},
            (1, 2, 10),
            5 / 3,
            [0.333333, 0.333333, 0.066667],
        ),
        # the median norm is 2
        (
            {"reduce": "norm_clipped", "clip_factor": 0.5},
            (1, 2, 10),
            1.0,
            [0.333333, 0.166667, 0.033333],
        ),
        # of four norms the smaller one in the middle, 2
        (
            {"reduce": "norm_clipped", "clip_factor": 1.0},
            (1, 2, 4, 10),
            7 / 4,
            [0.25, 0.25, 0.125, 0.05],
        ),
        # v = 1 after one iteration; then 1 + (0 + 1 + 1) / 3
        (
            {"reduce": "centered_clipping", "clip_norm": 1.0, "iterations": 2},
            (1, 2, 10),
            5 / 3,
            [0.432099, 0.382716, 0.046914],
        ),
        # from 0: weights 1, 1/2, 1/4, so 3 / 1.75
        (
            {"reduce": "geometric_median", "iterations": 1},
            (1, 2, 4),
            12 / 7,
            [0.571429, 0.285714, 0.142857],
        ),
        # from 12/7: distances 5/7, 2/7, 16/7, so weights 7/5, 7/2, 7/16, which are 112 : 280 : 35
        (
            {"reduce": "geometric_median", "iterations": 2},
            (1, 2, 4),
            812 / 427,
            [0.262295, 0.655738, 0.081967],
        ),
        # means of each with its nearest: 0.5, 0.5, 5.5
        (
            {"reduce": "median", "mix": "nearest", "attackers": 1},
            (0, 1, 10),
            0.5,
            [0.5, 0.5, 0],
        ),
        # two buckets of two, whoever is in them: their median is their mean
        ({"reduce": "median", "mix": "bucketing"}, (0, 1, 2, 10), 3.25, [0.25] * 4),
    ],
)
def test_numbers_by_hand(settings, values, expected, shares):
    found, parts = of_numbers(Reduction(**settings), *map(float, values))
    assert found == pytest.approx(expected, rel=1e-6)
    assert parts == shares


def test_clipping_is_of_differences():
    """From 1: (0 + 1 + min(9, 2)) / 3 = 1."""
    clipped = Reduction(reduce="norm_clipped", clip_norm=2.0)
    assert of_numbers(clipped, 1.0, 2.0, 10.0, given=1.0)[0] == 2.0


@pytest.mark.parametrize("settings", [*EACH, *MIXED], ids=named)
def test_no_client_chooses_its_weight_by_the_examples_that_it_claims(settings):
    """Client 11 says 2^31 - 1 examples, of all and of the class; the result stays to the bit."""
    sent = drawn(12)
    honest, claims = dict.fromkeys(sent, 5.0), {**dict.fromkeys(sent, 5.0), 11: 2.0**31 - 1}
    facts = Facts(given=Bundle(drawn(1, seed=1)[0]))
    (one, parts), (other, claimed) = (
        RobustRule(settings).weights(sent, counts, facts) for counts in (honest, claims)
    )
    assert torch.equal(flat(one), flat(other))
    assert parts == claimed
    rows_ = {client: upload["base/w"][0] for client, upload in sent.items()}
    (row, parts), (same, claimed) = (
        RobustRule(settings).rows(
            rows_, {c: int(n) for c, n in counts.items()}, False, rows_[0] + 1, facts
        )
        for counts in (honest, claims)
    )
    assert torch.equal(row, same)
    assert parts == claimed


def test_an_upload_that_counts_nothing_has_no_part():
    found, shares = of_numbers(Reduction(reduce="median"), 1.0, 2.0, 9.0, counts=[1, 1, 0])
    assert (found, shares) == (1.5, [0.5, 0.5, 0.0])


def test_counters_come_out_as_the_largest():
    assert result(Reduction(reduce="median"), drawn(5))["base/n"] == 5


# --- what rules promise ---------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [*EACH, *MIXED], ids=named)
def test_equal_uploads_come_out_as_themselves(settings):
    one = drawn(1)[0]
    found = result(settings, dict.fromkeys(range(12), one), given=drawn(1, seed=1)[0])
    torch.testing.assert_close(flat(found), flat(one), rtol=1e-6, atol=1e-6)
    assert list(found) == list(one)
    assert {name: t.dtype for name, t in found.items()} == {n: t.dtype for n, t in one.items()}


@pytest.mark.parametrize("settings", EACH, ids=named)
def test_the_order_of_clients_does_not_matter(settings):
    sent, given = drawn(12), drawn(1, seed=1)[0]
    turned = dict(zip(sent, [*sent.values()][::-1], strict=True))
    one, other = (flat(result(settings, each, given=given)) for each in (sent, turned))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lie", [1e30, -1e30, 3.0])
@pytest.mark.parametrize("settings", EACH, ids=named)
def test_two_liars_of_twelve_move_nothing_far(settings, lie):
    """Rules by coordinate and those that choose stay in the honest range; sums stay as near."""
    sent, given = drawn(12), {n: torch.zeros_like(t) for n, t in drawn(1)[0].items()}
    for liar in (3, 7):
        sent[liar] = {n: torch.full_like(t, lie) for n, t in sent[liar].items() if n != "base/n"}
        sent[liar]["base/n"] = torch.tensor(0)
    honest = torch.stack([flat(one) for c, one in sent.items() if c not in (3, 7)])
    found = flat(result(settings, sent, given=given))
    if settings.reduce in ("norm_clipped", "centered_clipping", "geometric_median"):
        radius = float(honest.norm(dim=1).max())
        assert float((found - honest.mean(0)).norm()) <= 2 * radius
    elif lie != 3.0 or settings.reduce in ("median", "trimmed_mean", "bulyan"):
        assert bool((found >= honest.min(0).values).all() and (found <= honest.max(0).values).all())


@pytest.mark.parametrize("settings", [*EACH, *MIXED], ids=named)
def test_bits_are_those_of_any_number_of_threads_and_any_place(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "BLOCK", 1)  # 256 columns at a time: several blocks
    draw = torch.Generator().manual_seed(1)
    sent = {c: {"w": torch.randn(900, generator=draw), "n": torch.tensor(c)} for c in range(12)}
    given = {"w": torch.randn(900, generator=draw)}
    expected = result(settings, sent, 1, given)
    for threads, uploads in ((4, sent), (2, {c: mapped(u, tmp_path) for c, u in sent.items()})):
        found = result(settings, uploads, threads, given)
        assert torch.equal(found["w"], expected["w"])
    monkeypatch.setattr(rows, "BLOCK", 1 << 19)  # one block
    found = result(settings, sent, 1, given)["w"]
    is_by_value = settings.reduce in ("median", "trimmed_mean") and settings.mix is None
    torch.testing.assert_close(found, expected["w"], rtol=0 if is_by_value else 1e-6, atol=0)


def mapped(upload, directory):
    """Return an upload in a mapped file, with other numbers in the gaps between its tensors."""
    kept = packed(upload)
    file = directory / f"upload-{int(upload['n'])}"
    file.write_bytes(kept.block.numpy().tobytes())
    with file.open("r+b") as opened:
        block = torch.from_numpy(np.frombuffer(mmap.mmap(opened.fileno(), 0), np.uint8))
    for end, begin in zip(
        kept.layout.ends, [*kept.layout.offsets[1:], kept.layout.size], strict=True
    ):
        block[end:begin] = 255
    return PackedWeights(kept.names, kept.layout, block)


def test_narrow_and_wide_floats_beside_one_another():
    draw = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float64, torch.float32, torch.float16)
    sent = {c: {str(d): torch.randn(4, generator=draw).to(d) for d in dtypes} for c in range(5)}
    found = result(Reduction(reduce="median"), sent)
    for name, tensor in found.items():
        rows_ = torch.stack([one[name] for one in sent.values()])
        assert torch.equal(tensor, rows_.median(0).values)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 50, 99])
def test_the_network_sorts(count):
    numbers = np.random.default_rng(count).integers(0, 9, (count, 40)).astype(np.float32)
    wanted = tuple(range(count // 3, count))
    found = coordinates._sorted(numbers, wanted)
    expected = np.sort(numbers, axis=0)
    assert all(np.array_equal(found[i], expected[i]) for i in wanted)


def test_buckets_derive_from_the_seed():
    settings, sent = Reduction(reduce="median", mix="bucketing", bucket_size=3), drawn(12)
    one, again, other = (flat(result(settings, sent, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


# --- prototypes -----------------------------------------------------------------------------------


def test_prototypes_take_the_rule_by_class_and_the_median_where_few_have_one():
    """Of class 0 Krum takes one of five; class 1 has three clients, too few, and their median."""

    def row(v):
        return torch.tensor([v]), 2

    values = (0.0, 1.0, 2.0, 3.0, 10.0)
    held = {c: {0: row(v), **({1: row(v)} if c >= 2 else {})} for c, v in enumerate(values)}
    sent = {c: Bundle({}, {"class": Prototypes.of(rows_, 1)}) for c, rows_ in held.items()}
    uploads = Uploads(sent, lambda _: 1.0, rule=RobustRule(Reduction(reduce="krum", attackers=1)))
    found = uploads.mean_prototypes("class", 2, 1, uniform=True)
    assert found.vectors.tolist() == [[1.0], [3.0]]
    assert found.counts.tolist() == [10, 6]
    assert uploads.shares["class"] == {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.5, 4: 0.0}


@pytest.mark.parametrize(
    ("rare", "vectors", "shares"),
    [
        # class 0 has five holders; class 1 three, of whom two lie; class 2 an honest and a liar
        (None, [2.0, 9.0, 5.0], {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.25, 4: 1 / 3}),
        ("keep", [2.0, 0.5], {0: 0.0, 1: 0.0, 2: 0.5, 3: 0.0, 4: 0.0}),
    ],
)
def test_classes_whose_holders_may_all_lie_are_told_and_stay_if_so_wanted(rare, vectors, shares):
    """With f = 2, four holders are too few. Class 1 was given as 0.5, and class 2 was not given."""
    held = {0: {0: 0.0}, 1: {0: 1.0, 2: 1.0}, 2: {0: 2.0, 1: 0.0}, 3: {0: 3.0, 1: 9.0}}
    held[4] = {0: 4.0, 1: 9.0, 2: 9.0}
    sent = {
        c: Bundle(
            {}, {"class": Prototypes.of({k: (torch.tensor([v]), 2) for k, v in of.items()}, 1)}
        )
        for c, of in held.items()
    }
    given = Bundle({}, {"class": Prototypes.of({1: (torch.tensor([0.5]), 1)}, 1)})
    rule = RobustRule(Reduction(reduce="median", attackers=2, rare_classes=rare))
    uploads = Uploads(sent, lambda _: 1.0, rule=rule, facts=Facts(given=given))
    found = uploads.mean_prototypes("class", 3, 1, uniform=True)
    assert found.vectors.flatten().tolist() == vectors
    assert uploads.rare_classes == {"class": [1, 2]}
    assert uploads.shares["class"] == pytest.approx(shares)


@pytest.mark.parametrize(("given", "expected"), [((), 2.0), ((5.0,), 4.0)])
def test_prototypes_are_clipped_about_what_was_given_or_else_about_the_median(given, expected):
    """About the median 2: 2 + (-1 + 0 + 1) / 3. About the given 5: 5 + (-1 - 1 - 1) / 3."""
    rows_ = {0: (torch.tensor(given), 1)} if given else {}
    facts = Facts(given=Bundle({}, {"class": Prototypes.of(rows_, 1)}))
    values = (1.0, 2.0, 9.0) if not given else (1.0, 2.0, 3.0)
    sent = {
        c: Bundle({}, {"class": Prototypes.of({0: (torch.tensor([v]), 1)}, 1)})
        for c, v in enumerate(values)
    }
    rule = RobustRule(Reduction(reduce="norm_clipped", clip_norm=1.0))
    uploads = Uploads(sent, lambda _: 1.0, rule=rule, facts=facts)
    found = uploads.mean_prototypes("class", 1, 1, uniform=True).vectors
    assert found.tolist() == [[pytest.approx(expected)]]


# --- refusals -------------------------------------------------------------------------------------


def test_the_mean_is_the_mean():
    assert rule_of(Reduction()) is rule_of(Reduction(reduce="mean")) is MEAN


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"reduce": "krum"}, "krum' needs attackers"),
        ({"reduce": "median", "mix": "nearest"}, 'mix = "nearest" needs attackers'),
        ({"attackers": 1}, "attackers belongs to"),
        ({"rare_classes": "keep"}, "rare_classes belongs to"),
        ({"reduce": "median", "rare_classes": "keep"}, "needs attackers"),
        ({"mix": "bucketing"}, "mix belongs to a rule other than mean"),
        ({"reduce": "median", "bucket_size": 3}, "bucket_size belongs to"),
        ({"reduce": "median", "clip_norm": 1.0}, "clip_norm belongs to"),
        ({"reduce": "krum", "attackers": 1, "iterations": 2}, "iterations belongs to"),
        ({"reduce": "norm_clipped", "clip_norm": 1.0, "clip_factor": 2.0}, "give one of them"),
    ],
)
def test_keys_belong_to_their_rule(settings, line):
    with pytest.raises(ValueError, match=line):
        Reduction(**settings)


@pytest.mark.parametrize(
    ("settings", "fewest"),
    [
        ({"reduce": "median"}, 1),
        ({"reduce": "median", "attackers": 2}, 5),
        ({"reduce": "trimmed_mean", "attackers": 2}, 5),
        ({"reduce": "krum", "attackers": 2}, 7),
        ({"reduce": "bulyan", "attackers": 2}, 11),
        ({"reduce": "median", "mix": "nearest", "attackers": 2}, 5),
        ({"reduce": "krum", "attackers": 1, "mix": "bucketing"}, 9),  # five buckets, the last of 1
    ],
)
def test_a_rule_needs_so_many_uploads(settings, fewest):
    rule = Reduction(**settings)
    assert rule.fewest_uploads == fewest
    result(rule, drawn(fewest))
    if fewest > 1:
        with pytest.raises(TooFewClients, match=f"needs {fewest} uploads that count, and inter"):
            result(rule, drawn(fewest - 1))
