import json
import tracemalloc

import numpy as np
import pytest

from fedmodels.errors import DataError, PayloadError
from fedmodels.facts.data_description import ClientFile, Normaliser, ProblemFile, read_file
from fedsrv.engine.client_profile import Profile

FACTS = {
    "format": 1,
    "input_shape": [3, 8, 8],
    "num_classes": 2,
    "tasks": [{"train": [3, 1], "test": [1, 0]}],
}


def test_normaliser_broadcasts_over_channels():
    images = ProblemFile(
        input_shape=(3, 2, 2), num_classes=2, scale=2.0, mean=(1, 2, 3), std=(1, 2, 4)
    )
    out = Normaliser.of(images)(np.full((5, 3, 2, 2), 8, dtype=np.uint8))
    assert out[0, :, 0, 0].tolist() == [3.0, 1.0, 0.25]
    windows = ProblemFile(input_shape=(4, 2), num_classes=2, mean=(1, 2), std=(1, 2))
    assert Normaliser.of(windows)(np.full((1, 4, 2), 4.0))[0, 0].tolist() == [3.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"scale": 0.0}, "scale: Input should be greater than 0"),
        ({"num_classes": 100_001}, "num_classes: Input should be less than or equal to 100000"),
        ({"input_shape": [4096, 4097]}, "input_shape must have 16777216 values at most"),
        ({"std": [1e-50]}, "mean / std and 1 / std must be finite in float32"),
        ({"mean": [1e39]}, "mean / std and 1 / std must be finite in float32"),
        ({"class_names": ["a"]}, "class_names must hold 2 names"),
        ({"class_name": ["a", "b"]}, "class_name: Extra .* permitted. Did you mean 'class_names'"),
        ({"tasks": None}, "tasks: Input should be a valid array"),
        ({"tasks": [{"train": [1], "test": [1, 2]}]}, "tasks.0.train must hold 2 counts"),
        (
            {"tasks": [{"train": [1, 2], "test": [1, 2**31]}]},
            "tasks.0.test.1: Input should be",
        ),
    ],
)
def test_both_sides_refuse_the_same_with_the_same_words(changes, line, tmp_path):
    text = json.dumps(FACTS | changes)
    (tmp_path / "client.json").write_text(text)
    with pytest.raises(DataError, match=f"client.json: .*{line}"):
        read_file(tmp_path / "client.json", ClientFile)
    with pytest.raises(PayloadError, match=f"client 3: client.json is malformed: .*{line}"):
        Profile.parse(3, text)


def test_what_strangers_call_their_keys_makes_no_line_of_a_log():
    with pytest.raises(PayloadError) as refused:
        Profile.parse(3, json.dumps({**FACTS, "\x1b[2J\n" + "x" * 10_000: 1}))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1100


def test_many_faults_cost_no_more_than_one():
    """A list of wrong counts ends at the first: each fault would take hundreds of bytes."""
    text = json.dumps(FACTS | {"tasks": [{"train": [2**31] * 100_000, "test": [1, 2]}]})
    tracemalloc.start()
    with pytest.raises(PayloadError, match=r"tasks\.0\.train\.0: Input should be less than"):
        Profile.parse(3, text)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
