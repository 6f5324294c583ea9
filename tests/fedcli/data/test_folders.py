"""What of a directory is data: hidden and foreign files, links, pipes and devices are none."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcli.data.folders import files_below, is_foreign
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.femnist import femnist
from fedcli.data.sets.realworld import _files
from fedcli.data.sets.registry import load
from fedcli.data.sets.source import Source
from fedcli.data.sets.tiny_imagenet import _images_in
from fedcli.data.store.client_data import ClientData, GlobalTest
from fedcli.data.store.partition_store import PartitionStore
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.errors import DataError
from fedsrv.parts.server_data import read_server_data

FOREIGN = (
    ".ipynb_checkpoints/{name}-checkpoint{end}", "._{name}{end}", "__MACOSX/{name}{end}",
    "__MACOSX/._{name}{end}", "Thumbs.db", "thumbs.db", ".DS_Store", "desktop.ini",
    "@eaDir/{name}{end}", "~${name}{end}",
)  # fmt: skip
"""What Jupyter, a Mac, Windows, a network disk and an office program leave beside a file."""
GARBAGE = b"\0\5\26\7\0\2\0\0Mac OS X" + bytes(range(160, 256))


def litter(file: Path) -> None:
    """Put beside a file all that other programs leave there: copies of it, and garbage."""
    for form in FOREIGN:
        path = file.parent / form.format(name=file.stem, end=file.suffix)
        path.parent.mkdir(exist_ok=True)
        if path.name.startswith(("._", "~$")) or path.suffix != file.suffix:
            path.write_bytes(GARBAGE)
        else:
            shutil.copy(file, path)


def photos(root: Path) -> list[Path]:
    """Write two images of two classes, for training and for testing; return the files."""
    found = []
    for part in ("train", "test"):
        for shade, name in enumerate(("cat", "dog")):
            found.append(root / part / name / "0.png")
            found[-1].parent.mkdir(parents=True)
            Image.new("L", (4, 4), shade).save(found[-1])
    return found


def table(root: Path) -> list[Path]:
    root.mkdir()
    rows = "".join(f"{i},{'xy'[i % 2]}\n" for i in range(10))
    (root / "r.csv").write_text("ax,label\n" + rows)
    return [root / "r.csv"]


def loaded(name: str, root: Path) -> Dataset:
    columns = Columns() if name == "table" else None
    return load(Data(name=name, root=str(root), columns=columns))


@pytest.mark.parametrize(("name", "make"), [("directory", photos), ("table", table)])
def test_hidden_and_foreign_files_are_no_data(tmp_path, caplog, name, make):
    if name == "table":
        pytest.importorskip("pandas")
    files = make(tmp_path / "d")
    clean = loaded(name, tmp_path / "d").identity
    assert "left out" not in caplog.text.replace("left out: label", "")
    litter(files[0])
    assert loaded(name, tmp_path / "d").identity == clean
    left = len({Path(form.format(name="0", end="")).parts[0] for form in FOREIGN})
    assert f"note: {tmp_path / 'd'}: {left} files are left out: " in caplog.text


def test_a_file_of_another_kind_is_counted(tmp_path, caplog):
    """What is left out is said by kind, and what to do with it."""
    photos(tmp_path / "d")
    note = f"note: {tmp_path / 'd'}: "
    (tmp_path / "d/train/cat/1.nef").write_bytes(GARBAGE)
    assert len(loaded("directory", tmp_path / "d").train.y) == 2
    advice = "raw photos of a camera have to be developed: save them as JPEG or PNG\n"
    assert f"{note}1 file is left out: train/cat/1.nef; {advice}" in caplog.text
    for name in ("2.nef", "3.NEF", "4.txt"):
        (tmp_path / "d/train/cat" / name).write_bytes(GARBAGE)
    loaded("directory", tmp_path / "d")
    names = "train/cat/1.nef, train/cat/2.nef, train/cat/3.NEF and 1 more"
    assert f"{note}4 files are left out: {names} (3 *.nef, 1 *.txt); {advice}" in caplog.text


def test_published_sets_pass_over_foreign_files(tmp_path):
    users = {"users": ["w"], "user_data": {"w": {"x": [[0.0] * 784] * 2, "y": [0, 1]}}}
    for part in ("train", "test"):
        place = tmp_path / "femnist" / part
        place.mkdir(parents=True)
        (place / "all.json").write_text(json.dumps(users))
        litter(place / "all.json")
    assert len(femnist(Source((tmp_path,), Data(name="femnist"))).train.y) == 2
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.JPEG").write_bytes(b"")
    litter(tmp_path / "images" / "0.JPEG")
    assert [path.name for path in _images_in(tmp_path / "images")] == ["0.JPEG"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("acc_walking_chest.csv", "__MACOSX/._acc_walking_chest.csv", ".x_head.csv"):
            archive.writestr(name, "")
    found = _files("a.zip", (tmp_path / "a.zip").read_bytes())
    assert [name for name, _ in found] == ["acc_walking_chest.csv"]


@pytest.mark.parametrize("name", ["cat", "_a", "a.csv", "thumbs", "mac.osx", "~a"])
def test_what_is_one_s_own_is_no_foreign_file(name):
    assert not is_foreign(name)


# --- links, pipes, devices


def client(root: Path) -> Path:
    """Write a client with one task."""
    place = root / "0"
    (place / "task-0").mkdir(parents=True)
    for part in ("train", "test"):
        np.save(place / f"task-0/{part}_x.npy", np.zeros((2, 3), dtype=np.float32))
        np.save(place / f"task-0/{part}_y.npy", np.zeros(2, dtype=np.int64))
    (place / "client.json").write_text('{"input_shape": [3], "num_classes": 1}')
    return place


def as_client(root: Path) -> object:
    return ClientData(client(root)).check()


def as_photos(root: Path) -> object:
    if not (root / "train").exists():
        photos(root)
    return loaded("directory", root)


def as_client_of_photos(root: Path) -> object:
    place = root / "0"
    if not place.exists():
        photos(place / "task-0")
        names = '"class_names": ["cat", "dog"]'
        about = f'{{"input_shape": [1, 4, 4], "num_classes": 2, {names}}}'
        (place / "client.json").write_text(about)
    return ClientData(place).check()


def as_arrays(root: Path) -> object:
    if not root.exists():
        shutil.copytree(client(root.with_name("made")) / "task-0", root)
        np.save(root / "groups_train.npy", np.zeros(2, dtype=np.int64))
        np.save(root / "groups_test.npy", np.zeros(2, dtype=np.int64))
        (root / "dataset.json").write_text("{}")
    return loaded("directory", root)


def as_table(root: Path) -> object:
    pytest.importorskip("pandas")
    if not root.exists():
        table(root)
    return loaded("table", root)


def as_global_test(root: Path) -> object:
    place = root / "global-test"
    if not place.exists():
        place.mkdir(parents=True)
        np.save(place / "x.npy", np.zeros((2, 3), dtype=np.float32))
        np.save(place / "y.npy", np.zeros(2, dtype=np.int64))
        (place / "problem.json").write_text('{"input_shape": [3], "num_classes": 1}')
    return GlobalTest.find(root)


def as_store(root: Path) -> object:
    if not root.exists():
        as_global_test(root)
        (root / "global-test").rename(root / "store")
        starts, pairs = np.array([[0, 1, 2]]), np.array([0, 1])
        for name, array in (("indices", np.arange(2)), ("starts", starts), ("pairs", pairs)):
            np.save(root / "store" / f"{name}.npy", array)
    return PartitionStore(root)


def as_server_data(root: Path) -> object:
    if not root.exists():
        as_global_test(root)
        np.save(root / "global-test/unlabelled_x.npy", np.zeros((2, 3), dtype=np.float32))
    return read_server_data(root / "global-test")


def as_client_again(root: Path) -> object:
    return ClientData(root / "0").check() if (root / "0").exists() else as_client(root)


READERS = {
    "client": (as_client_again, ["0/client.json", "0/task-0/train_x.npy", "0/task-0/test_y.npy"]),
    "client of photos": (as_client_of_photos, ["0/task-0/train/cat/0.png"]),
    "photos": (as_photos, ["train/cat/0.png"]),
    "arrays": (as_arrays, ["train_x.npy", "test_y.npy", "groups_train.npy", "dataset.json"]),
    "table": (as_table, ["r.csv"]),
    "global test": (as_global_test, ["global-test/problem.json", "global-test/x.npy"]),
    "store": (as_store, ["store/problem.json", "store/x.npy", "store/pairs.npy"]),
    "server": (as_server_data, ["global-test/x.npy", "global-test/problem.json"]),
}
"""What reads a directory, making it first, and files that it reads."""
FILES = [(reader, file) for reader, (_, files) in READERS.items() for file in files]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "zip", "directory"])
@pytest.mark.parametrize(("reader", "file"), FILES)
def test_what_is_no_regular_file_gets_one_line(tmp_path, reader, file, kind):
    """A pipe was waited for without end, a device read without end, a zip gave a traceback."""
    read, _ = READERS[reader]
    root = tmp_path / "d"
    read(root)
    (root / file).unlink()
    if kind == "pipe":
        os.mkfifo(root / file)
    elif kind == "device":
        (root / file).symlink_to("/dev/zero")
    elif kind == "zip":
        with zipfile.ZipFile(root / file, "w") as archive:
            archive.writestr("x.npy", b"")
    else:
        (root / file).mkdir()
    with pytest.raises(DataError) as caught:
        read(root)
    assert "\n" not in str(caught.value)
    told = (Path(file).name, "is not a directory of server data", "holds no file *.csv")
    assert any(words in str(caught.value) for words in told)


@pytest.mark.parametrize(("reader", "file"), [f for f in FILES if f[0] != "server"])
def test_a_link_out_of_the_directory_is_refused(tmp_path, reader, file):
    """It would bring files of elsewhere into a run; a link within is well."""
    read, _ = READERS[reader]
    root = tmp_path / "d"
    read(root)
    inside = root / file
    inside.rename(inside.with_name(f".{inside.name}"))
    inside.symlink_to(inside.with_name(f".{inside.name}"))
    read(root)
    inside.with_name(f".{inside.name}").rename(tmp_path / "elsewhere")
    inside.unlink()
    inside.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"is a link out of .*: put the file itself there"):
        read(root)
    (tmp_path / "linked").symlink_to(root)  # the directory itself may be a link
    (tmp_path / "elsewhere").rename(inside)
    read(tmp_path / "linked")


def test_a_directory_that_is_a_link_is_not_entered_twice(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.csv").write_text("")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "a" / "c").symlink_to("..")
    assert files_below(tmp_path) == [tmp_path / "a" / "x.csv"]
