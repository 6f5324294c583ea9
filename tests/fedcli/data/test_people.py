"""A person stays where they were put, across tasks, files and weeks; new ones get the same share.

The first column of an input is the number of its person, so that a test sees whose it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcli.data.cuts.held_out import Put, dealt_groups
from fedcli.data.sets.registry import load
from fedcli.data.store.commands import run_partition
from fedcli.data.store.growing import add_task
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.partition_writer import Layout
from fedcli.data.store.people import put_before
from fedcli.data.store.site import cut
from fedcli.data.store.stream import TaskStream
from fedcli.data.store.validation import Validation
from fedmodels.config.data import Data
from fedmodels.config.scenario import Natural
from fedmodels.errors import DataError

COLUMNS = {
    "label": "y", "client": "site", "group": "patient", "features": ["number", "temp"],
}  # fmt: skip


def rows(patients, *, of=4, month="01", empty=()):
    """Return lines of a table; of some patients and days the temperature is missing."""
    return [
        f"h,P{p:03},2026-{month}-{1 + at:02} {p:02}:00,{p},"
        + ("" if (p, at) in empty else f"{36 + int(month) / 7 + (p * 7 + at) / 99:.4f}")
        + f",{'ab'[at % 2]}"
        for p in patients
        for at in range(of)
    ]


def write(path, *parts):
    lines = [line for part in parts for line in part]
    path.write_text("site,patient,day,number,temp,y\n" + "\n".join(lines) + "\n")
    return path


def data_of(path, **more):
    columns = COLUMNS | more.pop("columns", {})
    return Data(name="table", root=str(path), columns=columns, **more)


class Here:
    """A client's data, made of a first file by partition, by a store, or by join."""

    def __init__(self, kind, place, first, **data):
        self.place, self.data = place, data_of(first, **data)
        self.root = place / "cut"
        if kind == "join":
            tables = self.data.model_dump(mode="json", exclude_defaults=True, exclude={"root"})
            self.root = cut(first, tables, 0, 0, self.root)
        else:
            layout = Layout.STORE if kind == "store" else Layout.DIRECTORIES
            run_partition(self.data, Natural(kind="natural"), 1, 0, self.root, layout=layout)

    def add(self, path, data=True, **more):
        return add_task(self.root, 0, path, self.data if data else None, **more)

    def of(self, task, part):
        x, _ = open_data(self.root, 0).arrays(task, part)
        return {int(n) for n in np.asarray(x)[:, 0].round()}

    def sizes(self, task):
        return tuple(len(open_data(self.root, 0).arrays(task, p)[1]) for p in ("train", "test"))


KINDS = ("directories", "store", "join")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_new_patients_of_a_grown_file_are_trained_on_by_the_same_share(kind, tmp_path):
    first, more, most = rows(range(40)), rows(range(40, 45)), rows(range(45, 55))
    here = Here(kind, tmp_path, write(tmp_path / "w1.csv", first))
    assert here.sizes(0) == (128, 32)
    found = here.add(write(tmp_path / "w2.csv", first, more))
    assert (found.examples, found.known) == ((16, 4), (160, 32))
    here.add(write(tmp_path / "w3.csv", first, more, most), data=False)  # as client.json says
    assert here.sizes(2) == (32, 8)
    for one in range(3):
        for other in range(3):
            assert not here.of(one, "train") & here.of(other, "test")


def test_a_patient_who_comes_again_stays_in_the_part_of_their_first_task(kind, tmp_path):
    here = Here(kind, tmp_path, write(tmp_path / "jan.csv", rows(range(10))))
    tested = here.of(0, "test")
    assert tested == {8, 9}
    here.add(write(tmp_path / "feb.csv", rows(range(5, 15), month="02", of=6)))
    assert here.of(1, "test") == {8, 9, 14}
    here.add(write(tmp_path / "mar.csv", rows([2, 14, 8], month="03", of=5)))
    assert (here.of(2, "train"), here.of(2, "test")) == ({2}, {8, 14})


def test_a_task_of_returning_patients_alone_may_have_nobody_to_test_on(tmp_path):
    here = Here("join", tmp_path, write(tmp_path / "jan.csv", rows(range(10))))
    here.add(write(tmp_path / "feb.csv", rows([1, 2], of=5, month="02")))
    assert here.sizes(1) == (10, 0)
    stream = TaskStream(open_data(here.root, 0))
    stream.open(1)
    assert len(stream.test(1)[1]) == 0
    with pytest.raises(DataError, match=r"nothing new to train on: all 5 .*'patient'.*testing"):
        here.add(write(tmp_path / "mar.csv", rows([9], of=5, month="03")))


@pytest.mark.parametrize("seed", [None, 3])
def test_of_one_new_patient_a_week_a_fifth_is_for_testing(seed, tmp_path):
    here = Here("join", tmp_path, write(tmp_path / "w.csv", rows(range(10))), test_seed=seed)
    for week in range(15):
        lines = rows([0, 1, 2, 3, 4], of=3, month=f"{2 + week % 9:02}"), rows([10 + week])
        here.add(write(tmp_path / f"{week}.csv", *lines), repeats="keep")
    known, unknown = put_before(open_data(here.root, 0))
    assert (len(known), sum(known.values()), unknown) == (25, 5, [])


def test_empty_cells_hold_the_mean_of_the_first_task(kind, tmp_path):
    """The mean over a grown file moves: rows of before were new, and new ones were not."""
    empty = {(0, 1), (3, 2), (9, 0)}
    first, more = rows(range(10), empty=empty), rows(range(50, 60), empty={(51, 1)})
    columns = {"missing": "mean"}
    here = Here(kind, tmp_path, write(tmp_path / "w1.csv", first), columns=columns)
    fill = open_data(here.root, 0).file.transform["fill"]
    found = here.add(write(tmp_path / "w2.csv", first, more))
    assert (found.known[0], sum(found.examples)) == (40, 40)
    assert open_data(here.root, 0).file.transform["fill"] == fill
    x = np.concatenate([open_data(here.root, 0).arrays(1, part)[0] for part in ("train", "test")])
    assert np.isclose(x[:, 1], fill[1]).sum() == 1


@pytest.mark.parametrize("kind", ["directories", "join"])
def test_months_keep_their_rows_where_patients_return(kind, tmp_path, caplog):
    """All patients of January come every month: their rows were January's, without a word."""
    months = [rows(range(10), of=3, month=f"{m:02}") for m in (1, 2, 3)]
    path = write(tmp_path / "all.csv", *months, rows(range(10, 15), month="03"))
    here = Here(kind, tmp_path, path, tasks="month", columns={"time": "day"})
    assert [sum(here.sizes(task)) for task in range(3)] == [30, 30, 50]
    assert [here.of(task, "test") for task in range(3)] == [{8, 9}, {8, 9}, {8, 9, 14}]
    assert "10 groups are in several tasks: each is for training in all of them, or" in caplog.text
    here.add(write(tmp_path / "april.csv", rows([8, 14, 3], month="04")))
    assert here.of(3, "test") == {8, 14}


def test_months_without_returning_groups_are_dealt_as_before():
    """Each month by itself, so that the digests of such data stay."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 4)
    tasks, labels = groups // 10, rng.integers(0, 3, 120)
    for drawn in (None, 1):
        whole = np.zeros(120, dtype=np.int64)
        made = [np.random.default_rng(5) if drawn else None for _ in range(2)]
        found = dealt_groups(whole, tasks, labels, groups, 0.2, made[0], None)
        for task in range(3):
            mine = tasks == task
            alone = dealt_groups(
                whole[mine], tasks[mine], labels[mine], groups[mine], 0.2, made[1], None
            )
            assert (found[mine] == alone).all()


def test_some_of_a_task_are_trained_on_where_all_are_new():
    """One new group that is owed for testing waits until others of its task are trained on."""
    one, put = np.zeros(4, dtype=np.int64), Put(np.array([-1]), groups=9, tested=0)
    assert not dealt_groups(one, one, one, one, 0.2, None, put).any()
    two, put = np.array([0, 0, 1, 1]), Put(np.array([0, -1]), groups=9, tested=0)
    assert dealt_groups(one, one, one, two, 0.2, None, put).tolist() == [False, False, True, True]


def test_data_of_an_earlier_version_tell_patients_by_their_rows(tmp_path, caplog):
    first = rows(range(10))
    here = Here("join", tmp_path, write(tmp_path / "w1.csv", first))
    (here.root / "0" / "task-0" / "people.npy").unlink()
    (here.root / "0" / "people.key").unlink()
    here.add(write(tmp_path / "w2.csv", first, rows(range(15), month="02", of=6)))
    assert here.of(1, "test") & {*range(10)} == {8, 9}
    assert "task 0 of the client do not say whose their examples are" in caplog.text


def test_who_is_kept_for_validation_stays_so(tmp_path):
    """Also where training data of before are gone, as an open run stores what is kept of them."""
    here = Here("join", tmp_path, write(tmp_path / "jan.csv", rows(range(20))))
    here.add(write(tmp_path / "feb.csv", rows(range(20), of=6, month="02"), rows(range(20, 25))))
    validation = Validation.of(data_of(tmp_path, validation_share=0.25))

    def kept():
        data = open_data(here.root, 0)
        chosen = validation.examples(data, 1)
        return {int(n) for n in chosen[0][:, 0]}

    data = open_data(here.root, 0)
    before = {int(n) for n in validation.examples(data, 0)[0][:, 0]}
    assert before == {12, 13, 14, 15}
    assert kept() & {*range(20)} == before
    validation.store(data, 0)
    for file in (here.root / "0" / "task-0").glob("train*"):
        file.unlink()
    assert kept() & {*range(20)} == before


def photo(path, shade):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), shade, dtype=np.uint8)).save(path)


@pytest.mark.parametrize("named", ["folder", "table"])
def test_photos_of_a_patient_stay_in_one_part(named, tmp_path):
    def shots(place, patients, day):
        lines = ["image,what,patient"]
        for p in patients:
            for n in range(2):
                name = f"{p}-{day}-{n}.png"
                photo(place / ("ill", "well")[n] / f"p{p:02}" / name, 10 * p + 2 * day + n)
                lines.append(f"{name},{('ill', 'well')[n]},p{p:02}")
        if named == "table":
            (place / "list.csv").write_text("\n".join(lines) + "\n")
        return place

    keys = {"group": "folder"}
    if named == "table":
        keys = {"columns": {"file": "image", "label": "what", "group": "patient"}}
    data = Data(name="directory", root=str(shots(tmp_path / "a", range(10), 0)), **keys)
    tables = data.model_dump(mode="json", exclude_defaults=True, exclude={"root"})
    root = cut(tmp_path / "a", tables, 0, 0, tmp_path / "cut")
    add_task(root, 0, shots(tmp_path / "b", range(5, 15), 1), data)

    def of(task, part):
        x, _ = open_data(root, 0).arrays(task, part)
        return {int(shade) // 10 for shade in x[:, 0, 0, 0]}

    assert (of(0, "test"), of(1, "test")) == ({8, 9}, {8, 9, 14})


def test_a_test_part_of_its_own_is_told_where_it_moves_patients(tmp_path, caplog):
    for part, patients in (("a", range(10)), ("b/train", (8, 2)), ("b/test", (9, 1))):
        for p in patients:
            for n, what in enumerate(("ill", "well")):
                shade = 10 * p + n + 2 * (part != "a")
                photo(tmp_path / part / what / f"p{p}" / f"{n}.png", shade)
    data = Data(name="directory", root=str(tmp_path / "a"), group="folder")
    tables = data.model_dump(mode="json", exclude_defaults=True, exclude={"root"})
    root = cut(tmp_path / "a", tables, 0, 0, tmp_path / "cut")
    add_task(root, 0, tmp_path / "b", data)
    assert "1 people are trained on here, and tested in earlier tasks" in caplog.text
    assert "1 people are tested here, and trained on in earlier tasks" in caplog.text


def test_the_table_of_people_holds_no_name(tmp_path):
    here = Here("join", tmp_path, write(tmp_path / "a.csv", rows(range(10))))
    held = open_data(here.root, 0)
    other = Here("store", tmp_path / "other", write(tmp_path / "b.csv", rows(range(10))))
    keys, others = ({*one.people(0)[:, 0].tolist()} for one in (held, open_data(other.root, 0)))
    assert len(keys) == 10
    assert not keys & others, "each site has a salt of its own"
    for path in Path(here.root).rglob("*"):
        if path.is_file():
            assert b"P003" not in path.read_bytes()
    assert "people" not in held.announcement()
    assert load(data_of(tmp_path / "a.csv")).whole_names[:2] == ("P000", "P001")
