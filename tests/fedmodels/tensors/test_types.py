import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.errors import PayloadError, PayloadTooLarge
from fedmodels.tensors.bundle import (
    DTYPE_NAMES,
    DTYPES,
    Bundle,
    GeneratorState,
    Histogram,
    Prototypes,
    check_finite,
    state_digest,
    tensor_bytes,
)
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec, prototype_spec, scalar_spec

NAME = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=6)
PATH = st.lists(NAME, min_size=1, max_size=3).map("/".join)
TENSOR = st.builds(
    lambda name, shape: torch.zeros(shape, dtype=DTYPES[name]),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 3), max_size=3),
)
ROWS = st.dictionaries(st.integers(0, 99), st.integers(1, 50), max_size=4)
PROTOTYPES = ROWS.map(
    lambda rows: Prototypes.of({k: (torch.ones(3), n) for k, n in rows.items()}, 3)
)
HISTOGRAM = st.builds(Histogram, *[st.just(torch.zeros(3, dtype=torch.int32))] * 2)
BUNDLE = st.builds(
    Bundle,
    weights=st.dictionaries(PATH, TENSOR, max_size=3),
    prototypes=st.dictionaries(PATH, PROTOTYPES, max_size=2),
    generators=st.dictionaries(
        NAME,
        st.builds(GeneratorState, st.integers(0, 9), st.dictionaries(PATH, TENSOR, max_size=2)),
        max_size=2,
    ),
    histogram=st.none() | HISTOGRAM,
    scalars=st.dictionaries(NAME, st.floats(allow_nan=False), max_size=2),
)


def facts_of(bundle: Bundle) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {key: (t.dtype, tuple(t.shape)) for key, t in bundle.by_key().items()}


@given(BUNDLE)
def test_flat_round_trip(bundle):
    again = Bundle.from_keys(bundle.by_key())
    assert list(again.by_key()) == sorted(bundle.by_key())
    assert again.scalars == bundle.scalars
    assert again.weights.keys() == bundle.weights.keys()
    assert again.prototypes.keys() == bundle.prototypes.keys()
    assert {k: g.version for k, g in again.generators.items()} == {
        k: g.version for k, g in bundle.generators.items()
    }
    assert state_digest([("a", again)]) == state_digest([("a", bundle)])
    assert again.num_bytes() == bundle.num_bytes()


@given(BUNDLE)
def test_a_bundle_meets_its_own_spec(bundle):
    spec = BundleSpec.of(bundle)
    spec.check(facts_of(bundle))
    assert spec.max_bytes == bundle.num_bytes()


def test_dtype_names():
    assert {DTYPE_NAMES[d]: d for d in DTYPES.values()} == DTYPES


def test_prototype_rows():
    rows = {3: (torch.tensor([1.0, 2]), 5), 1: (torch.tensor([3.0, 4]), 7)}
    prototypes = Prototypes.of(rows, 2)
    assert prototypes.labels.tolist() == [1, 3]
    assert prototypes.vectors.tolist() == [[3, 4], [1, 2]]
    assert {k: (v.tolist(), n) for k, (v, n) in prototypes.rows().items()} == {
        1: ([3, 4], 7),
        3: ([1, 2], 5),
    }
    assert Prototypes.of({}, 4).vectors.shape == (0, 4)


def test_sizes_of_the_cards():
    # gldp.md, section 6: ten prototypes of 512 coordinates, ids and vectors, and counts of int32
    ten = Prototypes.of({k: (torch.zeros(512), 1) for k in range(10)}, 512)
    assert Bundle(prototypes={"class": ten}).num_bytes() == 10 * 2_056


@pytest.mark.parametrize("key", ["weight/a", "weights", "prototypes/class", "generators/3", "x"])
def test_keys_of_no_field(key):
    with pytest.raises(PayloadError, match=f"unknown key '{key}'"):
        Bundle.from_keys({key: torch.zeros(1)})


@pytest.mark.parametrize(
    "key",
    ["prototypes/class/vectors", "generators/3/tensors/w", "histogram/round", "prototypes/a/b"],
)
def test_incomplete_fields(key):
    with pytest.raises(PayloadError, match="incomplete"):
        Bundle.from_keys({key: torch.zeros(1)})


def test_spec_check():
    spec = prototype_spec("class", 4, 10) | scalar_spec("loss")
    facts = facts_of(Bundle(prototypes={"class": Prototypes.of({}, 4)}, scalars={"loss": 1.0}))
    spec.check(facts)
    with pytest.raises(PayloadError, match="'scalars/loss' is missing"):
        spec.check({k: v for k, v in facts.items() if k != "scalars/loss"})
    with pytest.raises(PayloadError, match=r"unexpected tensor 'scalars/los'\. Did you mean"):
        spec.check({**facts, "scalars/los": (torch.float64, ())})
    with pytest.raises(PayloadError, match=r"is float32 \[0, 5\]; expected float32 \[None, 4\]"):
        spec.check({**facts, "prototypes/class/vectors": (torch.float32, (0, 5))})
    with pytest.raises(PayloadError, match="expected float64"):
        spec.check({**facts, "scalars/loss": (torch.float32, ())})
    with pytest.raises(PayloadTooLarge, match="at most"):
        spec.check({**facts, "prototypes/class/vectors": (torch.float32, (1000, 4))})
    with pytest.raises(PayloadError, match="labels"):
        spec.check({**facts, "prototypes/class/labels": (torch.int32, (11,))})


def test_optional_keys_may_come():
    spec = BundleSpec({}, {"scalars/a": TensorSpec(torch.float64, ())})
    spec.check({})
    spec.check({"scalars/a": (torch.float64, ())})
    with pytest.raises(PayloadError, match="unexpected"):
        spec.check({"scalars/b": (torch.float64, ())})


def test_tensor_bytes_are_views_where_they_can_be():
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    view = tensor_bytes(tensor)
    assert view.nbytes == 8
    tensor.fill_(1)
    assert bytes(view) == b"\x80\x3f" * 4
    assert bytes(tensor_bytes(torch.arange(4).reshape(2, 2).T)[:24:8]) == b"\x00\x02\x01"
    assert bytes(tensor_bytes(torch.zeros(0))) == b""
    assert bytes(tensor_bytes(torch.tensor(True))) == b"\x01"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_check_finite(bad):
    check_finite(Bundle({"w": torch.ones(3), "n": torch.tensor(1), "e": torch.zeros(0)}))
    with pytest.raises(PayloadError, match="'weights/v'"):
        check_finite(Bundle({"w": torch.ones(3), "v": torch.tensor([0.0, bad, 1.0])}))


def test_digest_tells_apart():
    def digest(*bundles: tuple[str, Bundle]) -> str:
        return state_digest(list(bundles))

    base = digest(("a", Bundle({"w": torch.zeros(2)})))
    others = [
        digest(("b", Bundle({"w": torch.zeros(2)}))),
        digest(("a", Bundle({"v": torch.zeros(2)}))),
        digest(("a", Bundle({"w": torch.zeros(1, 2)}))),
        digest(("a", Bundle({"w": torch.zeros(2, dtype=torch.int32)}))),
        digest(("a", Bundle({"w": torch.tensor([0.0, -0.0])}))),
        digest(("a", Bundle({"w": torch.zeros(2)})), ("b", Bundle())),
        digest(),
    ]
    assert base not in others[:5]
    assert digest(("a", Bundle({"w": torch.zeros(4)[::2]}))) == base
