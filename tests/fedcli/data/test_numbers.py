"""Numbers on their way from a file to float32: nothing is narrowed before it is normalised."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from fedcli.data.arrays import narrowed
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedcli.data.store.commands import run_partition
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.partition_writer import Layout
from fedcli.data.store.stream import TaskStream, global_test_tensors
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.scenario import Iid, Natural
from fedmodels.nets import make_net
from fedmodels.nets.trained import ModelFacts, TrainedModel
from fedmodels.numerics.randomness import seeded
from fedsrv.trained.export import export
from tests.fedcli.data.new_files import read_new

pandas = pytest.importorskip("pandas")
N = 40
TIMES = 1.7e9 + 0.02 * np.arange(N)
"""Seconds since 1970 at 50 Hz; float32 knows every 128th number there."""
QUIET = Console(quiet=True)


def recording(path: Path) -> Data:
    """Write a table whose column ``t`` is of times, of two people."""
    rows = [f"{t:.2f},{'ws'[i % 2]},{'ab'[i % 4 // 2]}\n" for i, t in enumerate(TIMES)]
    path.write_text("t,label,who\n" + "".join(rows))
    return Data(name="table", root=str(path), columns=Columns(client="who"))


def as_table(root: Path) -> Dataset:
    return load(recording(root / "r.csv"))


def as_arrays(root: Path) -> Dataset:
    for part in ("train", "test"):
        np.save(root / f"{part}_x.npy", TIMES[:, None])
        np.save(root / f"{part}_y.npy", np.arange(N) % 2)
    return load(Data(name="directory", root=str(root)))


def as_function(root: Path) -> Dataset:
    (root / "mine.py").write_text(
        f"part = [([1.7e9 + 0.02 * i], i % 2) for i in range({N})]\n"
        "def load():\n    return part, part\n"
    )
    return load(Data(name=f"{root / 'mine.py'}:load"))


def as_hugging_face(root: Path) -> Dataset:
    library = pytest.importorskip("datasets")
    rows = {"t": TIMES, "label": ["w", "s"] * (N // 2)}
    part = library.Dataset.from_dict(rows)
    library.DatasetDict({"train": part, "test": part}).save_to_disk(str(root / "d"))
    return load(Data(name="huggingface", root=str(root / "d"), columns=Columns()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("read", [as_table, as_arrays, as_function, as_hugging_face])
def test_times_are_told_apart_by_every_way_in(tmp_path, read):
    found = read(tmp_path)
    assert found.train.x.dtype == np.float64
    every = np.concatenate([found.train.x, found.test.x])
    assert len(np.unique(every)) == N
    assert found.mean[0] == pytest.approx(found.train.x.mean(), abs=1e-3)


@pytest.mark.parametrize("scenario", [Iid(kind="iid"), Natural(kind="natural")])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("gather", [False, True])
def test_a_net_sees_times_apart(tmp_path, scenario, layout, gather):
    """Also where each client has moments of its own, and the global test set has everybody's."""
    data, out = recording(tmp_path / "r.csv"), tmp_path / "d"
    run_partition(data, scenario, 2, 0, out, QUIET, gather=gather, layout=layout)
    seen = []
    for client in range(2):
        stream = TaskStream(open_data(out, client))
        stream.open(0)
        seen += [stream.train(0)[0], stream.test(0)[0]]
    every = torch.cat(seen)
    assert every.dtype == torch.float32
    owners = 2 if isinstance(scenario, Natural) else 1  # each with a mean of 0
    assert len(torch.unique(every)) > N // owners - 4
    assert float(every.abs().max()) < 3
    held = stream.data.global_test()
    assert held is not None
    tested = global_test_tensors(held)[0]
    assert len(torch.unique(tested)) > len(tested) // 2  # two owners may share a value


def test_numbers_that_float32_tells_apart_stay_narrow(tmp_path):
    """Data sets of such numbers have the bytes that they had, and the digests of their runs."""
    small = np.linspace(0, 1e4, N)[:, None]
    for x in (small, np.ones((N, 1)) * 1.7e9 + 0.1, np.arange(N)[:, None] + 1e5):
        assert {part.dtype for part in narrowed(x, x[:3])} == {np.dtype(np.float32)}
    mixed = np.concatenate([small, TIMES[:, None]], axis=1)
    assert {part.dtype for part in narrowed(mixed, mixed[:0])} == {np.dtype(np.float64)}


def test_a_model_tells_times_apart_too(tmp_path):
    """In Python, on the command line, and as a graph for other programs."""
    facts = ModelFacts(
        "mlp", {"hidden": [4]}, (1,), 2, mean=(float(TIMES.mean()),), std=(float(TIMES.std()),)
    )
    with seeded(0):  # of others all units may be dead for most of the inputs
        net = make_net("mlp", num_classes=2, input_shape=(1,), hidden=[4])
    model = TrainedModel(facts, net.tensors())
    x = TIMES[:, None]
    expected = net(torch.from_numpy((x - x.mean()) / x.std()).float()).softmax(1)
    np.save(tmp_path / "x.npy", x)
    (read,) = read_new([tmp_path / "x.npy"], facts, "a model")
    for inputs in (x, torch.from_numpy(x), read.x):
        found = torch.from_numpy(model.probabilities(inputs))
        assert torch.allclose(found, expected, atol=1e-6)
    assert len(torch.unique(found[:, 0])) > N // 2
    export(model, "torch.export", tmp_path / "m.pt2")
    graph = torch.export.load(tmp_path / "m.pt2").module()
    assert torch.allclose(graph(torch.from_numpy(x)).softmax(1), expected, atol=1e-6)


def test_decimals_and_texts_of_numbers_are_numbers_in_parquet_too(tmp_path, caplog):
    """They were passed over, and a net saw the other columns alone."""
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        {
            "ax": [Decimal(f"{i}.5") for i in range(6)],
            "ay": [str(-i) for i in range(6)],
            "az": [float(i) for i in range(6)],
            "note": list("abcdef"),
            "when": pandas.date_range("2026-01-01", periods=6),
            "none": [None] * 6,
            "label": ["x", "y"] * 3,
        }
    )
    frame.to_parquet(tmp_path / "a.parquet")
    found = load(Data(name="table", root=str(tmp_path / "a.parquet"), columns=Columns()))
    assert found.columns == ("ax", "ay", "az")
    assert found.train.x[0].tolist() == [0.5, 0, 0]
    line = (
        f"note: {tmp_path / 'a.parquet'}: an example has the columns ax, ay, az; left out: "
        "note (texts), when (times), none (empty)"
    )
    assert line in caplog.text
    frame["ay"] = ["1", "2", "3", "4", "?", "6"]
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(Exception, match="column 'ay' holds '\\?' in row 5, and numbers elsewhere"):
        load(Data(name="table", root=str(tmp_path / "a.parquet"), columns=Columns()))


def test_natural_clients_of_images_have_moments_of_their_own(tmp_path):
    """Their moments were those of bytes, and applied to values from 0 to 1: all became one."""
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        np.save(tmp_path / f"{part}_x.npy", rng.integers(0, 256, (N, 1, 4, 4), dtype=np.uint8))
        np.save(tmp_path / f"{part}_y.npy", np.arange(N) % 2)
        np.save(tmp_path / f"groups_{part}.npy", np.arange(N) % 4 // 2)
    data = Data(name="directory", root=str(tmp_path))
    run_partition(data, Natural(kind="natural"), 2, 0, tmp_path / "out", QUIET)
    for client in range(2):
        stream = TaskStream(open_data(tmp_path / "out", client))
        stream.open(0)
        x = stream.train(0)[0]
        assert float(x.mean()) == pytest.approx(0, abs=1e-5)
        assert float(x.std()) == pytest.approx(1, abs=0.01)
