"""A store holds what directories would hold, and what is wrong with one is a line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedcli.cli import main
from fedcli.data.cuts.partition import partition
from fedcli.data.store.client_data import PARTS, ClientData
from fedcli.data.store.commands import export_partition
from fedcli.data.store.findings import inspect
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.partition_store import PartitionStore
from fedcli.data.store.partition_writer import (
    MAX_DIRECTORIES,
    Layout,
    _write_inputs,
    write_partition,
)
from fedmodels.errors import ConfigError, DataError
from fedmodels.facts.resolution import experiment_of
from fedsrv.launch.given_data import check_given_data, check_net, name_of
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedcli.data.test_client_data import SCENARIOS, tiny_dataset

WINDOWS = {"kind": "natural", "tasks": 2}
KINDS = [
    {"kind": "iid", "tasks": 2},
    {"kind": "dirichlet_pooled", "alpha": 5.0, "tasks": [1, 2]},
    {"kind": "drawn", "examples": 40, "test_examples": 0},
    WINDOWS,
]


def write(out: Path, layout: Layout | None, table: dict[str, object], clients: int = 2) -> Path:
    dataset = tiny_dataset((16, 6), floats=True) if table == WINDOWS else tiny_dataset()
    scenario = SCENARIOS.validate_python(table)
    made = partition(scenario, dataset.train.y, dataset.test.y, 3, clients, 0, dataset.groups)
    if table == WINDOWS:
        made = replace(made, names=tuple(f"person {client}" for client in range(clients)))
    config = {"seed": 0, "clients": clients, "scenario": scenario.model_dump()}
    write_partition(out, dataset, made, config, layout=layout)
    return out


def files_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "store", Layout.STORE, KINDS[0])


@pytest.mark.parametrize("table", KINDS, ids=lambda table: table["kind"])
def test_an_exported_store_has_the_bytes_of_directories(tmp_path, table):
    stored = write(tmp_path / "store", Layout.STORE, table)
    directories = write(tmp_path / "directories", Layout.DIRECTORIES, table)
    assert export_partition(stored, tmp_path / "out") == 2
    assert files_of(tmp_path / "out") == files_of(directories)
    for client in range(2):
        ours, theirs = open_data(stored, client), ClientData(directories / str(client))
        assert ours.announcement() == theirs.announcement()
        named = f"person {client}" if table == WINDOWS else None
        assert json.loads(ours.announcement()).get("name") == named
        for task in range(theirs.num_tasks):
            for part in PARTS:
                for a, b in zip(ours.arrays(task, part), theirs.arrays(task, part), strict=True):
                    assert a.dtype == b.dtype
                    assert np.array_equal(a, b)


def test_inputs_are_stored_row_by_row_however_they_lie_in_memory(tmp_path):
    """A file that says otherwise of them would be read as others of the same shape."""
    x = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    _write_inputs(tmp_path / "x.npy", np.asfortranarray(x[:3]), np.asfortranarray(x[3:]))
    assert np.array_equal(np.load(tmp_path / "x.npy"), x)


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ('["only one"]', "does not hold a name for each client"),
        ("{", "is damaged"),
        ('["x", "' + "y" * 61 + '"]', "client 1: name"),
    ],
)
def test_names_that_do_not_fit_are_one_line(tmp_path, names, line):
    out = write(tmp_path / "store", Layout.STORE, WINDOWS)
    (out / "store" / "names.json").write_text(names)
    with pytest.raises(DataError, match=line):
        PartitionStore(out).client(1)


def test_many_clients_take_a_few_files(tmp_path):
    table = {"kind": "drawn", "examples": 4, "test_examples": 2}
    out = write(tmp_path / "many", None, table, clients=MAX_DIRECTORIES + 1)
    assert len(files_of(out)) == 10
    store = PartitionStore(out)
    assert len(store) == MAX_DIRECTORIES + 1
    assert len(store.client(MAX_DIRECTORIES).arrays(0, "train")[1]) == 4
    few = write(tmp_path / "few", None, KINDS[0])
    assert Layout.of(few) is Layout.DIRECTORIES


def test_a_run_has_the_same_digest_with_either_layout(tmp_path):
    from fedcli.data.store.commands import run_partition

    experiment = tiny_experiment()
    digests = set()
    for layout in Layout:
        data, quiet = tmp_path / layout / "data", Console(quiet=True)
        e = experiment
        parts = (e.data, e.scenario, e.schedule.clients, e.seed, data, quiet)
        run_partition(*parts, layout=layout)
        summary = run_in_process(experiment, data, tmp_path / layout / "run", evaluator=True)
        digests.add(summary["state_sha256"])
        assert inspect(data, quiet)
    assert len(digests) == 1


def test_launch_takes_a_store_for_data(tmp_path):
    own = {"net": {"name": "mlp"}, "method": {"name": "fedavg"}, "schedule": {"clients": 2}}
    stored = write(tmp_path / "store", Layout.STORE, {"kind": "iid"})
    check_given_data(experiment_of(own), stored)
    check_net(experiment_of(own), stored)
    assert name_of(experiment_of(own), stored) == "tiny"
    more = experiment_of({**own, "schedule": {"clients": 4}})
    with pytest.raises(ConfigError, match="has no data of client 2, 3, and the config has"):
        check_given_data(more, stored)


# --- what is wrong


def test_a_partition_of_the_other_layout_is_refused(store):
    write(store, None, KINDS[0])
    with pytest.raises(DataError, match="holds this partition with the layout 'store'"):
        write(store, Layout.DIRECTORIES, KINDS[0])


@pytest.mark.parametrize(
    ("name", "array", "line"),
    [
        ("x", np.zeros((3, 1, 4, 4), np.uint8), r"y.npy: labels are int64 \[90\]; expected"),
        ("y", np.full(90, 7), "labels go from 7 to 7; expected 0 to 2"),
        ("indices", np.full(90, 90), "indices.npy names examples that are not in y.npy"),
        ("indices", np.arange(90, dtype=np.int32), "indices, starts and pairs are no store's"),
        ("starts", np.array([[0, 5, 3], [3, 4, 90]] * 2), "starts.npy does not fit indices.npy"),
        ("starts", np.array([[0, 5, 9]]), "pairs.npy does not fit starts.npy"),
        ("pairs", np.array([0]), "pairs.npy does not fit starts.npy"),
    ],
)
def test_a_damaged_store_is_one_line(store, name, array, line):
    np.save(store / "store" / f"{name}.npy", array)
    with pytest.raises(DataError, match=line) as caught:
        PartitionStore(store)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("moments", "line"),
    [
        (np.ones((1, 2, 6)), "moments.npy does not fit pairs.npy"),
        (np.ones((3, 2, 6)), "moments.npy does not fit pairs.npy"),
        (np.ones((2, 3, 6)), "moments.npy does not fit pairs.npy"),
        (np.ones(24), "moments.npy does not fit pairs.npy"),
        (np.ones((2, 2, 6), dtype=np.str_), "moments.npy does not fit pairs.npy"),
        (np.ones((2, 2, 4)), r"moments.npy: client 1: .*mean must hold 1 or 6 numbers"),
        (np.full((2, 2, 6), np.nan), r"moments.npy: client 1: mean.*finite number"),
        (-np.ones((2, 2, 6)), r"moments.npy: client 1: std.*greater than 0"),
    ],
)
def test_damaged_moments_are_one_line(tmp_path, moments, line):
    stored = write(tmp_path / "windows", Layout.STORE, WINDOWS)
    np.save(stored / "store" / "moments.npy", moments)
    with pytest.raises(DataError, match=line) as caught:
        open_data(stored, 1)
    assert "\n" not in str(caught.value)


def test_a_client_that_the_store_lacks_is_one_line(store, tmp_path):
    for client in (-1, 2):
        with pytest.raises(DataError, match=f"holds no client {client}: it has 0 to 1"):
            open_data(store, client)
    with pytest.raises(DataError, match="is not there: it should be this client's data"):
        open_data(tmp_path / "nowhere", 0)
    (store / "store" / "pairs.npy").unlink()
    with pytest.raises(DataError, match=r"pairs\.npy is missing"):
        open_data(store, 0)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["{there}", "--out", "{store}"], "holds no store: its clients have directories already"),
        (["{store}", "--out", "{there}"], "holds something: choose another directory"),
        (["{store}", "--out", "{new}", "--client-id", "1-2"], "holds no client 2: it has 0 to 1"),
        (["{store}", "--out", "{new}", "--client-id", "evaluator"], "has no directory"),
        (["{store}", "--out", "{new}", "--client-id", "x"], "--client-id 'x' is no id"),
    ],
)
def test_a_wrong_export_is_one_line(store, tmp_path, capsys, arguments, line):
    there = write(tmp_path / "there", Layout.DIRECTORIES, KINDS[0])
    places = {"store": store, "there": there, "new": tmp_path / "new"}
    with pytest.raises(SystemExit) as ended:
        main(["export-partition", *(word.format(**places) for word in arguments)])
    said = capsys.readouterr().err
    assert ended.value.code
    assert said.count("\n") == 1
    assert line in said
    assert not (tmp_path / "new").exists()


def test_one_client_can_be_exported(store, tmp_path):
    with pytest.raises(SystemExit):
        main(["export-partition", str(store), "--out", str(tmp_path / "one"), "--client-id", "1"])
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == [
        "1",
        "global-test",
        "partition.json",
    ]
    shutil.rmtree(store)  # nothing of the store is needed any more
    ClientData(tmp_path / "one" / "1").check()
    assert json.loads((tmp_path / "one" / "1" / "client.json").read_text())["dataset"] == "tiny"
