"""Writing partitions, reading client directories, and refusing what is wrong with one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter

from fedcli.data.cuts.cut_input import Partition
from fedcli.data.cuts.partition import partition
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.store.client_data import ClientData, GlobalTest
from fedcli.data.store.partition_writer import (
    digest_of,
    examples_of,
    same_partition,
    write_partition,
)
from fedmodels.config.scenario import Scenario
from fedmodels.errors import DataError
from fedmodels.facts.data_description import Normaliser

SCENARIOS: TypeAdapter[Scenario] = TypeAdapter(Scenario)


def tiny_dataset(shape: tuple[int, ...] = (1, 4, 4), floats: bool = False) -> Dataset:
    """Three classes, 60 training and 30 test examples, of three subjects with two devices."""
    rng = np.random.default_rng(0)

    def inputs(n: int) -> np.ndarray:
        raw = rng.integers(0, 256, (n, *shape))
        return raw.astype(np.float32) if floats else raw.astype(np.uint8)

    return Dataset(
        name="tiny",
        train=Examples(inputs(60), np.arange(60) % 3, np.repeat([0, 1], 30)),
        test=Examples(inputs(30), np.arange(30) % 3, np.full(30, 2)),
        scale=1.0 if floats else 255.0,
        mean=(0.5,),
        std=(0.25,),
        class_names=("a", "b", "c"),
        group_names=("s0", "s1", "s2"),
        devices=("x", "x", "y"),
    )


def write(out: Path, dataset: Dataset | None = None, seed: int = 0, **table: object) -> Path:
    dataset = dataset or tiny_dataset()
    scenario = SCENARIOS.validate_python(table or {"kind": "iid", "tasks": 2})
    made = partition(scenario, dataset.train.y, dataset.test.y, 3, 2, seed, dataset.groups)
    write_partition(out, dataset, made, {"seed": seed, "scenario": scenario.model_dump()})
    return out


def edit(path: Path, **changes: object) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_a_partition_reads_back(tmp_path):
    dataset = tiny_dataset()
    made = partition(
        SCENARIOS.validate_python({"kind": "iid", "tasks": 2}),
        dataset.train.y,
        dataset.test.y,
        3,
        2,
        0,
    )
    assert write_partition(tmp_path / "data", dataset, made, {"seed": 0})
    for i, tasks in enumerate(made.clients):
        data = ClientData(tmp_path / "data" / str(i))
        data.check()
        assert data.num_tasks == 2
        assert (data.problem.input_shape, data.problem.num_classes) == ((1, 4, 4), 3)
        for m, task in enumerate(tasks):
            x, y = data.arrays(m, "train")
            assert np.array_equal(x, dataset.train.x[task.train])
            assert np.array_equal(y, dataset.train.y[task.train])
            x, y = data.arrays(m, "test")
            assert np.array_equal(x, dataset.test.x[task.test])
            assert isinstance(x.base, np.memmap)
            assert list(data.tasks[m].test) == np.bincount(y, minlength=3).tolist()
    found = GlobalTest.find(tmp_path / "data")
    assert found is not None
    assert np.array_equal(found.x, dataset.test.x)


def test_the_layout_is_the_promised_one(tmp_path):
    out = write(tmp_path / "data")
    files = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    parts = ("train_x", "train_y", "test_x", "test_y")
    assert files == {
        "partition.json",
        *(f"global-test/{name}" for name in ("x.npy", "y.npy", "problem.json")),
        *(f"{i}/client.json" for i in range(2)),
        *(f"{i}/task-{m}/{part}.npy" for i in range(2) for m in range(2) for part in parts),
    }
    about = json.loads((out / "0" / "client.json").read_text())
    assert about["format"] == 1
    assert (
        about["tasks"][0]["train"]
        == np.bincount(np.load(out / "0/task-0/train_y.npy"), minlength=3).tolist()
    )
    assert [p.name for p in tmp_path.iterdir()] == ["data"]  # no temporary directory is left


def test_the_same_partition_is_reused_and_another_refused(tmp_path):
    out = write(tmp_path / "data")
    before = (out / "0/task-0/train_x.npy").stat().st_mtime_ns
    write(out)
    assert (out / "0/task-0/train_x.npy").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"another partition .*seed was 0, is 1"):
        write(out, seed=1)
    with pytest.raises(DataError, match=r"another partition \(scenario.kind"):
        write(out, kind="label_shards", shards=2)


def test_what_is_not_a_partition_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(DataError, match="is not a partition"):
        write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "data").mkdir()
    assert (write(tmp_path / "data") / "partition.json").exists()


def test_nothing_is_left_where_writing_fails(tmp_path, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match=r"data cannot be written: No space left"):
        write(tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_where_numpy_counts_bytes_alone(tmp_path, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError("11520 requested and 896 written")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match=r"data cannot be written: the disk is full, or fails$"):
        write(tmp_path / "data")


def test_a_mount_point_is_not_replaced(tmp_path, monkeypatch):
    def busy(source: Path, target: Path) -> None:
        raise OSError(16, "Device or resource busy", str(source), None, str(target))

    out = tmp_path / "volume"
    out.mkdir()
    monkeypatch.setattr("fedcli.data.store.partition_writer.os.rename", busy)
    with pytest.raises(DataError, match=r"volume cannot be replaced .*; name a directory in it$"):
        write(out)
    assert [p.name for p in tmp_path.iterdir()] == ["volume"]


def test_digest_ignores_the_order_of_keys(tmp_path):
    assert digest_of({"a": 1, "b": {"c": 2, "d": 3}}) == digest_of({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
    assert not same_partition(tmp_path / "none", {})


def test_zscore_per_client_uses_the_training_data_of_its_first_task(tmp_path):
    dataset = tiny_dataset((128, 6), floats=True)
    out = write(tmp_path / "data", dataset, kind="natural", tasks=2)
    data = ClientData(out / "1")
    z = data.normaliser(data.arrays(0, "train")[0])
    assert np.allclose(z.mean(axis=(0, 1)), 0, atol=1e-5)
    assert np.allclose(z.std(axis=(0, 1)), 1, atol=1e-5)
    found = data.global_test()
    assert found is not None
    tests = np.concatenate([data.normaliser(data.arrays(m, "test")[0]) for m in range(2)])
    theirs = Normaliser.of(found.problem)(found.x)  # each client's part by its own moments
    rows = {row.tobytes() for row in theirs}
    assert all(row.tobytes() in rows for row in tests)


def test_official_zscore_is_one_per_sensor_and_device(tmp_path):
    dataset = tiny_dataset((128, 6), floats=True)
    out = write(tmp_path / "data", dataset, kind="natural", zscore="official")
    files = [ClientData(out / str(i)).file for i in range(2)]
    assert files[0].mean == files[1].mean  # both have device x
    assert files[0].mean[0] == pytest.approx(float(dataset.train.x[..., :3].mean()), rel=1e-6)
    assert len(set(files[0].mean)) == 2


def test_pooled_indices_reach_into_both_parts(tmp_path):
    out = write(tmp_path / "data", kind="dirichlet_pooled", alpha=5.0)
    held = [ClientData(out / str(i)).arrays(0, p) for i in range(2) for p in ("train", "test")]
    rows = sorted(row.tobytes() for x, _ in held for row in x)
    dataset = tiny_dataset()
    assert rows == sorted(r.tobytes() for x in (dataset.train.x, dataset.test.x) for r in x)


def test_pooled_examples_come_in_the_order_asked_for():
    dataset, order = tiny_dataset(), np.array([61, 3, 89, 0, 60])
    x, y = examples_of(dataset, Partition((), order, pooled=True), order, "train")
    everything = np.concatenate([dataset.train.x, dataset.test.x])
    assert np.array_equal(x, everything[order])
    assert y.tolist() == [1, 0, 2, 0, 0]


# --- a directory that is not what it must be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, r"client.json: format: Input should be 1"),
        ({"input_shape": None}, r"input_shape: Field required"),
        ({"num_classes": 0}, r"num_classes: "),
        ({"num_classes": "3"}, r"num_classes: "),
        ({"std": [0.0]}, r"std.0: "),
        ({"mean": [0.1, 0.2]}, r"mean must hold 1 or 1 numbers"),
        ({"class_names": ["a"]}, r"class_names must hold 3 names"),
        ({"colour": "red"}, r"colour: Extra inputs"),
    ],
)
def test_a_wrong_description_is_one_line(tmp_path, changes, message):
    out = write(tmp_path / "data")
    edit(out / "0" / "client.json", **changes)
    with pytest.raises(DataError, match=message) as caught:
        ClientData(out / "0")
    assert "client.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_things_are_named(tmp_path):
    with pytest.raises(DataError, match="7 is not there"):
        ClientData(tmp_path / "7")
    (tmp_path / "7").mkdir()
    with pytest.raises(DataError, match=r"client.json is missing"):
        ClientData(tmp_path / "7")
    out = write(tmp_path / "data")
    (out / "0/task-1/train_x.npy").unlink()
    with pytest.raises(DataError, match=r"task-1/train_x.npy is missing"):
        ClientData(out / "0").check()
    with pytest.raises(DataError, match="has no task 2: it has 2"):
        ClientData(out / "1").arrays(2, "train")


@pytest.mark.parametrize(
    ("file", "array", "message"),
    [
        ("train_y", np.full(15, 3), "labels go from 3 to 3; expected 0 to 2"),
        ("train_y", np.zeros(15, dtype=np.int32), "labels are int32"),
        ("train_y", np.zeros(14, dtype=np.int64), r"\[14\]; expected int64 \[15\]"),
        ("train_y", np.zeros(15, dtype=np.int64), "does not hold the train counts"),
        ("train_x", np.zeros((15, 1, 4, 5), dtype=np.uint8), r"\[1, 4, 5\]; expected \[1, 4, 4\]"),
        ("train_x", np.zeros((15, 1, 4, 4), int), "int64; expected uint8, uint16, float32"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, file, array, message):
    out = write(tmp_path / "data")
    np.save(out / "0/task-0" / f"{file}.npy", array)
    with pytest.raises(DataError, match=message) as caught:
        ClientData(out / "0").arrays(0, "train")
    assert "task-0" in str(caught.value)


def test_a_pickle_is_never_opened(tmp_path):
    out = write(tmp_path / "data")
    np.save(out / "0/task-0/train_y.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    line = r"train_y.npy cannot be read: it is no file of numpy, or holds objects"
    with pytest.raises(DataError, match=line):
        ClientData(out / "0").arrays(0, "train")
    (out / "0/task-0/train_y.npy").write_text("text")
    with pytest.raises(DataError, match=line):
        ClientData(out / "0").arrays(0, "train")
    (out / "0/task-0/train_y.npy").write_bytes(b"\x93NUMPY\x01\x00garbage")
    with pytest.raises(DataError, match=r"train_y.npy cannot be read"):
        ClientData(out / "0").arrays(0, "train")


def test_a_global_test_set_of_another_problem_is_refused(tmp_path):
    out = write(tmp_path / "data")
    edit(out / "global-test/problem.json", num_classes=4, class_names=[])
    with pytest.raises(DataError, match="another problem"):
        ClientData(out / "0").global_test()


# --- what a participant brings


def image_folder(root: Path, mode: str = "L") -> Path:
    for task in range(2):
        for part, n in (("train", 2), ("test", 1)):
            for name in ("cat", "dog"):
                place = root / f"task-{task}" / part / name
                place.mkdir(parents=True)
                for j in range(n):
                    Image.new(mode, (4, 4), color=j).save(place / f"{j}.png")
    about = {"input_shape": [1 if mode == "L" else 3, 4, 4], "num_classes": 2}
    about |= {"scale": 255, "class_names": ["cat", "dog"]}
    (root / "client.json").write_text(json.dumps(about))
    return root


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_image_folders(tmp_path, mode):
    data = ClientData(image_folder(tmp_path, mode))
    data.check()
    assert data.num_tasks == 2
    assert data.tasks[0].train == (2, 2)
    assert json.loads(data.announcement())["tasks"][1] == {"train": [2, 2], "test": [1, 1]}
    x, y = data.arrays(1, "train")
    assert x.shape == (4, 1 if mode == "L" else 3, 4, 4)
    assert x[:, 0, 0, 0].tolist() == [0, 1, 0, 1]
    assert y.tolist() == [0, 0, 1, 1]
    assert data.global_test() is None


def test_wrong_image_folders(tmp_path):
    root = image_folder(tmp_path)
    (root / "task-0/train/bird").mkdir()
    with pytest.raises(DataError, match="bird names no class; known are cat, dog"):
        ClientData(root)
    (root / "task-0/train/bird").rmdir()
    (root / "task-0/train/cat/9.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"9.png cannot be read"):
        ClientData(root)
    Image.new("L", (5, 4)).save(root / "task-0/train/cat/9.png")
    with pytest.raises(DataError, match=r"9.png is 5 x 4, .*0.png is 4 x 4, .*: give all one size"):
        ClientData(root)
