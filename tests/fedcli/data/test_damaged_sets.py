"""Data sets whose parts do not fit together: each is refused with one line where it is read."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.registry import load
from fedmodels.config.data import Data
from fedmodels.errors import DataError

X, Y = np.zeros((6, 4), np.float32), np.arange(6) % 2
NAN = np.where(np.arange(6)[:, None] == 3, np.float32(np.nan), X)


def dataset(**change: Any) -> Dataset:
    facts: dict[str, Any] = {"scale": 1.0, "mean": (0.0,), "std": (1.0,)}
    train, test = (
        Examples(**{"x": X, "y": Y, **change.pop(part, {})}) for part in ("train", "test")
    )
    return Dataset("mine", train, test, ("a", "b"), **{**facts, **change})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"train": {"y": Y - 1}}, r"mine \(training\): labels go from -1 to 0; expected 0 to 1"),
        ({"test": {"y": Y + 1}}, r"mine \(test\): labels go from 1 to 2"),
        ({"train": {"y": Y[:5]}}, r"labels are int64 \[5\]; expected int64 \[6\]"),
        ({"train": {"y": Y.astype(np.int32)}}, r"labels are int32 \[6\]"),
        ({"train": {"x": X.astype(int)}}, r"inputs are int64; expected uint8, uint16, float32"),
        ({"test": {"x": X[:, :3]}}, r"mine \(test\): inputs have shape \[3\]; expected \[4\]"),
        ({"test": {"x": X.astype(np.uint8)}}, r"training inputs are float32, test inputs uint8"),
        ({"train": {"x": NAN}}, r"mine \(training\): example 3 holds NaN or infinity"),
        ({"mean": (0.0, 1.0)}, "mean must hold 1 or 4 numbers"),
        ({"std": (0.0,)}, "std.0: Input should be greater than 0"),
        ({"train": {"groups": Y[:5]}}, r"groups must hold 6 numbers of type int64"),
    ],
)
def test_a_data_set_whose_parts_do_not_fit(change, line):
    assert dataset().input_shape == (4,)
    with pytest.raises(DataError, match=line) as caught:
        dataset(**change)
    assert "\n" not in str(caught.value)


WINDOWS: dict[str, Any] = {
    "X": np.zeros((10, 128, 6), np.float16),
    "y": Y.repeat(2)[:10],
    "subject": np.arange(10),
    "device": np.zeros(10, np.uint8),
    "label_names": np.array(["a", "b"]),
    "device_names": np.array(["phone"]),
}


@pytest.mark.parametrize("name", ["wisdm", "hhar"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"y": None}, "holds no y"),
        ({"y": WINDOWS["y"][:9]}, "y must hold 10 whole numbers"),
        ({"y": WINDOWS["y"] + 0.5}, "y must hold 10 whole numbers"),
        ({"y": WINDOWS["y"] + 1}, "labels go from 1 to 2; expected 0 to 1"),
        ({"device": WINDOWS["device"] + 1}, "device must be a number from 0 to 0"),
        ({"official_test": np.ones(3)}, "official_test must hold 10 whole numbers"),
        ({"device_models": np.array([])}, "is no list of names"),
        ({"label_names": np.array("a")}, "is no list of names"),
        ({"X": WINDOWS["X"].ravel()}, "windows are ()"),
        ({"X": WINDOWS["X"].astype(str)}, "not numbers"),
    ],
)
def test_a_damaged_windows_file(tmp_path, name, change, line):
    arrays = {k: v for k, v in {**WINDOWS, **change}.items() if v is not None}
    np.savez(tmp_path / f"{name}.npz", allow_pickle=False, **WINDOWS)
    assert load(Data(name=name, root=str(tmp_path))).client_names
    np.savez(tmp_path / f"{name}.npz", allow_pickle=False, **arrays)
    with pytest.raises(DataError, match=re.escape(line)) as caught:
        load(Data(name=name, root=str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"y_train": np.arange(4) + 8}, "labels go from 8 to 11; expected 0 to 9"),
        ({"y_train": np.arange(3)}, r"labels are int64 \[3\]; expected int64 \[4\]"),
        ({"y_train": np.arange(4) + 0.5}, "y_train whole numbers"),
        ({"x_train": np.zeros((4, 12), np.uint8)}, "x_train must hold images"),
        ({"x_train": np.zeros((4, 2, 2, 3))}, "x_train must hold images"),
    ],
)
def test_a_damaged_subset_of_images(tmp_path, change, line):
    x, y = np.zeros((4, 2, 2, 3), np.uint8), np.arange(4)
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(tmp_path / "cifar10_subset.npz", allow_pickle=False, **arrays)
    assert load(Data(name="cifar10", root=str(tmp_path))).input_shape == (3, 2, 2)
    np.savez(tmp_path / "cifar10_subset.npz", allow_pickle=False, **{**arrays, **change})
    with pytest.raises(DataError, match=line):
        load(Data(name="cifar10", root=str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"train_x": NAN}, r"train_x.npy: example 3 holds NaN or infinity"),
        ({"test_x": X[:, :3]}, r"directory \(test\): inputs have shape \[3\]; expected \[4\]"),
        ({"test_x": X.astype(np.uint8)}, "training inputs are float32, test inputs uint8"),
        ({"train_x": np.float32(1)}, r"train_x.npy is float32 \[\]; expected"),
        ({"train_x": X[:, 0]}, r"train_x.npy is float32 \[6\]; expected .* \(n, 1\) for single"),
        ({"train_y": Y + 10**12}, "label 1000000000001 is beyond 100000 classes"),
        ({"names": "ab"}, "class_names must be a list of names"),
        ({"names": {"a": 0, "b": 1}}, "class_names must be a list of names"),
        ({"names": 2}, "class_names must be a list of names"),
    ],
)
def test_a_directory_whose_parts_do_not_fit(tmp_path, change, line):
    arrays = {"train_x": X, "train_y": Y, "test_x": X, "test_y": Y, **change}
    if "names" in arrays:
        (tmp_path / "dataset.json").write_text(json.dumps({"class_names": arrays.pop("names")}))
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(DataError, match=line):
        load(Data(name="directory", root=str(tmp_path)))


def test_a_directory_without_test_examples_is_a_data_set(tmp_path):
    from PIL import Image

    for name in ("train/cat", "train/dog", "test/cat"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("cat", "dog"):
        Image.new("L", (5, 4)).save(tmp_path / "train" / name / "0.png")
    assert load(Data(name="directory", root=str(tmp_path))).test.x.shape == (0, 1, 4, 5)
