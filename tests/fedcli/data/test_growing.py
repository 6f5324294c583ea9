"""Tasks that are added to a client's data: whole or not at all, by names of classes, once."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fedcli.data.store.client_data import ClientData, Part
from fedcli.data.store.dropping import drop_task
from fedcli.data.store.findings import inspect
from fedcli.data.store.growing import Added, add_task
from fedcli.data.store.known_rows import KnownRows
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.own_files import cut_before, remembered
from fedcli.data.store.partition_store import PartitionStore, StoredClient
from fedcli.data.store.partition_writer import Layout
from fedcli.data.store.site import cut
from fedcli.data.store.stream import TaskStream
from fedcli.data.store.validation import Validation
from fedmodels.errors import ArchiveNotWritten, DataError
from fedmodels.facts.run_classes import ClassChange, RunClasses
from tests.fedcli.data import test_partition_store as stores
from tests.fedcli.data.test_own_data import own
from tests.fedcli.data.test_site import TABLE, recording

STEPS = ((os, "mkdir"), (os, "rename"), (os, "replace"), (np, "save"))
ENDS = ((os, "unlink"), (os, "rmdir"), (shutil, "rmtree"))


PHOTOS = {"name": "directory", "classes": ["cat", "dog", "fox"], "channels": "grey"}


BESIDE = (".adding.lock", "rows.db", "rows.db-journal")


class Killed(BaseException):
    """Nothing is done after it: the process is dead."""


class Death:
    """Kills at the step of a number, before it is done, and refuses all that would follow."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.left, self.is_dead = at, False
        for place, name in STEPS:
            patch.setattr(place, name, self._counted(getattr(place, name)))
        for place, name in ENDS:
            patch.setattr(place, name, self._refused(getattr(place, name)))

    def _counted(self, done: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **named: Any) -> Any:
            self.left -= 1
            if self.is_dead or self.left < 0:
                self.is_dead = True
                raise Killed
            return done(*args, **named)

        return step

    def _refused(self, done: Callable[..., Any]) -> Callable[..., Any]:
        def end(*args: Any, **named: Any) -> Any:
            if self.is_dead:
                raise Killed
            return done(*args, **named)

        return end


def arrays(
    root: Path, labels: str, dtype: Any = np.uint8, shape: tuple[int, ...] = (1, 4, 4)
) -> Path:
    """Write arrays as a source; ``"0 0 1"`` gives labels, for training and for testing."""
    root.mkdir(parents=True)
    y = np.array(labels.split(), dtype=np.int64)
    for number, part in enumerate(("train", "test")):
        x = np.arange(y.size * np.prod(shape)).reshape(-1, *shape) % 251 + number
        x[..., 0] = crc32(repr((root, part)).encode()) % 251
        np.save(root / f"{part}_x.npy", x.astype(dtype))
        np.save(root / f"{part}_y.npy", y)
    return root


def images(root: Path, *classes: str, count: int = 2) -> Path:
    for part in ("train", "test"):
        for shade, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("L", (4, 4), 50 * shade + number)
                signed(image, root, part).save(root / part / name / f"{number}.png")
    return root


def signed(image: Image.Image, *marks: object) -> Image.Image:
    """Give an image a corner of its own, so that no other one has the same content."""
    for place, byte in enumerate(crc32(repr(marks).encode()).to_bytes(4, "big")):
        image.putpixel((place, 0), byte)
    return image


def shots(root: Path, *classes: str) -> Path:
    """Write photos by class, without a part for testing."""
    for shade, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(5):
            image = Image.new("L", (4, 4), 50 * shade + number)
            signed(image, root).save(root / name / f"{number}.png")
    return root


def content(place: Path) -> dict[str, bytes]:
    """Return the files of a client but those beside its tasks."""
    found = (path for path in place.rglob("*") if path.is_file() and path.name not in BESIDE)
    return {str(path.relative_to(place)): path.read_bytes() for path in found}


@pytest.fixture(params=["counted", "uncounted", "store"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The data of client 1 in two layouts; also without counts in client.json."""
    if request.param == "store":
        return stores.write(tmp_path / "data", Layout.STORE, stores.KINDS[0])
    own(tmp_path / "data", 1, scale=255.0, class_names=["a", "b"])
    if request.param == "counted":
        data = ClientData(tmp_path / "data" / "1")
        (data.directory / "client.json").write_text(data.file.text())
    return tmp_path / "data"


def test_a_kill_at_any_step_leaves_the_old_data_or_the_new(held, tmp_path, monkeypatch):
    """What a killed process leaves is cleaned by the next one, and nothing is added twice."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(secrets, "token_bytes", lambda size: b"k" * size)
    source, old = arrays(tmp_path / "month", "0 1 3"), open_data(held, 1).announcement()
    saved = tmp_path / "saved"
    shutil.copytree(held, saved)
    add_task(held, 1, source)
    new, want = open_data(held, 1).announcement(), content(held / "1")
    states, step, killed = set[str](), 0, True
    while killed:
        shutil.rmtree(held)
        shutil.copytree(saved, held)
        with monkeypatch.context() as patch:
            death = Death(patch, step)
            with suppress(Killed):
                add_task(held, 1, source)
            killed = death.is_dead
        data = open_data(held, 1)
        data.check()
        states.add(data.announcement())
        assert data.announcement() in (old, new), step
        assert add_task(held, 1, source).task == data.num_tasks - (data.announcement() == new), step
        assert content(held / "1") == want, step
        step += 1
    assert states == {old, new}
    assert step > 6


def test_a_task_is_added_behind_the_others(held, tmp_path):
    before = open_data(held, 1)
    source = arrays(tmp_path / "month", "0 1 1 7")
    added = add_task(held, 1, source)
    after, known = open_data(held, 1), before.file.num_classes
    assert added == Added(before.num_tasks, (4, 4), ("7",))
    assert str(added) == (
        f"it is task {before.num_tasks}: 4 examples to train on, 4 to test on, with the new class 7"
    )
    assert after.file.class_names == (*before.file.class_names, "7")
    assert after.tasks[-1].train == (1, 2, *[0] * (known - 2), 1)
    for old, new in zip(before.tasks, after.tasks, strict=False):
        assert new.train == (*old.train, 0)
        assert new.test == (*old.test, 0)
    for key in ("scale", "mean", "std", "input_shape", "partition", "transform", "name"):
        assert getattr(after.file, key) == getattr(before.file, key), key
    x, y = after.arrays(added.task, "train")
    assert np.array_equal(x, np.load(source / "train_x.npy"))
    assert y.tolist() == [0, 1, 1, known]
    for task in range(before.num_tasks):
        assert np.array_equal(before.arrays(task, "test")[0], after.arrays(task, "test")[0])
    assert after.states_counts
    again = add_task(held, 1, source)
    assert (again.task, again.was_there) == (added.task, True)
    assert str(again) == f"it is task {added.task} already"
    (tmp_path / "later").mkdir()
    other = source.rename(tmp_path / "later" / "other")
    assert add_task(held, 1, other) == again
    assert add_task(held, 1, other, repeats="keep").task == added.task + 1


def test_a_client_of_a_store_has_its_added_tasks_in_its_own_directory(tmp_path):
    root = stores.write(tmp_path / "data", Layout.STORE, stores.KINDS[0])
    add_task(root, 1, arrays(tmp_path / "month", "0 2"))
    assert not (root / "1" / "task-0").exists()
    grown, other = open_data(root, 1), open_data(root, 0)
    assert isinstance(grown, StoredClient)
    assert (grown.num_tasks, other.num_tasks) == (3, 2)
    own(
        root, 2, num_classes=3, class_names=[*"abc"]
    )  # a client that came later, and has a directory alone
    assert not isinstance(open_data(root, 2), StoredClient)
    console = Console(record=True, width=200)
    assert inspect(root, console), console.export_text()
    about = json.loads((root / "1" / "client.json").read_text())
    about["tasks"][0]["train"][0] += 1
    (root / "1" / "client.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=r"client\.json does not continue .*store: remove it"):
        PartitionStore(root).client(1)


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (lambda at: at, "is not there"),
        (lambda at: arrays(at, "0", shape=(1, 5, 5)), r"inputs have the shape \[1, 5, 5\], and"),
        (lambda at: arrays(at, "0", np.float32), "inputs are float32, and those of .* uint8"),
        (lambda at: arrays(at, "-1"), "negative label"),
        (lambda at: images(at, "0", count=0), "0 is empty: a class needs images"),
        (lambda at: at.mkdir() or at, "holds no data"),
        (lambda at: at.write_bytes(b"\x00") and at, "is no directory"),
    ],
)
def test_what_cannot_be_a_task_is_a_line_and_changes_nothing(tmp_path, made, line):
    own(tmp_path / "data", 1)
    before = content(tmp_path / "data")
    with pytest.raises(DataError, match=line) as found:
        add_task(tmp_path / "data", 1, made(tmp_path / "month"))
    assert "\n" not in str(found.value)
    assert content(tmp_path / "data" / "1") == {
        name.removeprefix("1/"): data for name, data in before.items()
    }


def test_a_task_that_somebody_put_there_is_not_removed(tmp_path):
    add_task(root := own(tmp_path / "data", 1).parent, 1, arrays(tmp_path / "a", "0 1"))
    arrays(root / "1" / "task-2", "0 1")
    with pytest.raises(DataError, match=r"task-2 is there, and .*client\.json does not count it"):
        add_task(root, 1, arrays(tmp_path / "b", "0 1"))
    assert (root / "1" / "task-2" / "train_x.npy").exists()


def test_a_full_disk_is_a_line_of_its_own(tmp_path, monkeypatch):
    root = own(tmp_path / "data", 1).parent

    def full(*args: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ArchiveNotWritten, match="the task is not added: No space left on device"):
        add_task(root, 1, images(tmp_path / "a", "0"))
    assert open_data(root, 1).num_tasks == 1


# --- classes


def test_folders_of_classes_go_by_name_or_number(tmp_path):
    root = own(tmp_path / "data", 1, class_names=["cat", "dog"]).parent
    assert add_task(root, 1, images(tmp_path / "a", "dog", "fox", "0")).new_classes == ("fox",)
    data = open_data(root, 1)
    assert data.file.class_names == ("cat", "dog", "fox")
    assert data.tasks[1].train == (2, 2, 2)


def test_a_client_without_names_gets_none_while_numbers_do(tmp_path):
    root = own(tmp_path / "data", 1).parent
    add_task(root, 1, arrays(tmp_path / "a", "0 2"))
    assert open_data(root, 1).file.class_names == ()
    add_task(root, 1, images(tmp_path / "b", "fox", "2"))
    data = open_data(root, 1)
    assert data.file.class_names == ("0", "1", "2", "fox")
    assert data.tasks[2].test == (0, 0, 2, 2)


def test_labels_and_counts_come_in_the_order_of_the_run(tmp_path):
    root = own(tmp_path / "data", 1, class_names=["a", "b"]).parent
    add_task(root, 1, images(tmp_path / "m", "fox", "b"))
    add_task(root, 1, images(tmp_path / "n", "elk"))
    data = open_data(root, 1)
    assert data.arrays(1, "train")[1].tolist() == [1, 1, 2, 2]
    data.order_by(RunClasses(("a", "b"), ("cow", "fox")))
    assert data.arrays(1, "train")[1].tolist() == [1, 1, 3, 3]
    assert data.counts(1, "train") == [0, 2, 0, 2]
    assert data.counts(0, "test") == [4, 4, 0, 0]
    stream = TaskStream(data)
    stream.open(2)
    line = r"task 2 \(train\) has examples of the class 'elk', which the run does not know yet"
    for ask in (lambda: stream.train(2), lambda: data.counts(2, "train")):
        with pytest.raises(DataError, match=line):
            ask()
    data.order_by(RunClasses(("a", "b"), ("elk", "cow", "fox")))
    assert stream.train(2)[1].tolist() == [2, 2]
    renamed = [ClassChange("elk", "moose"), ClassChange("a", "elf")]
    data.order_by(RunClasses(("a", "b"), ("elk", "cow", "fox")).grown((), renamed))
    assert stream.train(2)[1].tolist() == [2, 2]
    assert data.counts(0, "test") == [4, 4, 0, 0, 0]
    data.order_by(RunClasses(("no", "yes")))  # a number, and no other name, stands for the label
    with pytest.raises(DataError, match="class 'a'"):
        data.arrays(0, "train")
    unnamed = ClientData(own(tmp_path / "data", 2))
    unnamed.order_by(RunClasses(("no", "yes"), ("maybe",)))
    assert unnamed.counts(0, "train") == [12, 12, 0]
    assert unnamed.arrays(0, "train")[1].tolist() == [0, 1] * 12


# --- files as people have them


def test_a_sites_files_are_cut_as_its_first_ones(tmp_path):
    """By what the run said, kept beside them; or by what client.json says of the columns."""
    pytest.importorskip("pandas")
    cache = tmp_path / "own-data"
    root = cut(recording(tmp_path / "jan.csv", "walk sit"), TABLE, 3, 0, cache)
    data, seed = remembered(root) or (None, -1)
    assert data is not None
    assert (data.classes, seed) == (("sit", "walk", "run"), 3)
    moments = open_data(root, 0).file.mean
    assert add_task(root, 0, recording(tmp_path / "feb.csv", "run jump run"), data, seed).task == 1
    added = add_task(root, 0, recording(tmp_path / "mar.csv", "hop walk"))
    held = open_data(root, 0)
    assert added.new_classes == ("hop",)
    assert held.file.class_names == ("sit", "walk", "run", "jump", "hop")
    assert [task.train for task in held.tasks] == [
        (4, 4, 0, 0, 0), (0, 0, 8, 4, 0), (0, 4, 0, 0, 4),
    ]  # fmt: skip
    assert held.file.mean == moments
    held.check()


def test_groups_stay_whole_in_the_validation_part_of_an_added_task(tmp_path):
    """Added tasks had no file of groups, so that no order on them could be done."""
    pytest.importorskip("pandas")

    def sessions(name: str) -> Path:
        rows = [f"{i + len(name)},sit,{i // 8}\n" for i in range(40)]
        (tmp_path / name).write_text("ax,activity,day\n" + "".join(rows))
        return tmp_path / name

    table = {**TABLE, "validation_share": 0.25, "columns": {**TABLE["columns"], "group": "day"}}
    root = cut(sessions("jan.csv"), table, 0, 0, tmp_path / "own-data")
    add_task(root, 0, sessions("february.csv"), *(remembered(root) or ()))
    how = remembered(root)
    assert how is not None
    stream = TaskStream(open_data(root, 0), validation=Validation.of(how[0]))
    kept = []
    for task in range(2):
        stream.open(task)
        found = stream.validation(task)
        assert found is not None
        kept.append((len(stream.train(task)[1]), len(found[1])))
    assert kept == [(6, 2), (6, 2)]
    for path in (root / "0" / "task-0").glob("train*"):
        path.unlink()
    again = TaskStream(open_data(root, 0), validation=Validation.of(how[0]))
    again.open(1)
    assert again.validation(0) is None
    assert again.validation(1) is not None


def test_photos_are_cut_as_the_first_ones(tmp_path):
    root = cut(shots(tmp_path / "p", "fox", "cat"), PHOTOS, 0, 1, tmp_path / "own-data")
    for number, how in enumerate((remembered(root), None)):
        added = add_task(root, 1, shots(tmp_path / f"q{number}", "dog", "owl"), *(how or ()))
        assert added.examples == (8, 2)
    data = open_data(root, 1)
    assert data.file.class_names == ("cat", "dog", "fox", "owl")
    assert data.tasks[2].train == (0, 4, 0, 4)


def test_a_site_goes_on_with_what_was_cut_once_it_has_grown_or_its_files_are_gone(tmp_path):
    cache, files = tmp_path / "own-data", shots(tmp_path / "p", "fox", "cat")
    root = cut(files, PHOTOS, 0, 1, cache)
    files.rename(tmp_path / "away")
    assert cut(files, PHOTOS, 0, 1, cache) == root == cut_before(cache, 1)
    with pytest.raises(DataError, match="not there"):
        cut(files, {**PHOTOS, "test_share": 0.5}, 0, 1, cache)
    shots(files, "fox")
    other = cut(files, PHOTOS, 0, 1, cache)
    assert other != root
    add_task(root, 1, shots(tmp_path / "q", "dog"))
    assert cut(files, PHOTOS, 0, 1, cache) == root == cut_before(cache, 1)
    assert cut(files, PHOTOS, 0, 2, cache) not in (root, other)


def test_without_a_word_of_how_files_are_cut_the_server_is_named(tmp_path):
    root, place = tmp_path / "data", tmp_path / "data" / "1" / "task-0"
    arrays(place, "0 1", np.float32, (6,))
    (root / "1" / "client.json").write_text(json.dumps({"input_shape": [6], "num_classes": 2}))
    with pytest.raises(DataError, match=r"does not say how files are cut: name the --server of"):
        add_task(root, 1, recording(tmp_path / "feb.csv", "run"))


# --- data that are gone


@pytest.mark.parametrize("kind", ["arrays", "images"])
def test_training_data_of_earlier_tasks_may_be_deleted(tmp_path, kind):
    root = own(tmp_path / "data", 1).parent
    add_task(root, 1, arrays(tmp_path / "a", "0 1"))
    if kind == "images":
        shutil.rmtree(root / "1" / "task-0")
        images(root / "1" / "task-0", "0", "1")
        about = json.loads((root / "1" / "client.json").read_text())
        about["tasks"][0] = {"train": [2, 2], "test": [2, 2]}
        (root / "1" / "client.json").write_text(json.dumps(about))
    announced = open_data(root, 1).announcement()
    for path in [*(root / "1" / "task-0").glob("train*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    data = open_data(root, 1)
    assert data.announcement() == announced
    data.check()
    stream = TaskStream(data)
    stream.open(1)
    assert len(stream.train(1)[1]) == 2
    assert len(stream.test(0)[1]) == (4 if kind == "images" else 8)
    console = Console(record=True, width=200)
    assert inspect(root, console)
    line = (
        "note: client 1: the training data of task 0 were deleted; that is well where its run has"
    )
    assert line in console.export_text()
    shutil.rmtree(root / "1" / "task-1")
    assert not inspect(root, console)  # those of the last task are missed


def test_the_scale_follows_from_what_is_left(tmp_path):
    place = own(tmp_path / "data", 1)
    data = ClientData(place)
    about = json.loads(data.file.text("scale", "mean", "std"))
    (place / "client.json").write_text(json.dumps(about))
    (place / "task-0" / "train_x.npy").unlink()
    assert ClientData(place).file.scale == 255


def exports(tmp_path: Path, **data: Any) -> tuple[Path, Callable[..., Added]]:
    """Return the data of a site that exports January; and what adds January and February to it."""
    table = "a,b,label\n" + "".join(f"{i},{i % 7},{'xy'[i % 2]}\n" for i in range(40))
    (tmp_path / "jan.csv").write_text(table)
    grown = table + "".join(f"{i}.5,{i % 7},{'xy'[i % 2]}\n" for i in range(20))
    (tmp_path / "jan_feb.csv").write_text(grown)
    columns = {"label": "label", "features": ["a", "b"]}
    facts = {"name": "table", "columns": columns, **data}
    place = cut(tmp_path / "jan.csv", facts, 0, 0, tmp_path / "c")

    def add(**options: Any) -> Added:
        how = remembered(place) or ()
        return add_task(place, 0, tmp_path / "jan_feb.csv", *how, **options)

    return place, add


def rows_of(root: Path, task: int, part: Part) -> set[bytes]:
    return {x.tobytes() for x in open_data(root, 0).arrays(task, part)[0]}


def test_examples_of_earlier_tasks_are_left_out_and_the_rest_is_split_anew(tmp_path):
    """January and February: the 40 of January go, of which 8 are tests; 16 and 4 are left."""
    place, add = exports(tmp_path)
    for path in (place / "0" / "task-0").glob("test*"):
        shutil.copy(path, tmp_path)
    added = add()
    assert (added.known, added.examples, added.keeps) == ((40, 8), (16, 4), False)
    assert str(added).endswith(
        "; 40 that are in earlier tasks already, 8 of them as test examples are left out"
    )
    before = rows_of(place, 0, "train") | rows_of(place, 0, "test")
    assert not before & (rows_of(place, 1, "train") | rows_of(place, 1, "test"))
    assert open_data(place, 0).tasks[1].again == 40
    (tmp_path / "jan_feb.csv").rename(tmp_path / "other.csv")
    assert add_task(place, 0, tmp_path / "other.csv", *(remembered(place) or ())).was_there
    (tmp_path / "jan.csv").write_text((tmp_path / "other.csv").read_text() + "\n")
    for path in (place / "0").glob("task-*/train*"):
        path.unlink()  # what was learned may be deleted, and stays known
    with pytest.raises(DataError, match="nothing new to train on: 60 of its 60 examples are"):
        add_task(place, 0, tmp_path / "jan.csv", *(remembered(place) or ()))


def test_repeated_examples_are_refused_or_kept_as_the_config_says(tmp_path):
    place, add = exports(tmp_path, repeats="refuse")
    with pytest.raises(DataError, match="40 of its 60 examples are in earlier tasks already"):
        add()
    added = add(repeats="keep")
    assert (added.examples, added.keeps) == ((48, 12), True)
    assert rows_of(place, 0, "test") & rows_of(place, 1, "train")
    assert str(added).endswith("as test examples are kept")


def test_rows_of_a_task_that_was_set_aside_are_not_known(tmp_path):
    place, add = exports(tmp_path)
    drop_task(place, 0, 0, "a loose sensor")
    assert add().examples == (48, 12)
    console = Console(record=True, width=200)
    assert inspect(place / "0", console)
    said = console.export_text()
    assert "task 0 is set aside: a loose sensor; an open run passes it over" in said
    assert "in earlier tasks already" not in said


def test_sessions_stay_with_their_examples_where_the_parts_are_chosen_anew(tmp_path):
    """The new rows are of the sessions 4 and 5; 16 of 20 are for training."""
    rows = [f"{i},{i % 7},{i // 10},{'xy'[i % 2]}\n" for i in range(60)]
    for name, count in (("jan", 40), ("jan_feb", 60)):
        (tmp_path / f"{name}.csv").write_text("a,b,s,label\n" + "".join(rows[:count]))
    columns = {"label": "label", "features": ["a", "b"], "session": "s"}
    facts = {"name": "table", "columns": columns}
    place = cut(tmp_path / "jan.csv", facts, 0, 0, tmp_path / "c")
    add_task(place, 0, tmp_path / "jan_feb.csv", *(remembered(place) or ()))
    stream = TaskStream(open_data(place, 0))
    stream.open(1)
    sessions = stream.sessions(1)
    assert sessions is not None
    assert sessions.tolist() == [0] * 10 + [1] * 6


def test_a_class_of_rows_that_are_left_out_alone_does_not_come(tmp_path):
    """January's rows come again with another label; that of February is known."""
    place, add = exports(tmp_path)
    rows = (tmp_path / "jan_feb.csv").read_text().splitlines(keepends=True)
    again = [line.replace(",x", ",z") for line in rows[1:41]]
    (tmp_path / "jan_feb.csv").write_text("".join([rows[0], *again, *rows[41:]]))
    added = add()
    assert (added.known, added.examples, added.new_classes) == ((40, 8), (16, 4), ())
    assert open_data(place, 0).file.class_names == ("x", "y")


def test_rows_that_a_lost_file_knew_alone_are_told_of(tmp_path, caplog):
    """The training data of task 0 were deleted, and then ``rows.db``; or it is damaged."""
    place, add = exports(tmp_path)
    known = place / "0" / "rows.db"
    for path in (place / "0").glob("task-0/train*"):
        path.unlink()
    assert add().known == (8, 8)
    (line,) = caplog.messages
    assert line.endswith("/0: data of task 0 cannot be read: which of their rows come again is "
                         "not known")  # fmt: skip
    known.write_bytes(b"no database" * 99)
    with pytest.raises(DataError, match="delete it to rebuild it from the tasks whose data"):
        add(repeats="keep")
    known.unlink()
    known.mkdir()
    with pytest.raises(ArchiveNotWritten, match=r"rows\.db cannot be used: unable to open"):
        add(repeats="keep")


def test_a_task_that_is_there_is_added_though_its_rows_cannot_be_noted(tmp_path, monkeypatch):
    _, add = exports(tmp_path)
    take = KnownRows._take

    def full(rows: KnownRows, task: int) -> bool:
        if task:
            raise sqlite3.OperationalError("database or disk is full")
        return take(rows, task)

    monkeypatch.setattr(KnownRows, "_take", full)
    assert add().task == 1
    monkeypatch.undo()
    assert add().was_there


def test_few_kinds_of_rows_say_nothing_of_what_was_there(tmp_path):
    """Four kinds of rows: all of February would be taken for January."""
    rows = "".join(f"{i % 2},{i // 2 % 2},{'xy'[i % 2]}\n" for i in range(40))
    for name in ("jan", "feb"):
        (tmp_path / f"{name}.csv").write_text("a,b,label\n" + rows + ("0,0,x\n" * (name == "feb")))
    facts = {"name": "table", "columns": {"label": "label", "features": ["a", "b"]}}
    place = cut(tmp_path / "jan.csv", facts, 0, 0, tmp_path / "c")
    added = add_task(place, 0, tmp_path / "feb.csv", *(remembered(place) or ()))
    assert added.examples == (33, 8)
    assert str(added).endswith("kept: 90% of its rows are there twice, so equal rows may be "
                               "different ones")  # fmt: skip


def test_what_arrives_is_checked_as_what_is_there(tmp_path):
    """The numbers of a sensor that broke: -99 stands for what is missing."""
    place, _ = exports(tmp_path)
    broken = "".join(f"{i}.25,{-99 if i > 36 else i % 7},{'xy'[i % 2]}\n" for i in range(40))
    (tmp_path / "mar.csv").write_text("a,b,label\n" + broken)
    how = remembered(place) or ()
    with pytest.raises(DataError, match="--strict: column b holds -99 in 3 of 40 places"):
        add_task(place, 0, tmp_path / "mar.csv", *how, strict=True)
    (note,) = add_task(place, 0, tmp_path / "mar.csv", *how).notes
    assert note.startswith("column b holds -99 in 3 of 40 places")


def test_a_damaged_file_of_known_rows_is_a_line(tmp_path):
    place, add = exports(tmp_path)
    (place / "0" / "rows.db").write_bytes(b"no database" * 99)
    with pytest.raises(DataError, match=r"rows\.db cannot be used .*: delete it to rebuild it"):
        add()
    (place / "0" / "rows.db").unlink()
    assert add().known == (40, 8)
