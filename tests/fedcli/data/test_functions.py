"""Data sets that a function returns: torch's pairs become arrays, and mistakes get one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedmodels.config.scenario import Data
from fedmodels.errors import DataError

GOOD = """
import torch
from torch.utils.data import Dataset

class Squares(Dataset):
    classes = ["even", "odd"]
    def __init__(self, n):
        self.n = n
        self.groups = [i % 3 for i in range(n)]
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        return torch.full((1, 4, 4), float(i)), i % 2

def load():
    return Squares(6), Squares(4)
"""


def loaded(folder: Path, text: str, function: str = "load") -> Dataset:
    (folder / "mine.py").write_text(text)
    return load(Data(name=f"{folder / 'mine.py'}:{function}"))


def test_two_torch_data_sets_are_a_data_set(tmp_path: Path) -> None:
    found = loaded(tmp_path, GOOD)
    assert found.train_x.shape == (6, 1, 4, 4)
    assert found.train_x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.test_y.tolist() == [0, 1, 0, 1]
    assert found.class_names == ("even", "odd")
    assert found.mean == (2.5,)
    assert found.groups_test is not None
    assert found.groups_test.tolist() == [0, 1, 2, 0]


def test_pictures_stay_bytes_and_put_channels_first(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        "from PIL import Image\n"
        "def load():\n"
        "    picture = Image.new('RGB', (3, 2), (255, 0, 51))\n"
        "    return [(picture, 0), (picture, 1)], [(picture, 1)]\n",
    )
    assert found.input_shape == (3, 2, 3)
    assert (found.train_x.dtype, found.scale) == ("uint8", 255)
    assert found.mean == pytest.approx((1, 0, 0.2))


def test_a_function_may_take_the_source_and_return_the_data_set(tmp_path: Path) -> None:
    text = (
        "from fedcli.data.sets.images import digits\n"
        "def load(source):\n    assert source.data.name.endswith('load')\n    return digits(source)"
    )
    assert loaded(tmp_path, text).name == "digits"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("return 3", "returned int; it must return two torch data sets"),
        ("return iter([]), []", "an IterableDataset does not"),
        ("return [([1.0], 0)], [([1.0], 0, 2)]", "the test set: example 0 is no pair"),
        ("return [([1.0], 0), ([1.0, 2.0], 0)], []", "example 1 is float32 (2,), the first one"),
        ("return [([1.0], -1)], []", "has the label -1; a label is an integer from 0 on"),
        ("return [([1.0], 0.5)], []", "has the label 0.5"),
        ("return [([float('nan')], 0)], []", "example 0 holds NaN or infinity"),
        ("return [(['a'], 0)], []", "not an array of numbers"),
        ("return [([1.0], 0)], []", "there is no test example"),
        ("return [([1.0], 0)], [([1.0, 2.0], 0)]", "training inputs are float32 (1,), test inputs"),
        ("raise KeyError('x')", "failed: KeyError: 'x'"),
    ],
)
def test_a_mistake_gets_one_line(tmp_path: Path, body: str, line: str) -> None:
    with pytest.raises(DataError, match=re.escape(line)) as caught:
        loaded(tmp_path, f"def load():\n    {body}\n")
    assert "\n" not in str(caught.value)
    assert "load" in str(caught.value)


def test_something_else_than_a_function_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no function: it is int"):
        loaded(tmp_path, "load = 3\n")


def test_two_sets_with_other_classes_are_refused(tmp_path):
    """A folder of test images that lacks a class would number the others anew."""
    code = tmp_path / "mine.py"
    code.write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def load():\n"
        "    x, y = torch.rand(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])\n"
        "    train, test = TensorDataset(x, y), TensorDataset(x, y)\n"
        "    train.classes, test.classes = ['bar', 'box', 'disc'], ['box', 'disc']\n"
        "    return train, test\n"
    )
    with pytest.raises(
        DataError, match=r"\['bar', 'box', 'disc'\], the test set \['box', 'disc'\]"
    ):
        load(Data(name=f"{code}:load"))
