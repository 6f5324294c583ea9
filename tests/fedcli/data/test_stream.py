"""What a client may see of its own data, and that old data are really gone."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.stream import TaskStream, global_test_tensors
from fedmodels.errors import DataError
from tests.fedcli.data.test_client_data import tiny_dataset, write


@pytest.fixture
def data(tmp_path: Path) -> ClientData:
    return ClientData(write(tmp_path / "data", kind="iid", tasks=3) / "0")


def test_examples_are_normalised_tensors(data):
    stream = TaskStream(data)
    stream.open(0)
    x, y = stream.train(0)
    raw, labels = data.arrays(0, "train")
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert y.tolist() == labels.tolist()
    assert np.allclose(x.numpy(), (raw / 255.0 - 0.5) / 0.25, atol=1e-6)


def test_only_the_open_task_can_be_trained_on(data):
    stream = TaskStream(data)
    with pytest.raises(DataError, match="no task is open"):
        stream.train(0)
    stream.open(1)
    with pytest.raises(DataError, match="training data of task 0 are out of reach: task 1 is open"):
        stream.train(0)
    with pytest.raises(DataError, match="task 2"):
        stream.train(2)
    with pytest.raises(DataError, match="out of reach"):
        stream.train_up_to(1)  # this stream keeps no history
    with pytest.raises(DataError, match="has no task 3: it has 3"):
        stream.open(3)
    assert stream.task == 1


def test_old_training_data_are_freed(data):
    stream = TaskStream(data)
    stream.open(0)
    x, y = stream.train(0)
    stream.test(0)
    held = weakref.ref(x), weakref.ref(y)
    del x, y
    gc.collect()
    assert held[0]() is not None  # the stream holds it while the task is open
    stream.open(1)
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_opening_the_open_task_again_keeps_its_data(data):
    stream = TaskStream(data)
    stream.open(0)
    x, _ = stream.train(0)
    stream.open(0)
    assert stream.train(0)[0] is x


def test_no_memory_map_stays_open(data, monkeypatch):
    maps: list[weakref.ref[np.ndarray]] = []
    plain = ClientData.arrays

    def watched(self: ClientData, task: int, part: str) -> object:
        x, y = plain(self, task, part)  # type: ignore[arg-type]
        maps.append(weakref.ref(x))
        return x, y

    monkeypatch.setattr(ClientData, "arrays", watched)
    stream = TaskStream(data)
    stream.open(0)
    stream.train(0)
    stream.test(0)
    gc.collect()
    assert [ref() for ref in maps] == [None, None]


def test_test_data_of_tasks_met_stay(data):
    stream = TaskStream(data)
    with pytest.raises(DataError, match="before it was met"):
        stream.test(0)
    stream.open(1)  # as after a restart: tasks 0 and 1 were met
    assert len(stream.test(0)[1]) == len(data.arrays(0, "test")[1])
    assert stream.test(1)[0] is stream.test(1)[0]
    with pytest.raises(DataError, match="test data of task 2"):
        stream.test(2)
    stream.open(0)  # tasks may come round again within a round
    assert stream.num_seen == 2
    stream.test(1)


def test_history_is_kept_only_on_request(data):
    stream = TaskStream(data, keep_history=True)
    stream.open(2)
    x, y = stream.train_up_to(2)
    parts = [data.arrays(m, "train") for m in range(3)]
    assert len(x) == sum(len(part) for part, _ in parts)
    assert y.tolist() == np.concatenate([labels for _, labels in parts]).tolist()
    with pytest.raises(DataError, match="out of reach"):
        stream.train_up_to(1)
    with pytest.raises(DataError, match="out of reach"):
        stream.train(1)


def test_global_test(data, tmp_path):
    stream = TaskStream(data)
    found = stream.global_test()
    assert found is not None
    assert found[0].shape == (30, 1, 4, 4)
    assert stream.global_test() is found
    opened = data.global_test()
    assert opened is not None
    assert torch.equal(global_test_tensors(opened)[0], found[0])
    (tmp_path / "alone").mkdir()
    (tmp_path / "data" / "0").rename(tmp_path / "alone" / "0")
    assert TaskStream(ClientData(tmp_path / "alone" / "0")).global_test() is None


def test_closing_forgets_everything(data):
    stream = TaskStream(data)
    stream.open(0)
    held = weakref.ref(stream.train(0)[0]), weakref.ref(stream.test(0)[0])
    stream.close()
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    with pytest.raises(DataError, match="no task is open"):
        stream.train(0)


def test_float_windows_stay_as_they_are(tmp_path):
    out = write(tmp_path / "data", tiny_dataset((128, 6), floats=True), kind="iid")
    stream = TaskStream(ClientData(out / "0"))
    stream.open(0)
    raw, _ = stream.data.arrays(0, "train")
    assert torch.equal(stream.train(0)[0], torch.from_numpy((np.array(raw) - 0.5) / 0.25))
