"""Compact forms: numbers by hand, what any tensors come back as, and lies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.tensors.compact_forms import INDICES, SCALES, VALUES, Floats, Form, Int8, TopK

ALL: list[Form] = [Floats(torch.float32), Floats(torch.float16), Floats(torch.bfloat16), Int8(),
                   TopK(0.3), TopK(1.0)]  # fmt: skip
TENSORS = {"a": torch.tensor([[1.0, -2.54], [0.3, 0.0]]), "b": torch.tensor([0.5, -0.001])}
SHAPES = {"a": (2, 2), "b": (2,)}


def test_int8_by_hand():
    """Steps of a: 2.54/127 = 0.02, so 1 is 50 steps and 0.3 is 15. Of b: 0.5/127; -0.001 is 0."""
    packed = Int8().packed(TENSORS)
    assert packed["a"].tolist() == [[50, -127], [15, 0]]
    assert packed["b"].tolist() == [127, 0]
    assert packed[SCALES].tolist() == pytest.approx([0.02, 0.5 / 127])
    back = Int8().unpacked(packed, SHAPES)
    assert back["a"].flatten().tolist() == pytest.approx([1.0, -2.54, 0.3, 0.0])
    assert back["b"].tolist() == pytest.approx([0.5, 0.0])


def test_top_k_by_hand():
    """Three of six: 1, -2.54 and 0.5, at places 0, 1 and 4 of both tensors in a row."""
    form = TopK(0.5)
    packed = form.packed(TENSORS)
    assert packed[INDICES].tolist() == [0, 1, 4]
    assert packed[VALUES].tolist() == pytest.approx([1.0, -2.54, 0.5])
    back = form.unpacked(packed, SHAPES)
    assert back["a"].flatten().tolist() == pytest.approx([1.0, -2.54, 0.0, 0.0])
    assert back["b"].tolist() == [0.5, 0.0]


def test_halves_by_hand():
    """1/3 has 11 significant bits in float16 and 8 in bfloat16."""
    third = {"a": torch.tensor([1 / 3])}
    for dtype, expected in ((torch.float16, 1365 / 4096), (torch.bfloat16, 171 / 512)):
        form = Floats(dtype)
        assert float(form.unpacked(form.packed(third), {"a": (1,)})["a"]) == expected


def test_tensors_of_zeros_and_of_nothing_come_back():
    nothing = {"a": torch.zeros(3), "b": torch.zeros(0, 2)}
    for form in ALL:
        back = form.unpacked(form.packed(nothing), {"a": (3,), "b": (0, 2)})
        assert torch.equal(back["a"], nothing["a"])
        assert back["b"].shape == (0, 2)


sizes = st.floats(-1e5, 1e5, width=32, allow_subnormal=True)


@given(st.lists(st.lists(sizes, min_size=1, max_size=7), min_size=1, max_size=3))
def test_no_form_is_off_by_more_than_half_a_step(rows):
    """Within half a step of each type; an element that travels with top-k is itself."""
    tensors = {f"t{i}": torch.tensor(row) for i, row in enumerate(rows)}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    for form in ALL:
        if form == Floats(torch.float16) and max(map(_size, tensors.values())) > 65000:
            continue
        packed = form.packed(tensors)
        stated = {n: (s.dtype, s.shape) for n, s in form.specs(shapes).items()}
        assert stated == {name: (t.dtype, tuple(t.shape)) for name, t in packed.items()}
        back = form.unpacked(packed, shapes)
        for name, tensor in tensors.items():
            assert back[name].dtype == torch.float32
            off = (back[name] - tensor).abs()
            if isinstance(form, TopK):
                assert bool((off[back[name] != 0] == 0).all())
            else:
                assert bool((off <= _tolerance(form, tensor)).all())


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _tolerance(form: Form, tensor: Tensor) -> Tensor | float:
    if isinstance(form, Int8):
        return _size(tensor) / 127 * 0.5001 + 1e-43
    if form == Floats(torch.float16):
        return tensor.abs() * 2**-11 + 2**-25
    return tensor.abs() * 2**-8 + 1e-40 if form == Floats(torch.bfloat16) else 0.0


def test_what_a_form_cannot_hold_is_refused_by_name():
    with pytest.raises(PayloadError, match="'b' holds values that float16 cannot hold"):
        Floats(torch.float16).packed({"a": torch.ones(1), "b": torch.tensor([1e5])})
    with pytest.raises(PayloadError, match="'a' holds NaN or infinite values"):
        Int8().packed({"a": torch.tensor([float("nan")])})


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), 1e7])
def test_a_scale_that_lies_is_refused(scale):
    packed = {**Int8().packed(TENSORS), SCALES: torch.tensor([0.1, scale])}
    with pytest.raises(PayloadError, match=r"'weights/compact/scales' says .* at 1"):
        Int8().unpacked(packed, SHAPES)


@pytest.mark.parametrize("places", [[0, 0, 1], [2, 1, 0], [-1, 0, 1], [0, 1, 6]])
def test_places_that_lie_are_refused(places):
    form = TopK(0.5)
    packed = {**form.packed(TENSORS), INDICES: torch.tensor(places, dtype=torch.int32)}
    with pytest.raises(PayloadError, match="rising places between 0 and 5"):
        form.unpacked(packed, SHAPES)
