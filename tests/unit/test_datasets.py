"""Known data sets: where they are looked for, what they hold, and the one line when they do not."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import socket
import struct
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fedcli.data import archives, commands, datasets
from fedcli.data.commands import list_datasets, run_partition, thinned
from fedcli.data.datasets import DATASETS, Dataset, Source, load, names
from fedcli.data.store import ClientData
from fedmodels.errors import ConfigError, DataError
from fedmodels.scenario import Data, Iid, Natural


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


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fashion-mnist'"):
        load(Data(name="fashion_mnist"))


def test_every_loader_exists() -> None:
    assert len(DATASETS) >= 10
    for name in DATASETS:
        assert callable(datasets._loader(name))


def test_coarse_labels_belong_to_cifar100() -> None:
    with pytest.raises(ConfigError, match="belongs to cifar100, not to digits"):
        load(Data(name="digits", labels="coarse"))


def test_other_packages_add_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("blobs", "sklearn.datasets:load_iris", "fedtide.data")

    def points(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "fedtide.data"
        return [point] if name in (None, "blobs") else []

    monkeypatch.setattr(datasets, "entry_points", points)
    assert "blobs" in names()
    assert datasets._loader("blobs").__name__ == "load_iris"


def test_roots_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path / "env"))
    source = datasets.source_of(Data(name="digits", root=str(tmp_path / "own")))
    assert [root.name for root in source.roots] == ["own", "env", "fedtide"]
    assert source.cache == tmp_path / "cache" / "fedtide"


# --- digits


def test_digits() -> None:
    made = load(Data(name="digits"))
    assert made.input_shape == (1, 8, 8)
    assert (len(made.train_y), len(made.test_y)) == (1438, 359)
    assert (made.train_x.dtype, made.train_x.max(), made.scale) == (np.uint8, 16, 16.0)
    share = np.bincount(made.test_y) / np.bincount(np.concatenate([made.train_y, made.test_y]))
    assert np.allclose(share, 0.2, atol=0.01)
    z = (made.train_x / made.scale - made.mean[0]) / made.std[0]
    assert z.mean() == pytest.approx(0, abs=1e-3)
    assert z.std() == pytest.approx(1, abs=1e-3)
    assert np.array_equal(load(Data(name="digits")).test_x, made.test_x)


def test_max_per_class_is_seeded() -> None:
    made = load(Data(name="digits"))
    thin = thinned(made, 30, 1)
    assert np.bincount(thin.train_y).tolist() == [30] * 10
    assert np.array_equal(thin.train_x, thinned(made, 30, 1).train_x)
    assert not np.array_equal(thin.train_x, thinned(made, 30, 2).train_x)
    assert thinned(made, None, 1) is made


# --- archives


def test_archives_are_unpacked_into_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    raw = mnist_archives(tmp_path / "root", monkeypatch)
    before = sorted(p.name for p in raw.iterdir())
    made = load(Data(name="mnist", root=str(tmp_path / "root")))
    assert made.train_x.shape == (20, 1, 28, 28)
    assert made.test_y.tolist() == list(range(10))
    assert sorted(p.name for p in raw.iterdir()) == before
    assert (tmp_path / "cache/fedtide/MNIST/raw/train-images-idx3-ubyte").exists()
    load(Data(name="mnist"))  # now from the cache


def test_a_damaged_archive_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    raw = mnist_archives(tmp_path / "root", monkeypatch)
    (raw / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"other"))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz is damaged: its MD5"):
        load(Data(name="mnist", root=str(tmp_path / "root")))


@pytest.mark.parametrize(
    "name", ["mnist", "fashion-mnist", "emnist-byclass", "cifar10", "cifar100"]
)
def test_without_data_and_network_one_line_says_what_to_do(
    name: str, tmp_path: Path, no_network: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError) as caught:
        load(Data(name=name, root=str(tmp_path / "root")))
    line = str(caught.value)
    assert "\n" not in line
    assert name in line
    assert str(tmp_path / "root") in line
    assert "FEDTIDE_DATA" in line
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["uci-har", "motionsense", "wisdm"])
def test_missing_sensor_windows(name: str) -> None:
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


def test_a_subset_stands_in_and_says_so(
    tmp_path: Path, no_network: None, caplog: pytest.LogCaptureFixture
) -> None:
    cifar_subset(tmp_path / "cifar10_subset.npz")
    with caplog.at_level(logging.WARNING):
        made = load(Data(name="cifar10", root=str(tmp_path)))
    assert made.variant == "subset, 30 train and 10 test examples"
    assert "the full set is absent" in caplog.text
    with np.load(tmp_path / "cifar10_subset.npz") as z:
        assert np.array_equal(made.train_x[3, 1], z["x_train"][3, :, :, 1])  # NHWC to NCHW
    (tmp_path / "cifar10_subset.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(DataError, match=r"cifar10_subset.npz cannot be read"):
        load(Data(name="cifar10", root=str(tmp_path)))


def test_coarse_classes_of_cifar100(tmp_path: Path) -> None:
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
    assert np.array_equal(coarse.train_y, fine.coarse[fine.train_y])


def test_emnist_images_are_turned_upright() -> None:
    import torch

    class EMNIST:
        data = torch.arange(2 * 28 * 28, dtype=torch.int64).reshape(2, 28, 28).remainder(251)
        targets = torch.tensor([1, 0])

    x, y = archives._examples(EMNIST())
    assert np.array_equal(x[0, 0], EMNIST.data[0].numpy().T)
    assert y.tolist() == [1, 0]


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


def test_sensor_windows_keep_subjects_whole(tmp_path: Path) -> None:
    sensor_file(tmp_path / "wisdm.npz")
    made = load(Data(name="wisdm", root=str(tmp_path)))
    assert made.train_x.dtype == np.float32
    assert made.input_shape == (128, 6)
    assert len(made.group_names) == 20  # subject and device
    assert made.group_names[1] == "subject 1, watch"
    assert made.groups_train is not None
    assert made.groups_test is not None
    assert {made.group_names[g].split(",")[0] for g in made.groups_test} == {
        "subject 5",
        "subject 10",
    }
    assert len(made.mean) == 6


def test_official_test_subjects_are_kept(tmp_path: Path) -> None:
    official = np.isin(np.repeat(np.arange(1, 11), 12), [2, 4]).astype(np.uint8)
    sensor_file(tmp_path / "uci_har.npz", official_test=official)
    assert len(load(Data(name="uci-har", root=str(tmp_path))).test_y) == 24


# --- one's own


def test_a_directory_of_arrays(tmp_path: Path) -> None:
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
    np.save(tmp_path / "train_y.npy", np.arange(12) % 4)
    with pytest.raises(DataError, match="label 3 has no name among 3"):
        load(Data(name="directory", root=str(tmp_path)))
    np.save(tmp_path / "train_y.npy", np.arange(11) % 3)
    with pytest.raises(DataError, match=r"train_y.npy must hold 12 integer labels"):
        load(Data(name="directory", root=str(tmp_path)))
    (tmp_path / "test_x.npy").unlink()
    with pytest.raises(DataError):
        load(Data(name="directory", root=str(tmp_path)))


def test_a_directory_of_class_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name, colour in (("cat", 10), ("dog", 20)):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("L", (5, 4), color=colour).save(tmp_path / part / name / "0.png")
    made = load(Data(name="directory", root=str(tmp_path)))
    assert made.class_names == ("cat", "dog")
    assert made.input_shape == (1, 4, 5)
    assert made.test_x[:, 0, 0, 0].tolist() == [10, 20]
    with pytest.raises(DataError, match="say where the data lie"):
        load(Data(name="directory"))


# --- the commands


def test_run_partition_writes_and_prints(tmp_path: Path) -> None:
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


def test_the_digest_does_not_depend_on_where_the_data_lie(tmp_path: Path) -> None:
    scenario, console = Iid(kind="iid"), Console(file=io.StringIO())
    run_partition(Data(name="digits"), scenario, 2, 0, tmp_path / "data", console)
    run_partition(Data(name="digits", root="/else"), scenario, 2, 0, tmp_path / "data", console)


def test_long_tables_are_cut(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    scenario = Iid(kind="iid", tasks=commands.MAX_ROWS)
    run_partition(Data(name="digits"), scenario, 2, 0, tmp_path / "data", console)
    assert "40 more rows" in console.file.getvalue()  # type: ignore[attr-defined]


def test_list_datasets_names_them_all() -> None:
    console = Console(file=io.StringIO(), width=200)
    list_datasets(console)
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
def test_real_data(name: str, shape: tuple[int, ...], sizes: tuple[int, int] | None) -> None:
    made = load_or_skip(name)
    assert made.input_shape == shape
    assert sizes is None or (len(made.train_y), len(made.test_y)) == sizes
    assert set(np.unique(made.train_y)) == set(range(made.num_classes))
    z = made.train_x[::20].astype(np.float32) / made.scale
    axes = (0, 2, 3) if len(shape) == 3 else (0, 1)
    assert np.allclose(z.mean(axis=axes), made.mean, atol=0.05)
    assert np.allclose(z.std(axis=axes), made.std, atol=0.05)


@pytest.mark.data
def test_wisdm_has_58_natural_clients(tmp_path: Path) -> None:
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
