"""Known data sets: where they are looked for, what they hold, and the one line when they do not."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import logging
import os
import re
import socket
import struct
import tarfile
import zipfile
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fedcli.cli import main
from fedcli.data.sets import images as image_sets
from fedcli.data.sets import registry as datasets
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.har import COMBINED, REALWORLD_LABELS
from fedcli.data.sets.hhar import ACTIVITIES as HHAR
from fedcli.data.sets.realworld import ACTIVITIES as REALWORLD
from fedcli.data.sets.registry import DATASETS, datasets_table, load, names
from fedcli.data.sets.source import Source
from fedcli.data.sets.windows import paired, window_starts, windows_of
from fedcli.data.store import commands
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition, thinned
from fedmodels.config.data import Data
from fedmodels.config.scenario import Iid, Natural
from fedmodels.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def places(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no root unless a test asks for the real data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.node.get_closest_marker("data") is None:
        monkeypatch.delenv("FEDTIDE_DATA", raising=False)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def idx_images(n: int) -> bytes:
    return struct.pack(">IIII", 0x803, n, 28, 28) + bytes(n * 28 * 28)


def idx_labels(n: int) -> bytes:
    return struct.pack(">II", 0x801, n) + bytes(j % 10 for j in range(n))


def mnist_archives(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write small archives in the publisher's format, with checksums to match."""
    import torchvision.datasets

    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    resources = []
    for part, n in (("train", 20), ("t10k", 10)):
        for kind, content in (("images-idx3", idx_images(n)), ("labels-idx1", idx_labels(n))):
            path = raw / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(content, mtime=0))
            resources.append((path.name, hashlib.md5(path.read_bytes()).hexdigest()))
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    return raw


# --- the registry


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'fashion-mnist'"):
        load(Data(name="fashion_mnist"))


def test_every_loader_exists():
    assert len(DATASETS) >= 10
    for name in DATASETS:
        assert callable(datasets._loader(name))


def test_coarse_labels_belong_to_cifar100():
    with pytest.raises(ConfigError, match="belongs to cifar100, not to digits"):
        load(Data(name="digits", labels="coarse"))


def test_other_packages_add_data_sets(monkeypatch):
    point = EntryPoint("blobs", "sklearn.datasets:load_iris", "fedtide.data")

    def points(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "fedtide.data"
        return [point] if name in (None, "blobs") else []

    monkeypatch.setattr(datasets, "entry_points", points)
    assert "blobs" in names()
    assert datasets._loader("blobs").__name__ == "load_iris"


def test_roots_are_searched_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path / "env"))
    source = datasets.source_of(Data(name="digits", root=str(tmp_path / "own")))
    assert [root.name for root in source.roots] == ["own", "env", "fedtide"]
    assert source.cache == tmp_path / "cache" / "fedtide"


# --- digits


def test_digits():
    made = load(Data(name="digits"))
    assert made.input_shape == (1, 8, 8)
    assert (len(made.train.y), len(made.test.y)) == (1438, 359)
    assert (made.train.x.dtype, made.train.x.max(), made.scale) == (np.uint8, 16, 16.0)
    share = np.bincount(made.test.y) / np.bincount(np.concatenate([made.train.y, made.test.y]))
    assert np.allclose(share, 0.2, atol=0.01)
    z = (made.train.x / made.scale - made.mean[0]) / made.std[0]
    assert z.mean() == pytest.approx(0, abs=1e-3)
    assert z.std() == pytest.approx(1, abs=1e-3)
    assert np.array_equal(load(Data(name="digits")).test.x, made.test.x)


def test_max_per_class_is_seeded():
    made = load(Data(name="digits"))
    few = Data(name="digits", max_per_class=30)
    thin = thinned(made, few, 1)
    assert np.bincount(thin.train.y).tolist() == [30] * 10
    assert np.array_equal(thin.train.x, thinned(made, few, 1).train.x)
    assert not np.array_equal(thin.train.x, thinned(made, few, 2).train.x)
    assert np.array_equal(thin.test.x, made.test.x)
    assert thinned(made, Data(name="digits"), 1) is made


def test_max_test_per_class_thins_the_test_set_alone():
    made = load(Data(name="digits"))
    thin = thinned(made, Data(name="digits", max_test_per_class=7), 1)
    assert np.bincount(thin.test.y).tolist() == [7] * 10
    assert np.array_equal(thin.train.x, made.train.x)
    train, test = (replace(part, groups=part.y) for part in (made.train, made.test))
    people = replace(made, train=train, test=test)
    both = Data(name="digits", max_per_class=5, max_test_per_class=3)
    thin = thinned(people, both, 1)
    assert np.array_equal(thin.train.groups, thin.train.y)
    assert np.array_equal(thin.test.groups, thin.test.y)


# --- archives


def test_archives_are_unpacked_into_the_cache_only(tmp_path, monkeypatch, no_network):
    raw = mnist_archives(tmp_path / "root", monkeypatch)
    before = sorted(p.name for p in raw.iterdir())
    made = load(Data(name="mnist", root=str(tmp_path / "root")))
    assert made.train.x.shape == (20, 1, 28, 28)
    assert made.test.y.tolist() == list(range(10))
    assert sorted(p.name for p in raw.iterdir()) == before
    assert (tmp_path / "cache/fedtide/MNIST/raw/train-images-idx3-ubyte").exists()
    load(Data(name="mnist"))  # now from the cache


def test_a_damaged_archive_is_named(tmp_path, monkeypatch, no_network):
    raw = mnist_archives(tmp_path / "root", monkeypatch)
    (raw / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"other"))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz is damaged: its MD5"):
        load(Data(name="mnist", root=str(tmp_path / "root")))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, no_network, number):
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    raw = mnist_archives(tmp_path / "root", monkeypatch)
    monkeypatch.setattr(Path, "write_bytes", full)
    line = f"mnist cannot be unpacked into {tmp_path}/cache/fedtide: {os.strerror(number)}; make"
    with pytest.raises(DataError, match=re.escape(line)):
        load(Data(name="mnist", root=str(raw.parent.parent)))
    assert not list((tmp_path / "cache").rglob("*ubyte*"))


def test_a_cache_without_room_for_a_folder_is_named(tmp_path, monkeypatch, no_network):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "root" / "cifar-10-python.tar.gz"
    path.parent.mkdir()
    path.write_bytes(b"an archive")
    md5 = hashlib.md5(b"an archive", usedforsecurity=False).hexdigest()
    monkeypatch.setattr("torchvision.datasets.CIFAR10.tgz_md5", md5)
    monkeypatch.setattr(tarfile, "open", full)
    with pytest.raises(
        DataError, match=r"cifar10 cannot be unpacked into .*: No space left .*; make"
    ):
        load(Data(name="cifar10", root=str(path.parent)))
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no archive", "Not a gzipped file .*"),
        (gzip.compress(b"images" * 9)[:-9], "Compressed file ended before .*"),
        (gzip.compress(b"images" * 9)[:10] + b"\xff" * 20, "Error -3 while decompressing .*"),
    ],
    ids=["no archive", "cut", "changed"],
)
def test_an_archive_without_a_checksum_may_be_damaged(content, why, tmp_path, no_network):
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, _ in image_sets.EMNIST_FILES:
        (raw / name).write_bytes(content)
    with pytest.raises(DataError, match=f"gz is damaged: {why}; fetch it again"):
        load(Data(name="emnist-byclass", root=str(tmp_path)))


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
def test_what_another_process_has_unpacked_stays(tmp_path, monkeypatch, begins):
    """It may read it already. What is half there is made whole."""
    images, cache = tmp_path / "images", tmp_path / "cache"
    images.mkdir()
    for name in ("batch", "labels"):
        (images / name).write_text("whole")
    with tarfile.open(tmp_path / "images.tar.gz", "w:gz") as archive:
        archive.add(images, "images")
    theirs, extract, replace = cache / "images", tarfile.TarFile.extractall, os.replace

    def unpacked_by_another() -> None:
        theirs.mkdir(parents=True, exist_ok=True)
        (theirs / "batch").write_text("whole")
        (theirs / "labels").write_text("ha")

    def is_there() -> None:
        assert (theirs / "batch").read_text() == "whole"

    def slowly(self: tarfile.TarFile, place: str, **how: Any) -> None:
        if begins == "meanwhile":
            unpacked_by_another()
        is_there()
        extract(self, place, **how)

    def watched(*places: Path) -> None:
        is_there()
        replace(*places)

    if begins == "before":
        unpacked_by_another()
    monkeypatch.setattr(tarfile.TarFile, "extractall", slowly)
    monkeypatch.setattr(os, "replace", watched)
    image_sets._unpack_tar(tmp_path / "images.tar.gz", cache, "images")
    is_there()
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {
        "batch": "whole", "labels": "whole",
    }  # fmt: skip
    assert [path.name for path in cache.iterdir()] == ["images"]


@pytest.mark.parametrize(
    "name", ["mnist", "fashion-mnist", "emnist-byclass", "cifar10", "cifar100"]
)
def test_without_data_and_network_one_line_says_what_to_do(name, tmp_path, no_network, capfd):
    with pytest.raises(DataError) as caught:
        load(Data(name=name, root=str(tmp_path / "root")))
    line = str(caught.value)
    assert "\n" not in line
    assert name in line
    assert str(tmp_path / "root") in line
    assert "FEDTIDE_DATA" in line
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["uci-har", "motionsense", "wisdm"])
def test_missing_sensor_windows(name):
    with pytest.raises(DataError, match=rf"{name}: \w+.npz is in none of .*; put"):
        load(Data(name=name))


def cifar_subset(path: Path, classes: int = 10) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        path,
        x_train=rng.integers(0, 256, (classes * 3, 32, 32, 3), dtype=np.uint8),
        y_train=(np.arange(classes * 3) % classes).astype(np.uint8),
        x_test=rng.integers(0, 256, (classes, 32, 32, 3), dtype=np.uint8),
        y_test=np.arange(classes, dtype=np.uint8),
    )


def test_a_subset_stands_in_and_says_so(tmp_path, no_network, caplog):
    cifar_subset(tmp_path / "cifar10_subset.npz")
    with caplog.at_level(logging.WARNING):
        made = load(Data(name="cifar10", root=str(tmp_path)))
    assert made.variant == "subset, 30 train and 10 test examples"
    assert "the full set is absent" in caplog.text
    with np.load(tmp_path / "cifar10_subset.npz") as z:
        assert np.array_equal(made.train.x[3, 1], z["x_train"][3, :, :, 1])  # NHWC to NCHW
    (tmp_path / "cifar10_subset.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(DataError, match=r"cifar10_subset.npz cannot be read"):
        load(Data(name="cifar10", root=str(tmp_path)))


def test_coarse_classes_of_cifar100(tmp_path):
    cifar_subset(tmp_path / "cifar100_subset.npz", 100)
    fine = load(Data(name="cifar100", root=str(tmp_path)))
    coarse = load(Data(name="cifar100", root=str(tmp_path), labels="coarse"))
    assert (fine.num_classes, coarse.num_classes) == (100, 20)
    assert fine.coarse is not None
    assert np.bincount(fine.coarse).tolist() == [5] * 20
    trees = [k for k in range(100) if fine.coarse[k] == coarse.class_names.index("trees")]
    assert [fine.class_names[k] for k in trees] == [
        *("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree")
    ]
    assert np.array_equal(coarse.train.y, fine.coarse[fine.train.y])


def test_emnist_images_are_turned_upright():
    import torch

    class EMNIST:
        data = torch.arange(2 * 28 * 28, dtype=torch.int64).reshape(2, 28, 28).remainder(251)
        targets = torch.tensor([1, 0])

    found = image_sets._examples(EMNIST())
    assert np.array_equal(found.x[0, 0], EMNIST.data[0].numpy().T)
    assert found.y.tolist() == [1, 0]


# --- sensor windows


def sensor_file(path: Path, **extra: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    subject = np.repeat(np.arange(1, 11), 12)
    np.savez(
        path,
        X=rng.normal(size=(120, 128, 6)).astype(np.float16),
        y=(np.arange(120) % 6).astype(np.uint8),
        subject=subject.astype(np.int16),
        device=(np.arange(120) // 6 % 2).astype(np.uint8),
        label_names=np.array(list("abcdef")),
        device_names=np.array(["phone", "watch"]),
        **extra,
    )


def test_sensor_windows_keep_subjects_whole(tmp_path):
    sensor_file(tmp_path / "wisdm.npz")
    made = load(Data(name="wisdm", root=str(tmp_path)))
    assert made.train.x.dtype == np.float32
    assert made.input_shape == (128, 6)
    assert len(made.group_names) == 20  # subject and device
    assert made.group_names[1] == "subject 1, watch"
    assert made.train.groups is not None
    assert made.test.groups is not None
    assert {made.group_names[g].split(",")[0] for g in made.test.groups} == {
        "subject 5",
        "subject 10",
    }
    assert len(made.mean) == 6


def test_official_test_subjects_are_kept(tmp_path):
    official = np.isin(np.repeat(np.arange(1, 11), 12), [2, 4]).astype(np.uint8)
    sensor_file(tmp_path / "uci_har.npz", official_test=official)
    assert len(load(Data(name="uci-har", root=str(tmp_path))).test.y) == 24


# --- the publishers' own formats


def test_window_starts_include_the_last():
    assert window_starts(256, 128, 64) == [0, 64, 128]
    assert window_starts(256, 128, 64, legacy=True) == [0, 64]
    assert window_starts(255, 128, 64) == [0, 64]
    assert window_starts(127, 128, 64) == []


def test_windows_are_decimated_without_aliases():
    t = np.arange(512 * 3) / 200  # 200 Hz
    slow, fast = np.sin(2 * np.pi * 2 * t), np.sin(2 * np.pi * 90 * t)
    cut = windows_of(np.stack([slow, fast] * 3, axis=1), 4)
    assert cut.shape == (5, 128, 6)
    inner = cut[1, 20:-20]
    assert inner[:, 0] == pytest.approx(slow[256 : 256 + 512 : 4][20:-20], abs=0.05)
    assert np.abs(inner[:, 1]).max() < 0.05


def test_the_longer_sensor_is_resampled_whichever_it_is():
    ramp = np.linspace(0, 1, 400)[:, None] * np.ones(3)
    short = np.linspace(0, 1, 200)[:, None] * np.ones(3)
    for acc, gyro in ((ramp, short), (short, ramp)):
        both = paired(acc, gyro)
        assert both.shape == (200, 6)
        assert np.allclose(both[:, :3], both[:, 3:])
    assert paired(ramp[:350], ramp).shape == (350, 6)  # 50 samples: cut off, not resampled
    assert np.allclose(paired(ramp[:350], ramp)[:, 3:], ramp[:350])


def write_hhar(root: Path) -> None:
    """Write two users with an s3mini (100 Hz) and one activity short for the second."""
    root.mkdir(parents=True, exist_ok=True)
    header = "Index,Arrival_Time,Creation_Time,x,y,z,User,Model,Device,gt\n"
    for name, scale in (("accelerometer", 9.80665), ("gyroscope", 1.0)):
        rows, clock = [], 1_424_696_633_908
        for user in "ab":
            for activity in (*HHAR, "null"):
                if user == "b" and activity == "bike":
                    continue
                for _ in range(512):
                    clock += 10
                    xyz = f"{scale},{2 * scale},0.5"
                    rows.append(
                        f"0,{clock},{clock * 10**6},{xyz},{user},s3mini,s3mini_1,{activity}\n"
                    )
        (root / f"Phones_{name}.csv").write_text(header + "".join(rows))


def test_hhar_is_cut_from_its_csv_files_once(tmp_path):
    write_hhar(tmp_path / "root" / "Activity recognition exp")
    made = load(Data(name="hhar", root=str(tmp_path / "root")))
    x = np.concatenate([made.train.x, made.test.x])
    assert x.shape == (6 * 3, 128, 6)  # 512 samples at 100 Hz: three windows an activity
    assert made.group_names == ("subject 0, s3mini",)  # user b has no bike ride
    assert np.bincount(made.train.y).tolist() == [3] * 6
    assert x[..., :2] == pytest.approx(np.tile([1.0, 2.0], (18, 128, 1)), abs=1e-3)  # in g
    assert (tmp_path / "cache/fedtide/hhar.npz").exists()
    again = load(Data(name="hhar"))  # now from the cache
    assert np.array_equal(again.train.x, made.train.x)
    legacy = load(Data(name="hhar", root=str(tmp_path / "root"), legacy_windows=True))
    assert len(legacy.train.x) == 6 * 2


def test_windows_that_cannot_be_kept_are_of_use_all_the_same(tmp_path, caplog):
    write_hhar(tmp_path / "root")
    (tmp_path / "cache").write_text("no directory can be made here")
    assert len(load(Data(name="hhar", root=str(tmp_path / "root"))).train.x) == 6 * 3
    assert "hhar.npz cannot be kept, and will be cut again next time: " in caplog.text


def write_realworld(root: Path, subjects: int = 2) -> None:
    """Write two positions of three activities, one recording in two parts."""
    rng = np.random.default_rng(0)

    def samples(n: int) -> str:
        values = rng.normal(size=(n, 3))
        rows = [f"{j},{1000 + 20 * j},{x},{y},{z}" for j, (x, y, z) in enumerate(values)]
        return "id,attr_time,attr_x,attr_y,attr_z\n" + "\n".join(rows)

    def zipped(files: dict[str, str | bytes]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return out.getvalue()

    for subject in range(1, subjects + 1):
        folder = root / "realworld2016_dataset" / f"proband{subject}" / "data"
        folder.mkdir(parents=True)
        for sensor, inner in (("acc", "acc"), ("gyr", "Gyroscope")):
            for activity in ("walking", "lying", "jumping"):
                files: dict[str, str | bytes] = {
                    f"{inner}_{activity}_{position}.csv": samples(256)
                    for position in ("chest", "forearm")
                }
                if activity == "walking":
                    files = {f"{sensor}_walking_{k}_csv.zip": zipped(files) for k in (1, 2)}
                (folder / f"{sensor}_{activity}_csv.zip").write_bytes(zipped(files))


def test_realworld_is_cut_from_its_zips(tmp_path):
    write_realworld(tmp_path / "root")
    made = load(Data(name="realworld", root=str(tmp_path / "root")))
    assert made.group_names[:2] == ("subject 1, chest", "subject 1, forearm")
    assert made.devices == ("phone", "watch") * 2
    # three windows of 256 samples; walking comes in two parts
    assert np.bincount(made.train.y, minlength=8).tolist() == [0, 0, 0, 0, 0, 24, 12, 12]
    assert made.class_names[5:] == ("walk", "lie", "jump")


def test_the_combined_set_aligns_the_labels(tmp_path):
    write_hhar(tmp_path / "root")
    write_realworld(tmp_path / "root")
    made = load(Data(name="hhar+realworld", root=str(tmp_path / "root")))
    assert made.class_names == COMBINED
    assert made.group_names[0] == "subject 0, s3mini"
    assert made.group_names[-1] == "subject 102, forearm"
    counts = np.bincount(np.concatenate([made.train.y, made.test.y]), minlength=9)
    assert counts.tolist() == [3, 3, 3 + 24, 3, 3, 3, 0, 12, 12]


def test_realworld_labels_of_the_card():
    names = tuple(REALWORLD.values())
    assert names == ("down", "up", "run", "sit", "stand", "walk", "lie", "jump")
    assert [COMBINED[k] for k in REALWORLD_LABELS] == list(names)


def write_femnist(folder: Path, writers: str, n: int) -> None:
    folder.mkdir(parents=True)
    held = {w: {"x": [[1.0] * 783 + [0.5]] * n, "y": [j % 62 for j in range(n)]} for w in writers}
    content = {"users": list(writers), "num_samples": [n] * len(writers), "user_data": held}
    (folder / "all_data_0.json").write_text(json.dumps(content))


def test_femnist_of_leaf(tmp_path):
    write_femnist(tmp_path / "femnist/data/train", "fg", 70)
    write_femnist(tmp_path / "femnist/data/test", "fg", 5)
    made = load(Data(name="femnist", root=str(tmp_path)))
    assert (made.train.x.shape, len(made.test.y)) == ((140, 1, 28, 28), 10)
    assert made.train.x[0, 0, -1, -2:].tolist() == [255, 128]
    assert made.group_names == ("writer f", "writer g")
    assert made.groups is not None
    assert np.bincount(made.groups).tolist() == [75, 75]


def test_what_takes_long_is_read_once(tmp_path, monkeypatch):
    write_femnist(tmp_path / "femnist/data/train", "fg", 70)
    write_femnist(tmp_path / "femnist/data/test", "fg", 5)
    first = load(Data(name="femnist", root=str(tmp_path)))
    (kept,) = (tmp_path / "cache/fedtide/prepared").glob("femnist-*.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr("fedcli.data.sets.femnist.femnist", None)  # must not be needed
        again = load(Data(name="femnist", root=str(tmp_path)))

    def values(made: Dataset) -> list[Any]:
        facts = {**vars(made), "train": None, "test": None}
        return [*facts.values(), *vars(made.train).values(), *vars(made.test).values()]

    for one, other in zip(values(first), values(again), strict=True):
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    assert not again.train.x.flags.owndata  # it lies in the file
    kept.write_bytes(b"damaged")
    assert np.array_equal(load(Data(name="femnist", root=str(tmp_path))).train.x, first.train.x)
    (tmp_path / "femnist/data/train").rename(tmp_path / "before")
    write_femnist(tmp_path / "femnist/data/train", "fgh", 70)  # another version
    assert len(load(Data(name="femnist", root=str(tmp_path))).train.y) > len(first.train.y)


def test_femnist_without_a_split(tmp_path):
    write_femnist(tmp_path / "femnist/data/all_data", "fg", 155)
    made = load(Data(name="femnist", root=str(tmp_path)))
    assert (len(made.train.y), len(made.test.y)) == (248, 62)


def write_tiny_imagenet(root: Path) -> None:
    ids = [f"n{k:08}" for k in range(3)]
    (root / "val/images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(ids))
    (root / "words.txt").write_text("".join(f"{name}\tthing {name}, other\n" for name in ids))
    lines = []
    for k, name in enumerate(ids):
        (root / "train" / name / "images").mkdir(parents=True)
        for j in range(2):
            image = Image.new("RGB" if j else "L", (64, 64), color=k)
            image.save(root / "train" / name / "images" / f"{name}_{j}.JPEG")
        Image.new("RGB", (64, 64)).save(root / "val/images" / f"val_{k}.JPEG")
        lines.append(f"val_{k}.JPEG\t{name}\t0\t0\t9\t9\n")
    (root / "val/val_annotations.txt").write_text("".join(lines))


def test_tiny_imagenet_zipped_or_not(tmp_path):
    write_tiny_imagenet(tmp_path / "plain/tiny-imagenet-200")
    (tmp_path / "packed").mkdir()
    with zipfile.ZipFile(tmp_path / "packed/tiny-imagenet-200.zip", "w") as archive:
        for path in sorted((tmp_path / "plain").rglob("*")):
            archive.write(path, path.relative_to(tmp_path / "plain"))
    plain = load(Data(name="tiny-imagenet", root=str(tmp_path / "plain")))
    packed = load(Data(name="tiny-imagenet", root=str(tmp_path / "packed")))
    assert plain.train.x.shape == (6, 3, 64, 64)
    assert plain.train.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert plain.class_names[0] == "thing n00000000"
    assert np.array_equal(plain.train.x, packed.train.x)
    assert np.array_equal(plain.test.y, packed.test.y)
    (tmp_path / "packed/tiny-imagenet-200.zip").write_bytes(b"PK broken")
    with pytest.raises(DataError, match=r"tiny-imagenet-200.zip cannot be read"):
        load(Data(name="tiny-imagenet", root=str(tmp_path / "packed")))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("femnist", "femnist/data/train"),
        ("tiny-imagenet", "cs231n.stanford.edu"),
        ("hhar", "Phones_accelerometer.csv"),
        ("realworld", "realworld2016_dataset"),
        ("hhar+realworld", "Phones_accelerometer.csv"),
    ],
)
def test_what_must_be_fetched_by_hand_is_named(name, what, tmp_path):
    with pytest.raises(DataError) as caught:
        load(Data(name=name, root=str(tmp_path / "root")))
    line = str(caught.value)
    assert "\n" not in line
    assert what in line
    assert str(tmp_path / "root") in line


def test_damaged_publishers_files_are_named(tmp_path):
    write_hhar(tmp_path)
    (tmp_path / "Phones_gyroscope.csv").write_text("Index,x\n1,2\n")
    with pytest.raises(DataError, match=r"Phones_gyroscope.csv cannot be read"):
        load(Data(name="hhar", root=str(tmp_path)))
    write_realworld(tmp_path, 1)
    path = tmp_path / "realworld2016_dataset/proband1/data/acc_lying_csv.zip"
    path.write_bytes(b"PK broken")
    with pytest.raises(DataError, match=r"acc_lying_csv.zip cannot be read"):
        load(Data(name="realworld", root=str(tmp_path)))


# --- custom data


def test_a_directory_of_arrays(tmp_path):
    rng = np.random.default_rng(0)
    for part, n in (("train", 12), ("test", 6)):
        np.save(tmp_path / f"{part}_x.npy", rng.integers(0, 9, (n, 3, 4, 4), dtype=np.uint8))
        np.save(tmp_path / f"{part}_y.npy", np.arange(n) % 3)
        np.save(tmp_path / f"groups_{part}.npy", np.arange(n) % 2)
    (tmp_path / "dataset.json").write_text('{"class_names": ["x", "y", "z"], "scale": 8}')
    made = load(Data(name="directory", root=str(tmp_path)))
    assert (made.num_classes, made.scale, len(made.mean)) == (3, 8.0, 3)
    assert made.groups is not None
    assert made.groups.shape == (18,)
    for wrong in ('{"scale": "x"}', '{"std": [0, 1, 1]}', '{"mean": [1, 2]}', "[]", "{"):
        (tmp_path / "dataset.json").write_text(wrong)
        with pytest.raises(DataError, match=r"dataset.json"):
            load(Data(name="directory", root=str(tmp_path)))
    (tmp_path / "dataset.json").write_text('{"class_names": ["x", "y", "z"]}')
    np.save(tmp_path / "train_y.npy", np.arange(12) % 4)
    with pytest.raises(DataError, match="label 3 has no name among 3"):
        load(Data(name="directory", root=str(tmp_path)))
    np.save(tmp_path / "train_y.npy", np.arange(11) % 3)
    with pytest.raises(DataError, match=r"train_y.npy must hold 12 integer labels"):
        load(Data(name="directory", root=str(tmp_path)))
    (tmp_path / "test_x.npy").unlink()
    with pytest.raises(DataError):
        load(Data(name="directory", root=str(tmp_path)))


def test_a_directory_of_class_folders(tmp_path):
    for part in ("train", "test"):
        for name, colour in (("cat", 10), ("dog", 20)):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("L", (5, 4), color=colour).save(tmp_path / part / name / "0.png")
    made = load(Data(name="directory", root=str(tmp_path)))
    assert made.class_names == ("cat", "dog")
    assert made.input_shape == (1, 4, 5)
    assert made.test.x[:, 0, 0, 0].tolist() == [10, 20]
    with pytest.raises(DataError, match="say where the data lie"):
        load(Data(name="directory"))


# --- the commands


def test_run_partition_writes_and_prints(tmp_path):
    console = Console(file=io.StringIO(), width=100)
    data, scenario = Data(name="digits", max_per_class=12), Iid(kind="iid", tasks=[1, 2, 1])
    out = run_partition(data, scenario, 3, 0, tmp_path / "data", console)
    assert out == str(tmp_path / "data")
    run_partition(data, scenario, 3, 0, tmp_path / "data", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "written to" in text
    assert "the same partition is already in" in text
    assert [ClientData(tmp_path / "data" / str(i)).num_tasks for i in range(3)] == [1, 2, 1]
    with pytest.raises(DataError, match="another partition"):
        run_partition(data.model_copy(update={"max_per_class": 13}), scenario, 3, 0, Path(out))


def test_a_partition_is_drawn_unless_that_is_refused(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(
        'data.name = "digits"\nscenario.kind = "iid"\nschedule.clients = 2\nnet.name = "mlp"\n'
        'method.name = "fedavg"\n'
    )
    for name, words in (("plain", ["--no-picture"]), ("drawn", [])):
        with pytest.raises(SystemExit) as ended:
            main(["partition", str(config), "--out", str(tmp_path / name), *words])
        assert not ended.value.code
    assert not (tmp_path / "plain" / "partition.svg").exists()
    drawn = ElementTree.parse(tmp_path / "drawn" / "partition.svg")
    texts = {"".join(node.itertext()) for node in drawn.iter() if node.tag.endswith("text")}
    counts = json.loads((tmp_path / "drawn" / "partition.json").read_bytes())["clients"][1][0]
    assert f"class 9, client 1: {counts['train'][9]}{counts['train'][9]}" in texts


def test_the_digest_does_not_depend_on_where_the_data_lie(tmp_path):
    scenario, console = Iid(kind="iid"), Console(file=io.StringIO())
    run_partition(Data(name="digits"), scenario, 2, 0, tmp_path / "data", console)
    run_partition(Data(name="digits", root="/else"), scenario, 2, 0, tmp_path / "data", console)
    assert "the same partition is already in" in console.file.getvalue()  # type: ignore[attr-defined]


def test_long_tables_are_cut(tmp_path):
    console = Console(file=io.StringIO(), width=100)
    scenario = Iid(kind="iid", tasks=commands.MAX_ROWS)
    run_partition(Data(name="digits"), scenario, 2, 0, tmp_path / "data", console)
    assert "40 more rows" in console.file.getvalue()  # type: ignore[attr-defined]


def test_list_datasets_names_them_all():
    console = Console(file=io.StringIO(), width=200)
    console.print(datasets_table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in text for name in names())
    assert "[data] root" in text  # not swallowed as markup


# --- the real ones


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("mnist", (1, 28, 28), (60000, 10000)),
        ("fashion-mnist", (1, 28, 28), (60000, 10000)),
        ("cifar10", (3, 32, 32), None),
        ("cifar100", (3, 32, 32), None),
        ("emnist-byclass", (1, 28, 28), None),
        ("uci-har", (128, 6), None),
        ("motionsense", (128, 6), None),
        ("wisdm", (128, 6), None),
    ],
)
def test_real_data(name, shape, sizes):
    made = load_or_skip(name)
    assert made.input_shape == shape
    assert sizes is None or (len(made.train.y), len(made.test.y)) == sizes
    assert set(np.unique(made.train.y)) == set(range(made.num_classes))
    z = made.train.x[::20].astype(np.float32) / made.scale
    axes = (0, 2, 3) if len(shape) == 3 else (0, 1)
    assert np.allclose(z.mean(axis=axes), made.mean, atol=0.05)
    assert np.allclose(z.std(axis=axes), made.std, atol=0.05)


@pytest.mark.data
def test_wisdm_has_58_natural_clients(tmp_path):
    made = load_or_skip("wisdm")
    assert len(made.group_names) == 58
    with pytest.raises(ConfigError, match="has 58 natural clients"):
        run_partition(Data(name="wisdm"), Natural(kind="natural"), 59, 0, tmp_path / "data")


def load_or_skip(name: str) -> Dataset:
    import os

    if not os.environ.get("FEDTIDE_DATA"):
        pytest.skip("FEDTIDE_DATA is not set")
    source: Source = datasets.source_of(Data(name=name))
    if source.find(*DATASETS[name].files) is None:
        pytest.skip(f"{name} is not in FEDTIDE_DATA")
    return load(Data(name=name))
