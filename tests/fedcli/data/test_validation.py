"""What a client keeps of its training data for validation: never trained on, groups as wholes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedcli.data.cuts.partition import partition
from fedcli.data.sets.registry import load
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import export_partition, run_partition
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.partition_writer import Layout, write_partition
from fedcli.data.store.site import cut
from fedcli.data.store.stream import TaskStream
from fedcli.data.store.validation import Validation
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.origin import differences
from fedmodels.config.scenario import Dirichlet, Iid, Natural
from fedmodels.errors import DataError
from tests.conftest import tiny_experiment
from tests.fedcli.data.test_client_data import write

GROUPED = Validation(0.3, by_group=True)


def rows_of(examples: tuple[object, object]) -> list[bytes]:
    x, y = examples
    return [a.numpy().tobytes() + b.numpy().tobytes() for a, b in zip(x, y, strict=True)]  # type: ignore[attr-defined]


def test_the_last_examples_of_each_class_are_kept_and_never_trained_on(tmp_path):
    data = ClientData(write(tmp_path / "data", kind="iid", tasks=2) / "0")
    plain, stream = TaskStream(data), TaskStream(data, validation=Validation(0.4, False))
    for each in (plain, stream):
        each.open(1)
    everything, y = rows_of(plain.train(1)), plain.train(1)[1]
    kept, trained = stream.validation(1), rows_of(stream.train(1))
    assert kept is not None
    assert sorted(rows_of(kept) + trained) == sorted(everything)
    for k in y.unique():
        mine = [row for row, label in zip(everything, y, strict=True) if label == k]
        held = min(max(round(0.4 * len(mine)), 1), len(mine) - 1)
        assert [row for row in rows_of(kept) if row in mine] == mine[len(mine) - held :]
    assert plain.validation(1) is None
    with pytest.raises(DataError, match="before it was met"):
        TaskStream(data, validation=Validation(0.4, False)).validation(0)


def test_a_partition_is_the_same_whatever_clients_keep_of_it(digits):
    made = json.loads((digits / "0" / "client.json").read_text())["partition"]
    assert differences(tiny_experiment(), made) == []
    assert differences(tiny_experiment(data={"validation_share": 0.3}), made) == []


@pytest.fixture
def table(tmp_path: Path) -> Data:
    """Twelve groups of five rows; a row's first feature is its group."""
    lines = ["a,b,label,who"]
    lines += [f"{g},{i},{'xy'[i % 2]},g{g:02d}" for g in range(12) for i in range(5)]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    columns = Columns(label="label", group="who", test_share=0.25)
    return Data(name="table", root=str(tmp_path / "table.csv"), columns=columns, classes=("x", "y"))


def test_groups_stay_whole_however_the_data_lie(table, tmp_path):
    dataset = load(table)
    assert dataset.train.wholes is not None
    clients = 2
    made = partition(Iid(kind="iid"), dataset.train.y, dataset.test.y, 2, clients, 0)
    places = {layout: tmp_path / layout.value for layout in Layout}
    for layout, place in places.items():
        write_partition(place, dataset, made, {"data": {"name": "table"}}, layout=layout)
    places_found = [*places.values(), tmp_path / "exported"]
    export_partition(places[Layout.STORE], tmp_path / "exported")
    for client in range(clients):
        found = [open_data(place, client) for place in places_found]
        first = found[0].wholes(0)
        assert first is not None
        assert all(np.array_equal(first, other.wholes(0)) for other in found)
        check_groups(found[0], clients)


def check_groups(data: ClientData, clients: int) -> None:
    stream = TaskStream(data, validation=GROUPED)
    stream.open(0)
    x, kept = stream.train(0)[0], stream.validation(0)
    assert kept is not None
    trained, held = ({float(v) for v in part[:, 0]} for part in (x, kept[0]))
    assert trained
    assert held
    assert not trained & held


def test_a_sites_own_table_keeps_its_groups(table, tmp_path):
    tables = table.model_dump(mode="json", exclude_none=True, exclude={"root"})
    root = cut(Path(str(table.root)), tables, 0, 0, tmp_path / "cache")
    check_groups(open_data(root, 0), 1)


def test_a_cut_without_groups_is_told_of(tmp_path):
    data = ClientData(write(tmp_path / "data", kind="iid", tasks=1) / "0")
    stream = TaskStream(data, validation=GROUPED)
    stream.open(0)
    with pytest.raises(DataError, match="which group an example is of"):
        stream.train(0)
    np.save(data.directory / "task-0" / "train_group.npy", np.zeros(3, dtype=np.int64))
    with pytest.raises(DataError, match="a number of type int64 for each example"):
        stream.train(0)


@pytest.mark.parametrize("by_group", [False, True])
def test_training_data_with_other_counts_than_announced_are_not_stored(tmp_path, by_group):
    """A part that is stored stays, so that it would outlive the mended file."""
    data = ClientData(write(tmp_path / "data", kind="iid", tasks=2) / "0")
    kept, place = Validation(0.4, by_group), data.directory / "task-0"
    whole = {axis: np.load(place / f"train_{axis}.npy") for axis in "xy"}
    np.save(place / "train_group.npy", np.arange(len(whole["y"])) // 3)
    for axis, values in whole.items():
        np.save(place / f"train_{axis}.npy", values[:-4])
    with pytest.raises(DataError, match="does not hold the train counts"):
        kept.store(data, 0)
    assert not (place / kept.folder).exists()
    for axis, values in whole.items():
        np.save(place / f"train_{axis}.npy", values)
    kept.store(data, 0)
    chosen = kept.chosen(data, 0, whole["y"])
    assert np.array_equal(np.load(place / kept.folder / "y.npy"), whole["y"][chosen])


def numbered(tmp_path: Path, rows: int = 120, **columns: object) -> ClientData:
    """Return a site's data of rows that hold their number, in two sessions by turns."""
    labels = "x" * 30 + "y" * 30
    lines = [f"{i},{i},{labels[i // 2 % 60]},s{i % 2}" for i in range(rows)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,label,trial", *lines]))
    tables = {"name": "table", "columns": {"features": ["a"], **columns}}
    return open_data(cut(tmp_path / "rows.csv", tables, 0, 0, tmp_path / "own"), 0)


def opened(data: ClientData, gap: int = 0) -> tuple[list[set[int]], list[set[int]]]:
    """Return the numbers of the rows of each training and of each validation window."""
    stream = TaskStream(data, validation=Validation(0.25, False, gap))
    stream.open(0)
    held = stream.validation(0)
    assert held is not None
    mean, std = np.array(data.file.mean), np.array(data.file.std)  # one for all, or each channel
    return tuple(  # type: ignore[return-value]
        [{round(v) for v in (x.double().numpy() * std + mean).ravel()} for x in part]
        for part, _ in (stream.train(0), held)
    )


@pytest.mark.parametrize("session", [None, "trial"])
def test_no_window_shares_rows_with_one_that_is_kept(tmp_path, session):
    """Sessions take turns in the file: a step within one is two rows."""
    role = {} if session is None else {"session": session}
    data = numbered(tmp_path, label="label", window=4, hop=1, **role)
    trained, kept = opened(data)
    assert not set.union(*trained) & set.union(*kept)
    _, y = data.arrays(0, "train")
    near = len(y) - len(trained) - len(kept)
    assert near == 3 + 3  # before the part of each class


@pytest.fixture
def halves(tmp_path, monkeypatch):
    """Windows of UCI HAR's file that overlap by half: each number is that of its row."""
    rows = np.arange(64 * 31, dtype=np.float32)
    starts = np.arange(30) * 64
    x = np.stack([rows[at : at + 128] for at in starts] * 5)[:, :, None].repeat(6, 2)
    y = np.tile(np.arange(30) // 10, 5)
    subject = np.repeat(np.arange(5), 30)
    np.savez(
        tmp_path / "uci_har.npz", X=x, y=y, subject=subject, device=np.zeros_like(y),
        label_names=np.array(["sit", "stand", "walk"]), device_names=np.array(["phone"]),
    )  # fmt: skip
    monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path))
    return Data(name="uci-har", root=str(tmp_path), validation_share=0.25)


def test_ready_made_windows_that_overlap_are_kept_apart_too(halves, tmp_path):
    made = Natural(kind="natural")
    run_partition(halves, made, 2, 0, tmp_path / "cut", Console(quiet=True))
    trained, kept = opened(open_data(tmp_path / "cut", 0))
    assert not {v for rows in trained for v in rows} & {v for rows in kept for v in rows}
    assert (len(trained), len(kept)) == (5 * 3, 2 * 3), "8 of each class for training: one is near"


@pytest.mark.parametrize(
    ("scenario", "is_told"),
    [(Iid(kind="iid"), False), (Dirichlet(kind="dirichlet", alpha=1.0), True)],
)
def test_a_line_says_where_the_order_of_windows_is_lost(
    halves, scenario, is_told, tmp_path, caplog
):
    run_partition(halves, scenario, 2, 0, tmp_path / "cut", Console(quiet=True))
    assert ("share rows with some that are trained on" in caplog.text) == is_told


def test_a_gap_and_a_horizon_count_as_before_test_rows(tmp_path):
    data = numbered(tmp_path, label="label")
    trained, kept = opened(data, gap=5)
    assert min(abs(t - k) for t in set.union(*trained) for k in set.union(*kept)) == 6
    data = numbered(tmp_path, target="b", target_mean=[60.0], target_std=[30.0],
                    window=4, horizon=3)  # fmt: skip
    trained, kept = opened(data)
    assert min(set.union(*kept)) - max(set.union(*trained)) == 5  # a window of 4 lies between


def test_where_no_window_is_left_all_are_trained_on_and_a_line_says_so(tmp_path, caplog):
    data = numbered(tmp_path, rows=16, label="label", window=6, hop=1)
    trained, _ = opened(data)
    assert trained
    assert "each window of task 0 shares rows with one that is kept" in caplog.text


def test_a_class_of_which_no_window_is_left_is_named_once(tmp_path, caplog):
    """The few windows of y overlap each other, so that one for validation is near the others."""
    data = numbered(tmp_path, rows=76, label="label", window=6, hop=1)
    trained, _ = opened(data)
    assert trained
    opened(data)
    assert caplog.text.count("no window of y in task 0 is trained on") == 1


def test_a_partition_does_not_depend_on_the_share(table):
    assert table.model_copy(update={"validation_share": 0.5}).identity() == table.identity()
