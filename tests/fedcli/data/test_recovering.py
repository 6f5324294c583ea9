"""A client's data that came back from an earlier backup, in order with what its run knows."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from fedcli.cli import main
from fedcli.data.store.client_data import PARTS, ClientData
from fedcli.data.store.growing import add_task
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.partition_writer import Layout
from fedcli.data.store.people import salt_of
from fedcli.data.store.recovering import LOST, Recovered, recover_tasks
from fedcli.data.store.task_digests import content_of, digest_of
from fedmodels.errors import DataError
from fedmodels.facts.data_description import ClientFile
from fedpb.tables import description_of
from fedpb.v1.coordinator_pb2 import PrepareResponse
from tests.fedcli.data import test_partition_store as stores
from tests.fedcli.data.test_growing import Death, Killed, arrays
from tests.fedcli.data.test_own_data import own


def month(place: Path, labels: str) -> Path:
    """Write arrays of noise, of which no other month has a row."""
    arrays(place, labels)
    for number, part in enumerate(PARTS):
        x = np.load(place / f"{part}_x.npy")
        rng = np.random.default_rng([crc32(place.name.encode()), number])
        np.save(place / f"{part}_x.npy", rng.integers(0, 256, x.shape, dtype=x.dtype))
    return place


def known_of(root: Path, how: str = "exact") -> ClientFile:
    """Return what a run knows of client 1."""
    return ClientFile.model_validate_json(open_data(root, 1).announcement(how=how))  # type: ignore


def restored(root: Path) -> None:
    """Put the backup back."""
    shutil.rmtree(root)
    shutil.copytree(root.with_name("backup"), root)


@pytest.fixture(params=["directory", "store"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Client 1 with its first tasks and the task January, and a backup of that."""
    if request.param == "store":
        stores.write(tmp_path / "data", Layout.STORE, stores.KINDS[0])
    else:
        own(tmp_path / "data", 1, scale=255.0, class_names=["a", "b"])
    add_task(tmp_path / "data", 1, month(tmp_path / "january", "0 1 1"))
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    return tmp_path / "data"


@pytest.mark.parametrize("how", ["exact", "rounded"])
def test_what_is_new_comes_behind_what_the_run_knows(data, tmp_path, how):
    first = open_data(data, 1).num_tasks
    add_task(data, 1, month(tmp_path / "march", "0 1 1"))
    add_task(data, 1, month(tmp_path / "april", "0 0 7"))
    known, april = known_of(data, how), open_data(data, 1).arrays(first + 1, "train")
    restored(data)
    add_task(data, 1, month(tmp_path / "may", "1 8 0"))
    add_task(data, 1, tmp_path / "april")
    found = recover_tasks(data, 1, known)
    assert found == Recovered([first], {first: first + 2}, data / "1.before")
    assert f"the data of task {first} are lost: set aside, task {first} is" in str(found)
    held = open_data(data, 1)
    held.check()
    assert [n for n, task in enumerate(held.tasks) if task.set_aside] == [first]
    assert held.tasks[first].why == LOST
    assert held.file.classes[: known.num_classes] == known.classes
    assert held.file.classes[-1] == "8"
    told = known_of(data, how)
    for number, task in enumerate(known.tasks):
        assert told.tasks[number].train[: known.num_classes] == task.train, number
        assert told.tasks[number].digest == task.digest
    x, y = held.arrays(first + 1, "train")
    assert np.array_equal(x, april[0])
    assert [held.file.classes[k] for k in y] == [known.classes[k] for k in april[1]]
    names = [held.file.classes[k] for k in held.arrays(first + 2, "train")[1]]
    assert names == [held.file.classes[1], "8", held.file.classes[0]]
    assert recover_tasks(data, 1, known) == Recovered()
    assert add_task(data, 1, tmp_path / "may").task == first + 2, "it is known as it was"
    assert add_task(data, 1, tmp_path / "january").was_there
    assert add_task(data, 1, tmp_path / "march").task == first + 3, "what is found again is new"


def test_files_that_were_found_again_are_the_tasks_that_they_were(data, tmp_path):
    add_task(data, 1, month(tmp_path / "march", "0 1 1"))
    add_task(data, 1, month(tmp_path / "april", "0 1 1"))
    known = known_of(data)
    restored(data)
    add_task(data, 1, tmp_path / "april")
    add_task(data, 1, tmp_path / "march")
    assert not recover_tasks(data, 1, known).lost
    assert known_of(data) == known


def test_a_kill_at_any_step_leaves_data_that_the_next_call_brings_in_order(
    data, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    add_task(data, 1, month(tmp_path / "march", "0 1 1"))
    known = known_of(data)
    restored(data)
    add_task(data, 1, month(tmp_path / "may", "1 0 0"))
    old, saved = open_data(data, 1).announcement(), tmp_path / "saved"
    shutil.copytree(data, saved)
    recover_tasks(data, 1, known)
    want, step, killed = open_data(data, 1).announcement(), 0, True
    seen = set[str]()
    while killed:
        shutil.rmtree(data)
        shutil.copytree(saved, data)
        with monkeypatch.context() as patch:
            death = Death(patch, step)
            with suppress(Killed):
                recover_tasks(data, 1, known)
            killed = death.is_dead
        if (data / "1").exists():
            seen.add(open_data(data, 1).announcement())
        recover_tasks(data, 1, known)
        held = open_data(data, 1)
        held.check()
        assert held.announcement() == want, step
        step += 1
    assert seen == {old, want}
    assert step > 3


def test_a_digest_tells_nobody_of_the_data(tmp_path):
    """Equal tasks of two sites, or of one site under two numbers, have different ones."""
    for client in (1, 2):
        own(tmp_path / "data", client, scale=255.0)
        add_task(tmp_path / "data", client, month(tmp_path / f"m{client}" / "month", "0 1"))
    x, y = (np.load(tmp_path / "m1" / "month" / f"train_{of}.npy") for of in "xy")
    for of, array in (("x", x), ("y", y)):
        np.save(tmp_path / "m2" / "month" / f"train_{of}.npy", array)
    one = content_of([(x, y)], ["0", "1"])
    assert one == content_of([(x, y[::-1])], ["1", "0"]), "labels go by the names of classes"
    assert one != content_of([(x, y[::-1])], ["0", "1"])
    told = {digest_of(key, task, one) for key in (b"1", b"2") for task in (3, 4)}
    assert len(told) == 4
    digests = [open_data(tmp_path / "data", client).tasks[-1].digest for client in (1, 2)]
    assert len({*digests, ""}) == 3
    data = ClientData(tmp_path / "data" / "1")
    key = salt_of(data)
    assert key is not None
    content = content_of([data.raw(1, part) for part in PARTS], data.file.classes)
    assert digest_of(key, 1, content) == digests[0]


def test_the_command_asks_the_coordinator_what_it_knows(data, tmp_path, monkeypatch, capsys):
    add_task(data, 1, month(tmp_path / "march", "0 1 1"))
    told = PrepareResponse(known=description_of(open_data(data, 1).announcement()))
    asked = []

    class FakeLink:
        def __init__(self, *args: object) -> None:
            self.close = lambda: None

        def prepare(self, *args: object, **named: object) -> PrepareResponse:
            asked.append((args, named))
            return told

    monkeypatch.setattr("fedcli.runtime.link.Link", FakeLink)
    restored(data)
    lost = open_data(data, 1).num_tasks
    words = ["recover", "--client-id", "1", "--data", str(data), "--server", "127.0.0.1:9"]
    for line in (f"client 1: the data of task {lost} are lost", "nothing changed"):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert line in capsys.readouterr().out
    assert asked == [((1,), {"has_cut": True, "wants_known": True})] * 2
    told.ClearField("known")
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code
    assert (
        "cannot report what it knows about the data: update fedsrv there" in capsys.readouterr().err
    )


def test_data_of_another_problem_are_not_touched(data):
    known = known_of(data).model_copy(update={"input_shape": (2, 2)})
    with pytest.raises(DataError, match="inputs of another shape than the run knows"):
        recover_tasks(data, 1, known)
    assert not (data / "1.before").exists()
