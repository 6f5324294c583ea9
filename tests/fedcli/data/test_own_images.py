"""Photos as people have them: of many sizes and kinds, without a test part, from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import fedtide
from fedcli.data.cuts.held_out import last_groups
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition
from fedmodels.config.data import Data
from fedmodels.config.origin import differences
from fedmodels.config.scenario import Iid
from fedmodels.errors import ConfigError, DataError
from fedmodels.facts.resolution import experiment_of
from fedmodels.nets.trained import TrainedModel
from tests.fedcli.data.new_files import read_new


def photos(root: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 5) -> Path:
    """Write photos of many sizes, grey and coloured; the shade tells their number."""
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(each):
            mode = ("L", "RGB")[number % 2]
            size = (12 + number, 15 - number)
            shade = 10 * number if mode == "L" else (10 * number,) * 3
            Image.new(mode, size, shade).save(root / name / f"{number}.png")
    return root


def loaded(root: Path, **keys: Any) -> Dataset:
    return load(Data.model_validate({"name": "directory", "root": str(root), **keys}))


def test_photos_of_two_sizes_get_one(tmp_path):
    root = photos(tmp_path / "photos")
    with pytest.raises(DataError, match=r"1.png is 13 x 14, in colour, .*by resize = \[HEIGHT, W"):
        loaded(root)
    with pytest.raises(DataError, match=r'1.png is 8 x 8, in colour.* by channels = "grey"'):
        loaded(root, resize=[8, 8])
    found = loaded(root, resize=[8, 8], channels="grey")
    assert found.input_shape == (1, 8, 8)
    assert found.transform == {
        "kind": "images", "channels": "grey", "resize": [8, 8], "crop": None, "ground": "white",
        "frames": None, "depth": None,
    }  # fmt: skip
    assert loaded(root, resize=9, crop=[8, 6], channels="rgb").input_shape == (3, 8, 6)


def test_without_a_test_part_the_last_photos_of_each_class_are_for_testing(tmp_path, caplog):
    root, sized = photos(tmp_path / "photos"), {"resize": [8, 8], "channels": "grey"}
    found = loaded(root, **sized)
    assert found.train.x.max(axis=(1, 2, 3)).tolist() == [0, 10, 20, 30] * 2
    assert found.test.x.max(axis=(1, 2, 3)).tolist() == [40, 40]
    assert f"note: {root} has no test part: the last 20 % of each class, by name" in caplog.text
    assert len(loaded(root, **sized, test_share=0.4).test.y) == 4
    (tmp_path / "other").mkdir()
    root.rename(tmp_path / "other" / "train")  # also where the classes lie in train/
    again = loaded(tmp_path / "other", **sized)
    assert again.identity == found.identity
    photos(tmp_path / "other" / "test")
    assert len(loaded(tmp_path / "other", **sized).test.y) == 10
    with pytest.raises(ConfigError, match=r"test_share: .*other has a test part of its own"):
        loaded(tmp_path / "other", **sized, test_share=0.2)


def test_a_kind_of_files_that_is_tested_alone_is_named(tmp_path, caplog):
    """Of phone-1.jpg … and scan-1.png, the last by name were all scans."""
    (tmp_path / "cat").mkdir()
    for name in ("phone-1.jpg", "phone-2.jpg", "phone-3.jpg", "scan-1.png"):
        Image.new("L", (4, 4)).save(tmp_path / "cat" / name)
    loaded(tmp_path, test_share=0.25)
    assert f"{tmp_path}: all files *.png are for testing, and none is trained on" in caplog.text
    caplog.clear()
    Image.new("L", (4, 4)).save(tmp_path / "cat" / "a.png")
    loaded(tmp_path, test_share=0.25)
    assert "none is trained on" not in caplog.text


def test_arrays_without_a_test_part_are_split_by_client_and_class(tmp_path):
    np.save(tmp_path / "train_x.npy", np.arange(12, dtype=np.float32)[:, None])
    np.save(tmp_path / "train_y.npy", np.arange(12) % 2)
    np.save(tmp_path / "groups_train.npy", np.arange(12) // 6)
    found = loaded(tmp_path, test_share=0.3)
    assert found.test.x[:, 0].tolist() == [4, 5, 10, 11]
    assert found.test.groups is not None
    assert found.test.groups.tolist() == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match=r"\[data\] crop is for images, and .* holds arrays"):
        loaded(tmp_path, crop=2)


def test_frames_of_one_file_stay_in_one_part(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(5):
            frames = [Image.new("L", (4, 4), 10 * number + k) for k in range(3)]
            place = tmp_path / name / f"{number}.tif"
            frames[0].save(place, save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match=r"0.tif cannot be read: it holds 3 frames"):
        loaded(tmp_path)
    assert len(loaded(tmp_path, frames="first").train.y) == 8
    found = loaded(tmp_path, frames="all")
    assert found.test.x.max(axis=(1, 2, 3)).tolist() == [40, 41, 42] * 2
    assert len(found.train.y) == 24


GIVEN = "from PIL import Image\ndef load():\n    return {}\n"
PART = "[(Image.new('RGB', (6 + i, 6)), i % 2) for i in range(10)]"


@pytest.mark.parametrize(
    ("returned", "keys", "shapes"),
    [
        (f"{PART}, {PART}", {"resize": [4, 4]}, (10, 10, (3, 4, 4))),
        (PART, {"resize": [4, 4], "channels": "grey", "test_share": 0.4}, (6, 4, (1, 4, 4))),
    ],
)
def test_pictures_of_a_function_are_transformed_too(tmp_path, returned, keys, shapes):
    (tmp_path / "mine.py").write_text(GIVEN.format(returned))
    found = load(Data.model_validate({"name": f"{tmp_path / 'mine.py'}:load", **keys}))
    assert (len(found.train.y), len(found.test.y), found.input_shape) == shapes
    assert found.transform is not None
    assert found.transform["resize"] == [4, 4]


@pytest.mark.parametrize(
    ("returned", "keys", "line"),
    [
        (
            "[([1.0], 0)], [([1.0], 0)]",
            {"resize": 4},
            "example 0 is no picture of Pillow, for",
        ),
        (f"{PART}, {PART}", {"test_share": 0.2}, "test_share: .* returns a test set of its own"),
        (PART, {}, "it must return two torch data sets, .* or one with .data. test_share"),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(tmp_path, returned, keys, line):
    (tmp_path / "mine.py").write_text(GIVEN.format(returned))
    with pytest.raises((DataError, ConfigError), match=line):
        load(Data.model_validate({"name": f"{tmp_path / 'mine.py'}:load", **keys}))


@pytest.mark.parametrize(
    ("name", "keys", "line"),
    [
        ("digits", {"resize": 4}, "resize is for custom data, not for digits"),
        ("digits", {"test_share": 0.3}, "test_share is for custom data"),
        ("table", {"frames": "all"}, "frames is for images, not for table"),
    ],
)
def test_keys_of_images_belong_to_images(name, keys, line):
    with pytest.raises(ConfigError, match=line):
        load(Data.model_validate({"name": name, **keys}))


def test_a_transform_is_a_part_of_what_a_partition_follows_from(tmp_path):
    """Another size is another partition; a config that says nothing fits one made before."""
    root = photos(tmp_path / "photos")
    tables = {
        "net": {"name": "mlp"}, "method": {"name": "fedavg"}, "scenario": {"kind": "iid"},
        "schedule": {"clients": 2},
    }  # fmt: skip

    def experiment(**keys: Any) -> Any:
        data = {"name": "directory", "root": str(root), **keys}
        return experiment_of({**tables, "data": data})

    wanted = experiment(resize=[8, 8], channels="grey")
    out = tmp_path / "out"
    run_partition(wanted.data, Iid(kind="iid"), 2, 0, out, Console(quiet=True))
    made = json.loads((out / "partition.json").read_bytes())["config"]
    assert differences(wanted, made) == []
    found = differences(experiment(resize=[9, 9], channels="grey"), made)
    assert found == ["data.resize = [9, 9] in the config, [8, 8] there"]
    assert set(Data(name="digits").identity()) == {
        "name", "max_per_class", "max_test_per_class", "server_examples", "server_unlabelled",
        "input_shape", "num_classes", "labels", "legacy_windows",
    }  # fmt: skip


def in_client(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "client.json").read_bytes())
    return found


def test_a_participant_s_own_folders_may_be_transformed(tmp_path):
    place = tmp_path / "0"
    for part in ("train", "test"):
        photos(place / "task-0" / part)
    facts = {
        "input_shape": [1, 8, 8], "num_classes": 2, "class_names": ["cat", "dog"],
        "transform": {"kind": "images", "resize": [8, 8], "channels": "grey"},
    }  # fmt: skip
    (place / "client.json").write_text(json.dumps(facts))
    client = ClientData(place)
    assert client.arrays(0, "train")[0].shape == (10, 1, 8, 8)
    assert "transform" not in client.announcement()
    facts["transform"]["resize"] = "8"  # type: ignore[index]
    (place / "client.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"client.json: transform\.resize"):
        ClientData(place)


def test_a_model_reads_a_photo_as_those_of_training(tmp_path):
    """The transform travels from [data] through the partition into the model's own file."""
    root = photos(tmp_path / "photos")
    run = fedtide.run(
        {
            "data": {"name": "directory", "root": str(root), "resize": 9, "crop": [8, 6],
                     "channels": "grey", "ground": "black"},
            "scenario": {"kind": "iid"},
            "net": {"name": "mlp", "hidden": [4]},
            "method": {"name": "fedavg"},
            "schedule": {"clients": 2, "rounds": 1},
        },
        backend="inprocess",
        out=tmp_path / "run",
    )  # fmt: skip
    made = load(Data.model_validate(
        {"name": "directory", "root": str(root), "resize": 9, "crop": [8, 6], "channels": "grey"}
    ))  # fmt: skip
    model = TrainedModel.load(tmp_path / "run/clients/0/personal.safetensors")
    assert model.facts.transform == in_client(tmp_path / "run/data/0")["transform"]
    for number, expected in enumerate(made.train.x[:4]):
        (read,) = read_new([root / "cat" / f"{number}.png"], model.facts, "a model")
        assert read.x.tolist() == [expected.tolist()]
    everybodys = run.global_model()
    assert everybodys.facts.transform == model.facts.transform
    Image.new("RGBA", (20, 20)).save(tmp_path / "clear.png")
    (read,) = read_new([tmp_path / "clear.png"], model.facts, "a model")
    assert not read.x.any()
    everybodys.save(tmp_path / "m.safetensors")
    assert TrainedModel.load(tmp_path / "m.safetensors").facts.transform == model.facts.transform


@pytest.mark.parametrize(
    ("owners", "groups", "share", "held"),
    [
        ([0] * 6, [0, 0, 1, 1, 2, 2], 0.3, [4, 5]),
        ([0] * 6, [0, 0, 1, 1, 2, 2], 0.5, [2, 3, 4, 5]),
        ([0] * 6, [2, 2, 1, 1, 0, 0], 0.3, [0, 1]),
        ([0, 0, 1, 1], [0, 1, 2, 3], 0.2, [1, 3]),
        ([0, 0], [0, 0], 0.2, []),
        ([0] * 4, [0, 1, 1, 1], 0.9, [1, 2, 3]),
    ],
)
def test_groups_are_held_out_as_wholes(owners, groups, share, held):
    test = last_groups(np.array(owners), np.array(groups), share)
    assert np.flatnonzero(test).tolist() == held
