"""Nobody is in both parts: photos of one patient, rows of one session, drawn or the last ones.

The shade of an image is the number of its patient, so that a test sees whose it is.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedcli.data.cuts.held_out import drawn_groups, drawn_of_each
from fedcli.data.own import huggingface
from fedcli.data.sets.registry import load
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition
from fedcli.data.store.stream import TaskStream
from fedcli.data.store.validation import Validation
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.scenario import DirichletPooled, Iid
from fedmodels.errors import ConfigError, DataError

PATIENTS = 20
CLASSES = ("ill", "well")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return folders of photos: of each patient one to four that are well, and of some ill ones."""
    root = tmp_path / "photos"
    for patient in range(PATIENTS):
        for name, count in (("well", 1 + patient % 4), ("ill", 3 if patient % 2 else 0)):
            place = root / name / f"patient-{patient:02}" / "visit"
            for number in range(count):
                place.mkdir(parents=True, exist_ok=True)
                shade = np.full((4, 4), patient, dtype=np.uint8)
                Image.fromarray(shade).save(place / f"{number}.png")
    return root


def patients(x: np.ndarray) -> set[int]:
    """Return whose images these are."""
    return {*np.unique(x).tolist()}


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_patient_is_in_one_part(photos, seed, caplog):
    found = load(Data(name="directory", root=str(photos), group="folder", test_seed=seed))
    train, test = patients(found.train.x), patients(found.test.x)
    assert not train & test
    assert train | test == {*range(PATIENTS)}
    if seed is None:
        assert min(test) > max(train)
    else:
        counts = [np.bincount(y, minlength=2) for y in (found.train.y, found.test.y)]
        assert np.abs(counts[1] - 0.2 * sum(counts)).max() <= 3, "as many of each class"
    assert "20 % of the folders in those of classes are for testing" in caplog.text


def test_seeds_draw_other_patients(photos):
    of = {
        seed: patients(
            load(Data(name="directory", root=str(photos), group="folder", test_seed=seed)).test.x
        )
        for seed in range(3)
    }
    again = load(Data(name="directory", root=str(photos), group="folder", test_seed=0)).test.x
    assert patients(again) == of[0]
    assert len({*map(frozenset, of.values())}) == 3


def test_patients_stay_whole_for_validation(photos, tmp_path):
    data = Data(name="directory", root=str(photos), group="folder", validation_share=0.3)
    run_partition(data, Iid(kind="iid"), 1, 0, tmp_path / "cut")
    stream = TaskStream(ClientData(tmp_path / "cut" / "0"), validation=Validation.of(data))
    stream.open(0)
    x, (kept, _) = stream.train(0)[0], stream.validation(0) or (None, None)
    assert kept is not None
    assert not patients(x.numpy()) & patients(kept.numpy())


def test_folders_in_those_of_classes_are_refused_unless_they_are_groups(photos):
    line = (
        r"patient-01 is a directory; images .* or, where a folder holds what belongs together, set"
    )
    with pytest.raises(DataError, match=line):
        load(Data(name="directory", root=str(photos)))


def test_an_image_beside_folders_is_a_group_of_its_own(photos):
    for name in CLASSES:
        Image.fromarray(np.full((4, 4), 99, dtype=np.uint8)).save(photos / name / "z.png")
    found = load(Data(name="directory", root=str(photos), group="folder"))
    assert (found.test.x == 99).all(axis=(1, 2, 3)).sum() == 2


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"name": "digits", "test_seed": 1}, r"test_seed is for custom data"),
        ({"name": "digits", "group": "folder"}, r"group is for folders of images"),
        (
            {"name": "table", "test_seed": 1, "columns": {"label": "a", "split": "b"}},
            r"test_seed is for data without \[data.columns\] split",
        ),
    ],
)
def test_keys_that_nothing_heeds_are_refused(data, line):
    with pytest.raises(ConfigError, match=line):
        load(Data.model_validate(data))


def test_a_draw_takes_a_share_of_each_key():
    keys, rng = np.repeat([3, 5, 8], [10, 20, 1]), np.random.default_rng(0)
    test = drawn_of_each(keys, 0.2, rng)
    assert [int(test[keys == key].sum()) for key in (3, 5, 8)] == [2, 4, 0]
    assert not test[8:10].all(), "not the last ones"


def test_one_huge_group_does_not_keep_others_from_being_tested():
    labels, groups = np.zeros(103, dtype=np.int64), np.array([7] * 100 + [8, 9, 9])
    test = drawn_groups(labels, groups, 0.2, np.random.default_rng(0))
    assert not test[:100].any()
    assert test[100:].any()
    two = drawn_groups(labels[:2], np.array([1, 2]), 0.01, np.random.default_rng(0))
    assert two.sum() == 1, "of two groups one is for testing"
    assert not drawn_groups(labels[:2], np.array([1, 1]), 0.5, np.random.default_rng(0)).any()


def test_a_large_share_leaves_a_group_to_train_on():
    labels = np.zeros(30, dtype=np.int64)
    for groups in (np.repeat([1, 2], [10, 20]), np.repeat([1], [30])):
        test = drawn_groups(labels, groups, 0.9, np.random.default_rng(0))
        assert {*groups[~test].tolist()} == {1}, "the smallest"


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("group", {"group": "folder"}),
        ("test_seed", {"test_seed": 3}),
        ("group", {"columns": {"file": "image", "label": "dx", "group": "patient"}}),
        ("test_gap", {"name": "table", "test_gap": 3, "columns": {"label": "a"}}),
    ],
)
def test_parts_that_would_be_dealt_out_anew_are_refused(photos, tmp_path, key, data):
    """Photos of one patient came into both parts."""
    given = Data.model_validate({"name": "directory", "root": str(photos), **data})
    scenario = DirichletPooled(kind="dirichlet_pooled")
    with pytest.raises(ConfigError, match=rf"dirichlet_pooled .* {key}: set same_props = true"):
        run_partition(given, scenario, 2, 0, tmp_path / "cut")


@pytest.mark.parametrize(
    ("data", "columns", "parts", "line"),
    [
        ({}, {"group": "who"}, ("train",), r"\[data.columns\] group is for columns of numbers"),
        ({}, {"time": "who"}, ("train",), r"\[data.columns\] time is for columns of numbers"),
        ({"test_gap": 3}, {}, ("train",), r"\[data\] test_gap is for columns of numbers"),
        ({"test_seed": 3}, {}, ("train", "test"), r"test_seed: .* has a test part of its own"),
    ],
)
def test_pictures_of_hugging_face_say_what_they_do_not_heed(
    tmp_path, monkeypatch, data, columns, parts, line
):
    rows = SimpleNamespace(
        column_names=["image", "label", "who"], features={"image": SimpleNamespace()}
    )
    monkeypatch.setattr(huggingface, "_read", lambda root: dict.fromkeys(parts, rows))
    asked = Columns(label="label", features=("image",), **columns)
    with pytest.raises((ConfigError, DataError), match=line):
        load(Data(name="huggingface", root=str(tmp_path), columns=asked, **data))
