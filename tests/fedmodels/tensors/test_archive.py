import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmodels.errors import ArchiveError
from fedmodels.nets import make_net
from fedmodels.nets.split import weights_of
from fedmodels.tensors import archive
from fedmodels.tensors.bundle import (
    DTYPES,
    Bundle,
    GeneratorState,
    Histogram,
    Prototypes,
    state_digest,
    tensor_bytes,
)
from fedmodels.tensors.packed_weights import PackedWeights, names_and_layout


def rich_bundle() -> Bundle:
    every = {f"base/{n}": torch.randint(0, 2, (3, 2)).to(d) for n, d in DTYPES.items()}
    empty = {f"head/empty-{n}": torch.zeros((0, 4), dtype=d) for n, d in DTYPES.items()}
    odd = {"head/nan": torch.tensor([float("nan"), -0.0, float("inf")]), "head/n": torch.tensor(3)}
    return Bundle(
        {**every, **empty, **odd},
        {
            "class": Prototypes.of({2: (torch.randn(5), 4), 0: (torch.randn(5), 1)}, 5),
            "alp/3": Prototypes.of({}, 7),
        },
        {"3": GeneratorState(2, {"net/w": torch.randn(2)}), "flow": GeneratorState(0, {})},
        Histogram(torch.tensor([1, 0], dtype=torch.int32), torch.tensor([4, 2], dtype=torch.int32)),
        {"loss": 0.1, "num_examples": 7.0},
    )


def assert_same_bits(a: Bundle, b: Bundle) -> None:
    one, two = a.by_key(), b.by_key()
    assert list(one) == list(two)
    for key in one:
        assert one[key].dtype == two[key].dtype
        assert one[key].shape == two[key].shape
        assert bytes(tensor_bytes(one[key])) == bytes(tensor_bytes(two[key]))


def test_round_trip_is_bitwise(tmp_path):
    bundle, header = rich_bundle(), {"interaction": 3, "method": "gldp", "parts": [1, {"x": None}]}
    archive.save(tmp_path / "state.safetensors", bundle, header)
    again, read = archive.load(tmp_path / "state.safetensors")
    assert read == header
    assert_same_bits(bundle, again)
    assert state_digest([("s", bundle)]) == state_digest([("s", again)])
    assert os.listdir(tmp_path) == ["state.safetensors"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
def test_any_weights_round_trip(tmp_path, facts):
    weights = {
        key: torch.randint(0, 200, shape).to(DTYPES[name]) for key, (name, shape) in facts.items()
    }
    archive.save(tmp_path / "a", Bundle(weights), {})
    assert_same_bits(Bundle(weights), archive.load(tmp_path / "a")[0])


def test_several_bundles_in_one_file(tmp_path):
    named = {"core": rich_bundle(), "client/3": Bundle({"a:b/c": torch.ones(2)}), "none": Bundle()}
    archive.save_named(tmp_path / "a", named, {"n": 1})
    bundles, header = archive.load_named(tmp_path / "a")
    assert header == {"n": 1}
    assert set(bundles) == {"core", "client/3"}
    for name, bundle in bundles.items():
        assert_same_bits(bundle, named[name])


def test_the_keys_of_a_bundle_saved_alone_are_its_own(tmp_path):
    from safetensors import safe_open

    bundle = Bundle({"base:x/w": torch.ones(2)}, scalars={"loss": 1.0})
    archive.save(tmp_path / "a", bundle, {})
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert sorted(file.keys()) == ["scalars/loss", "weights/base:x/w"]
    assert_same_bits(bundle, archive.load(tmp_path / "a")[0])


def test_views_of_one_buffer(tmp_path):
    whole = torch.arange(12.0)
    shared = Bundle(
        {"a": whole[:4], "b": whole[4:].view(2, 4), "c": whole, "d": whole.view(3, 4).T}
    )
    archive.save(tmp_path / "a", shared, {}, fsync=True)
    loaded, _ = archive.load(tmp_path / "a")
    assert_same_bits(shared, loaded)
    archive.save(tmp_path / "b", loaded, {})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path):
    archive.save(tmp_path / "a", Bundle({"w": torch.ones(1000)}), {})
    before = (tmp_path / "a").read_bytes()
    loaded, _ = archive.load(tmp_path / "a")
    loaded.weights["w"].zero_()
    assert (tmp_path / "a").read_bytes() == before


def test_a_loaded_bundle_outlives_its_file(tmp_path):
    archive.save(tmp_path / "a", Bundle({"w": torch.arange(1000.0)}), {})
    loaded, _ = archive.load(tmp_path / "a", verify=False)
    archive.save(tmp_path / "a", Bundle({"w": torch.zeros(1000)}), {})
    assert torch.equal(loaded.weights["w"], torch.arange(1000.0))
    (tmp_path / "a").unlink()
    assert torch.equal(loaded.weights["w"], torch.arange(1000.0))


def test_missing_file(tmp_path):
    with pytest.raises(ArchiveError, match=r"state is missing$"):
        archive.load(tmp_path / "state")


def test_every_damage_is_one_line(tmp_path):
    path = tmp_path / "a"
    archive.save(path, Bundle({"w": torch.randn(50), "v": torch.randn(3)}), {"n": 1})
    good = path.read_bytes()
    damaged = [good[:n] for n in (0, 4, 9, 60, len(good) - 1)]
    damaged += [good + b"x", b"\xff" * 8 + good[8:], b"not an archive at all"]
    damaged += [good[:n] + bytes([good[n] ^ 1]) + good[n + 1 :] for n in (len(good) - 1, -1 - 100)]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ArchiveError) as caught:
            archive.load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_any_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "a"
    archive.save(path, Bundle({"w": torch.arange(6.0)}), {"n": 1})
    good = path.read_bytes()
    noticed = 0
    for n in range(len(good)):
        path.write_bytes(good[:n] + bytes([good[n] ^ 2]) + good[n + 1 :])
        try:
            archive.load(path)
        except ArchiveError:
            noticed += 1
    # what is left are bytes of the header's own values and of the padding
    assert noticed >= len(good) - 12


def test_foreign_files(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "a")
    with pytest.raises(ArchiveError, match="no archive: no 'fedtide'"):
        archive.load(tmp_path / "a")
    save_file({"w": torch.zeros(1)}, tmp_path / "a", {"fedtide": '{"format": 1}'})
    with pytest.raises(ArchiveError, match="no archive"):
        archive.load(tmp_path / "a")
    facts = '{"format": 9, "crc32": 0, "header": {}}'
    save_file({"weights/w": torch.zeros(1)}, tmp_path / "a", {"fedtide": facts})
    with pytest.raises(ArchiveError, match="has format 9"):
        archive.load(tmp_path / "a")


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    archive.save(path, Bundle(scalars={"x": 1.0}), {})
    with pytest.raises(ArchiveError, match="no JSON"):
        archive.save(path, Bundle(), {"x": object()})
    with pytest.raises(ArchiveError, match="may not travel"):
        archive.save(path, Bundle({"w": torch.zeros(1, dtype=torch.complex64)}), {})
    with pytest.raises(ArchiveError, match=r"cannot write .*none/a: No such file or directory$"):
        archive.save(tmp_path / "none" / "a", Bundle(), {})
    assert archive.load(path)[0].scalars == {"x": 1.0}
    assert os.listdir(tmp_path) == ["a"]


def test_weights_in_one_block_give_the_same_file(tmp_path):
    packed = weights_of(make_net("resnet20", num_classes=3, input_shape=(1, 8, 8)))
    assert isinstance(packed, PackedWeights)
    one_by_one = {name: tensor.clone() for name, tensor in packed.items()}
    for name, weights in (("a", packed), ("b", one_by_one)):
        bundle = Bundle(weights=weights, scalars={"num_examples": 3.0})
        archive.save_named(tmp_path / name, {"common": bundle, "own": bundle}, {"run": "x"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    names, layout = names_and_layout({"w": torch.zeros(2, dtype=torch.complex64)})
    odd = Bundle(weights=PackedWeights(names, layout, layout.empty()))
    with pytest.raises(ArchiveError, match="complex64, which may not travel"):
        archive.save(tmp_path / "c", odd, {})


def test_a_failed_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "serialize_file", full)
    with pytest.raises(ArchiveError, match="No space left"):
        archive.save(tmp_path / "a", Bundle(), {})
    assert os.listdir(tmp_path) == []
