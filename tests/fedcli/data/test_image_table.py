"""A flat folder of images and a table that says what each one is, as medical sets have it."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image

from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition
from fedcli.data.store.growing import add_task
from fedcli.data.store.site import cut
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.scenario import Iid, Natural
from fedmodels.errors import ConfigError, DataError

ROWS = [
    {
        "image": f"ISIC_{n:03}", "dx": ("nevus", "melanoma")[n % 2], "patient": f"p{n // 4}",
        "site": ("north", "south")[n // 20], "date": f"2026-01-{1 + (7 * n) % 20:02}",
    }
    for n in range(40)
]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return forty photos in two folders, whose shade is their number, and a table beside them."""
    place = tmp_path / "set"
    for n in range(40):
        folder = place / f"part-{n % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), n, dtype=np.uint8)).save(folder / f"ISIC_{n:03}.png")
    write(place, ROWS)
    return place


def write(place: Path, rows: list[dict[str, str]]) -> None:
    pandas.DataFrame(rows).to_csv(place / "meta.csv", index=False)


def loaded(root: Path, data: dict[str, Any] | None = None, **columns: Any) -> Dataset:
    asked = Columns(file="image", label="dx", **columns)
    return load(Data.model_validate({"name": "directory", "root": str(root), **(data or {}),
                                     "columns": asked}))  # fmt: skip


def shades(x: np.ndarray) -> list[int]:
    return [int(image.flat[0]) for image in x]


def test_a_row_says_what_an_image_is(root):
    found = loaded(root)
    assert found.class_names == ("melanoma", "nevus")
    assert [n % 2 for n in shades(found.train.x)] == [1 - y for y in found.train.y.tolist()]
    assert shades(found.test.x) == [32, 33, 34, 35, 36, 37, 38, 39], "the last of each class"


@pytest.mark.parametrize("seed", [None, 4])
def test_patients_stay_whole(root, seed):
    found = loaded(root, {"test_seed": seed}, group="patient")
    train, test = ({n // 4 for n in shades(x)} for x in (found.train.x, found.test.x))
    assert not train & test
    assert len(train | test) == 10
    assert found.train.wholes is not None


def test_sites_are_clients_and_each_task_is_tested_on_its_own_time(root, tmp_path):
    data = Data(name="directory", root=str(root), columns=Columns(
        file="image", label="dx", client="site", time="date"))  # fmt: skip
    run_partition(data, Natural(kind="natural", tasks=2), 2, 0, tmp_path / "cut")
    for client in range(2):
        held = ClientData(tmp_path / "cut" / str(client))
        days = [
            [(7 * n) % 20 for part in ("train", "test") for n in shades(held.arrays(m, part)[0])]
            for m in range(2)
        ]
        assert max(days[0]) < min(days[1])
        assert all(len(held.arrays(m, "test")[0]) == 2 for m in range(2))
        assert {n // 20 for m in range(2) for n in shades(held.arrays(m, "train")[0])} == {client}


def test_a_column_says_the_part(root):
    rows = [{**row, "part": "test" if n < 6 else "train"} for n, row in enumerate(ROWS)]
    write(root, rows)
    assert shades(loaded(root, split="part").test.x) == [*range(6)]


def test_a_site_brings_such_a_folder(root, tmp_path):
    tables = {"name": "directory", "columns": {"file": "image", "label": "dx"}}
    held = cut(root, tables, 0, 0, tmp_path / "cache")
    assert ClientData(held / "0").num_tasks == 1


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"image": "ISIC_999"},
            r"column 'image' holds 'ISIC_999' in line 4: there is no image of",
        ),
        ({"image": "ISIC_001"}, r"'ISIC_001' in line 4, and so does line 3"),
        ({"image": "../meta"}, r"no image of this name"),
        ({"dx": ""}, r"column 'dx' is empty in line 4"),
    ],
)
def test_a_wrong_row_is_named(root, change, line):
    write(root, [{**row, **(change if n == 2 else {})} for n, row in enumerate(ROWS)])
    with pytest.raises(DataError, match=line):
        loaded(root)


def test_one_name_for_two_images_asks_for_the_path(root):
    other = root / "part-0" / "ISIC_001.png"
    Image.fromarray(np.full((4, 4), 77, dtype=np.uint8)).save(other)
    with pytest.raises(DataError, match=r"both part-0/ISIC_001.png and part-1/ISIC_001.png are"):
        loaded(root)
    named = [{**row, "image": f"part-{n % 2}/{row['image']}.png"} for n, row in enumerate(ROWS)]
    write(root, named)
    assert 77 not in shades(loaded(root).train.x)


@pytest.mark.parametrize(
    ("data", "columns", "line"),
    [
        ({}, {"window": 4}, r"\[data.columns\] window is for tables of numbers"),
        ({"group": "folder"}, {}, r"\[data\] group is for folders of classes"),
        ({"test_gap": 3}, {}, r"\[data\] test_gap is for a table"),
        ({"name": "table"}, {}, r"\[data.columns\] file is for a directory of images"),
    ],
)
def test_keys_for_other_data_are_refused(root, data, columns, line):
    with pytest.raises(ConfigError, match=line):
        loaded(root, data, **columns)


def test_there_is_one_table(root):
    (root / "meta.csv").rename(root / "a.csv")
    (root / "b.csv").write_text("image,dx\n")
    with pytest.raises(DataError, match=r"holds 2 tables \(a.csv, b.csv\); one must say"):
        loaded(root)


def add(root: Path, source: Path, **columns: Any) -> dict[str, list[int]]:
    """Return the shades of both parts of a task that a client with these columns is given."""
    data = Data(
        name="directory", root=str(root), columns=Columns(file="image", label="dx", **columns)
    )
    run_partition(data, Iid(kind="iid"), 1, 0, root.parent / "cut")
    add_task(root.parent / "cut", 0, source, data.model_copy(update={"root": None}))
    held = ClientData(root.parent / "cut" / "0")
    return {part: shades(held.arrays(1, part)[0]) for part in ("train", "test")}


def grown(root: Path) -> Path:
    """Return a copy of a folder of photos, whose table names the first half alone from now on."""
    whole = root.parent / "grown"
    shutil.copytree(root, whole)
    write(root, ROWS[:20])
    return whole


def test_what_is_left_of_a_grown_folder_keeps_its_patients_whole(root):
    """The part for testing was chosen anew by photo."""
    found = add(root, grown(root), group="patient")
    train, test = ({n // 4 for n in found[part]} for part in ("train", "test"))
    assert (train, test) == ({5, 6, 7, 8}, {9})


def test_what_is_left_of_a_grown_folder_keeps_the_part_that_a_column_says(root):
    rows = [{**row, "part": "test" if n % 10 == 1 else "train"} for n, row in enumerate(ROWS)]
    write(root, rows)
    shutil.copytree(root, whole := root.parent / "whole")
    write(root, rows[:20])
    assert add(root, whole, split="part")["test"] == [21, 31]


def test_what_is_left_of_a_grown_folder_has_the_share_of_the_columns(root):
    found = add(root, grown(root), test_share=0.4)
    assert [len(part) for part in found.values()] == [12, 8]


def test_images_of_a_task_may_lie_in_a_folder_train(root):
    """It was taken for a folder of class folders."""
    source = grown(root)
    (source / "train").mkdir()
    for path in source.glob("part-*/*.png"):
        path.rename(source / "train" / path.name)
    assert len(add(root, source)["train"]) == 16


def test_without_the_word_of_the_run_a_table_makes_no_class_of_a_folder(root):
    source = grown(root)
    add(root, source)
    with pytest.raises(
        DataError, match=r"holds the table meta.csv, .* name the --server of the run"
    ):
        add_task(root.parent / "cut", 0, source)


@pytest.mark.parametrize("columns", [{}, {"client": "site"}, {"group": "patient"}])
def test_frames_of_a_file_are_in_one_part(root, columns):
    for n in range(40):
        frames = [Image.fromarray(np.full((4, 4), n, dtype=np.uint8)) for _ in range(3)]
        frames[0].save(root / f"ISIC_{n:03}.tif", save_all=True, append_images=frames[1:])
    write(root, [{**row, "image": f"{row['image']}.tif"} for row in ROWS])
    found = loaded(root, {"frames": "all", "test_share": 0.22}, **columns)
    train, test = {*shades(found.train.x)}, {*shades(found.test.x)}
    assert not train & test
    assert (len(found.train.y), len(train | test)) == (3 * len(train), 40)
    if "client" in columns:
        assert found.train.groups is not None
        assert found.train.groups.tolist() == [n // 20 for n in shades(found.train.x)]
