"""Data sets that ``save_to_disk`` wrote: pictures, windows, and one line for a mistake."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.errors import DataError


def loaded(root: Path, **columns: Any) -> Dataset:
    return load(Data(name="huggingface", root=str(root), columns=Columns(**columns)))


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=": pip install 'datasets>="):
        loaded(tmp_path)


@pytest.mark.filterwarnings("ignore")  # those of the library
def test_pictures_keep_the_order_of_their_classes(tmp_path):
    library = pytest.importorskip("datasets")
    features = library.Features(
        {"image": library.Image(), "label": library.ClassLabel(names=["b", "a"])}
    )
    part = library.Dataset.from_dict(
        {"image": [np.full((4, 5, 3), i, dtype=np.uint8) for i in range(6)], "label": [0, 1] * 3},
        features=features,
    )
    library.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "d"))
    found = loaded(tmp_path / "d")
    assert found.input_shape == (3, 4, 5)
    assert found.train.x.dtype == np.uint8
    assert found.class_names == ("b", "a")
    assert found.test.y.tolist() == [0, 1] * 3
    with pytest.raises(DataError, match=r"has no column 'lbel'\. Did you mean 'label'"):
        loaded(tmp_path / "d", label="lbel")


@pytest.mark.filterwarnings("ignore")  # those of the library
def test_columns_of_numbers_give_windows(tmp_path):
    library = pytest.importorskip("datasets")
    rows = {"ax": np.arange(12.0), "ay": np.zeros(12), "label": ["up"] * 6 + ["down"] * 6}
    library.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "d"))
    found = loaded(tmp_path / "d", window=2, test_share=0.34)
    assert found.class_names == ("down", "up")
    assert found.train.x[:, :, 0].tolist() == [[0, 1], [2, 3], [6, 7], [8, 9]]
    assert found.test.x[:, :, 0].tolist() == [[4, 5], [10, 11]]
