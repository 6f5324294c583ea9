"""Data sets that a function returns: torch's pairs become arrays, and mistakes get one line."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedcli.data.store.commands import run_partition
from fedcli.data.store.partition_writer import digest_of
from fedmodels.config.changes import forbidden_changes
from fedmodels.config.data import Data
from fedmodels.config.scenario import Iid
from fedmodels.errors import DataError
from fedmodels.facts.resolution import experiment_of
from fedsrv.launch.given_data import check_given_data
from fedsrv.launch.hosts import notes_in
from tests.conftest import TABLES

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

BAD = """
class Bad:
    def __init__(self, item=False, length=False, **attributes):
        self.item, self.length = item, length
        self.__dict__.update(attributes)
    def __len__(self):
        return len(None) if self.length else 1
    def __getitem__(self, i):
        if self.item:
            raise OSError("first line\\nsecond line")
        return [1.0], 0

"""


def loaded(folder: Path, text: str, function: str = "load") -> Dataset:
    (folder / "mine.py").write_text(text)
    return load(Data(name=f"{folder / 'mine.py'}:{function}"))


def test_two_torch_data_sets_are_a_data_set(tmp_path):
    found = loaded(tmp_path, GOOD)
    assert found.train.x.shape == (6, 1, 4, 4)
    assert found.train.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.test.y.tolist() == [0, 1, 0, 1]
    assert found.class_names == ("even", "odd")
    assert found.mean == (2.5,)
    assert found.test.groups is not None
    assert found.test.groups.tolist() == [0, 1, 2, 0]


def test_natural_clients_may_have_names(tmp_path):
    """Numbers of the test set stand for the same people, whoever lacks examples there."""
    named = GOOD.replace("i % 3 for", '["ann", "ben", "cem"][-1 - i % 3] for')
    found = loaded(tmp_path, named.replace("Squares(6), Squares(4)", "Squares(6), Squares(2)"))
    assert found.train.groups is not None
    assert found.test.groups is not None
    assert found.train.groups.tolist() == [2, 1, 0, 2, 1, 0]
    assert found.test.groups.tolist() == [2, 1]
    assert found.client_names == ["ann", "ben", "cem"]


def test_pictures_stay_bytes_and_put_channels_first(tmp_path):
    found = loaded(
        tmp_path,
        "from PIL import Image\n"
        "def load():\n"
        "    picture = Image.new('RGB', (3, 2), (255, 0, 51))\n"
        "    return [(picture, 0), (picture, 1)], [(picture, 1)]\n",
    )
    assert found.input_shape == (3, 2, 3)
    assert (found.train.x.dtype, found.scale) == ("uint8", 255)
    assert found.mean == pytest.approx((1, 0, 0.2))


def test_a_function_may_take_the_source_and_return_the_data_set(tmp_path):
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
        ("return [([1.0], 0), ([1.0, 2.0], 0)], []", "example 1 is float64 (2,), the first one"),
        ("return [([1.0], -1)], []", "has the label -1; a label is an integer from 0 to 99999"),
        ("return [([1.0], 0.5)], []", "has the label 0.5"),
        ("return [([float('nan')], 0)], []", "example 0 holds NaN or infinity"),
        ("return [(['a'], 0)], []", "not an array of numbers"),
        ("return [([1.0], 0)], []", "there is no test example"),
        ("return [([1.0], 0)], [([1.0, 2.0], 0)]", "training inputs are float64 (1,), test inputs"),
        ("return [([1.0], 10**12)], []", "has the label 1000000000000; a label is an integer"),
        ("raise KeyError('x')", "failed: KeyError: 'x'"),
        ("return Bad(item=True), []", "training set: example 0 failed: OSError: first line"),
        ("return Bad(length=True), []", "the training set: its length failed: TypeError"),
        ("return [([1.0], 0)], Bad(classes=5)", "the names of classes failed: TypeError"),
        ("return Bad(groups=[[1], [2, 3]]), []", "the training set: groups failed: ValueError"),
    ],
)
def test_a_mistake_gets_one_line(tmp_path, body, line):
    with pytest.raises(DataError, match=re.escape(line)) as caught:
        loaded(tmp_path, f"{BAD}def load():\n    {body}\n")
    assert "\n" not in str(caught.value)
    assert "load" in str(caught.value)


def test_something_else_than_a_function_gets_one_line(tmp_path):
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


DRAWN = """
import os, torch
from torch.utils.data import TensorDataset

def load():
    y = torch.arange(30) % 3
    x = torch.frombuffer(bytearray(os.urandom(120)), dtype=torch.uint8).view(30, 4).float()
    return TensorDataset(x, y), TensorDataset(x, y)
"""


def dealt(data: Data, out: Path) -> str:
    console = Console(file=io.StringIO(), width=100)
    run_partition(data, Iid(kind="iid"), 2, 0, out, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_function_that_draws_is_no_reason_to_delete_a_run(tmp_path):
    (tmp_path / "mine.py").write_text(DRAWN)
    data = Data(name=f"{tmp_path / 'mine.py'}:load")
    dealt(data, tmp_path / "data")
    line = "made of other data: mine.py:load changed, or draws at random. Put it back"
    with pytest.raises(DataError, match=line) as caught:
        dealt(data, tmp_path / "data")
    assert "delete" not in str(caught.value)


def test_the_place_of_the_file_changes_no_partition(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    tables = {**TABLES, "data": {"name": "mine.py:load"}, "scenario": {"kind": "iid"}}
    here = experiment_of({**tables, "schedule": {"clients": 2}})
    monkeypatch.chdir("/")
    there = experiment_of(here.to_dict())  # as a run's config.toml has it
    assert there.data is not None
    assert there.data.name == f"{tmp_path}/mine.py:load"
    dealt(there.data, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    relative = Data(name="mine.py:load")
    assert "the same partition is already in" in dealt(relative, tmp_path / "data")
    table = tmp_path / "data" / "partition.json"
    made = json.loads(table.read_text())
    assert made["config"]["data"]["name"] == "mine.py:load"
    made["config"]["data"]["name"] = "./sub/mine.py:load"  # as earlier versions had it
    made["digest"] = digest_of(made["config"])
    table.write_text(json.dumps(made))
    assert "the same partition is already in" in dealt(relative, tmp_path / "data")
    check_given_data(there, tmp_path / "data")
    before = there.model_copy(update={"data": relative})
    assert forbidden_changes(before, there) == []


@pytest.mark.parametrize(("shape", "is_noted"), [((8, 8, 3), True), ((3, 8, 3), False)])
def test_pictures_with_channels_last_are_noted(tmp_path, caplog, shape, is_noted):
    text = f"import numpy as np\nimport torch\nx = np.zeros({shape}, np.uint8)\n"
    loaded(tmp_path, text + "def load():\n    return [(x, 0), (x, 1)], [(x, 1)]\n")
    line = "mine.py:load: inputs (8, 8, 3) are read as (C, H, W), 8 channels of 8 x 3"
    assert (line in caplog.text) == is_noted


def test_a_launch_repeats_the_notes_of_its_partition(tmp_path):
    log = tmp_path / "partition.log"
    note = "2026-01-01 WARNING fedcli.data.own.examples: note: turn them\n"
    other = "2026-01-01 WARNING fedmodels.facts.resolution: note: said before\n"
    log.write_text(note + other + note)
    assert notes_in(log) == ["note: turn them"]
    assert notes_in(tmp_path / "none") == []
