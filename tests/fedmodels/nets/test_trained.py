"""What a trained model takes for raw inputs, and what its file may say of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedmodels.errors import ArchiveError, DataError
from fedmodels.nets import make_net
from fedmodels.nets.split import weights_of
from fedmodels.nets.trained import KEY, ModelFacts, TrainedModel, header_of


def model(shape: tuple[int, ...] = (1, 2, 2), **facts: Any) -> TrainedModel:
    net = make_net("mlp", num_classes=3, input_shape=shape, hidden=[4])
    said = ModelFacts("mlp", {"hidden": [4]}, shape, 3, **facts)
    return TrainedModel(said, weights_of(net))


@pytest.mark.parametrize(
    ("x", "line"),
    [
        (np.full((1, 1, 2, 2), -1, np.int8), "holds values down to -1; .* from 0 to 255"),
        (np.full((1, 1, 2, 2), -300), "holds values down to -300"),
        (np.full((1, 1, 2, 2), -0.5), r"holds values down to -0\.5"),
        (np.full((1, 1, 2, 2), 256, np.uint16), "goes up to 256"),
        (np.full((1, 1, 2, 2), 0.5), "holds fractions"),
    ],
)
def test_a_model_of_byte_images_takes_bytes_alone(x, line):
    asked = model(scale=255.0)
    for ask in (asked.predict, asked.probabilities):
        with pytest.raises(DataError, match=line):
            ask(x)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int64", "float16"])
def test_a_model_takes_numbers_of_any_type(dtype):
    x = np.arange(8).reshape(2, 1, 2, 2)
    asked = model(scale=255.0)
    assert asked.predict(x.astype(dtype)).tolist() == asked.predict(x).tolist()


@pytest.mark.parametrize(
    ("shape", "scale"), [((16, 6), 9.81), ((16, 6), 100.0), ((1, 2, 2), 1000.0), ((4,), 2.0)]
)
def test_a_scale_that_is_not_of_bytes_bounds_nothing(shape, scale):
    """Numbers that are divided by a scale of their owner's may exceed it, or lie below 0."""
    x = np.linspace(-3 * scale, 3 * scale, 2 * int(np.prod(shape)), dtype=np.float32)
    assert model(shape, scale=scale).predict(x.reshape(2, *shape)).shape == (2,)


def described(**change: Any) -> str:
    """Return what a file says of its model, with some of it changed."""
    return json.dumps({**json.loads(header_of(model().facts)[KEY]), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"net": 5},
        {"options": []},
        {"input_shape": 8},
        {"input_shape": [1, -2, 2]},
        {"num_classes": "3"},
        {"scale": 0},
        {"scale": float("nan")},
        {"mean": None},
        {"mean": [0.1, 0.2]},
        {"std": [0.0]},
        {"class_names": ["a"]},
        {"rule": 5},
        {"round": "last"},
    ],
    ids=str,
)
def test_a_file_that_says_something_else_of_its_model(change):
    assert ModelFacts.parse(described(), "here").input_shape == [1, 2, 2]
    name = next(iter(change))
    with pytest.raises(ArchiveError, match=rf"^here does not describe its model: .*{name}"):
        ModelFacts.parse(described(**change), "here")


@pytest.mark.parametrize("text", ["[]", "5", "null", "{}", "{", "[" * 100_000])
def test_a_file_that_says_nothing_of_its_model(text):
    with pytest.raises(ArchiveError, match=r"^here does not describe its model: "):
        ModelFacts.parse(text, "here")


def test_a_model_answers_with_one_name_for_classes_that_are_one():
    plain = model((4,), class_names=["a", "b", "c"])
    one = TrainedModel(replace(plain.facts, merged=[[0, 2]]), weights_of(plain.net))
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    shares = plain.probabilities(x)
    assert one.class_names == ["b", "c"]
    assert np.allclose(
        one.probabilities(x), np.stack([shares[:, 1], shares[:, 0] + shares[:, 2]], 1)
    )
    assert one.predict(x).tolist() == one.probabilities(x).argmax(1).tolist()
    assert one.predict(x[:0]).shape == (0,)


@pytest.mark.parametrize(
    "merged", [[[0, 3]], [[0, 1], [0, 2]], [[0, 1], [1, 2]], [[True, 2]], 1, ["ab"]]
)
def test_a_file_says_of_classes_of_its_own_alone_that_they_are_one(merged):
    with pytest.raises(ArchiveError, match="merged are no two classes"):
        ModelFacts.parse(described(merged=merged), "m")
