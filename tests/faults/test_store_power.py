"""A run directory whose machine loses its power: what was called safe is there afterwards."""

from __future__ import annotations

import json
import os
import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fedcli.runtime import deployed
from fedcli.runtime.deployed import Deployed
from fedcli.runtime.sessions import Session, SessionFile
from fedcli.runtime.state import StateDirectory
from fedmodels.nets.trained import TrainedModel
from fedmodels.tensors import stored
from fedmodels.tensors.archive import PERSONAL, load
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.stored import NOTE
from fedmodels.training.contexts import ServerState
from fedplugins.serving.tests.test_serving import Killed, put_live
from fedsrv.state.stated import read_history
from fedsrv.state.store import Store
from fedsrv.state.verification import verified
from tests.conftest import tiny_experiment
from tests.faults.inside import fault_disk
from tests.faults.power import lose_power


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place below which every fsync is recorded."""
    fsync = os.fsync

    def synced(handle: int) -> None:
        safe = fault_disk.about_to_sync(handle)
        fsync(handle)
        safe()

    (tmp_path / "disk").mkdir()
    for name, value in (("_root", None), ("_vault", Path())):
        monkeypatch.setattr(fault_disk, name, value)
    fault_disk.record(tmp_path / "disk", tmp_path)
    monkeypatch.setattr(os, "fsync", synced)
    return tmp_path / "disk" / "run"


def lose(*directories: Path, rng: random.Random | None = None) -> None:
    places = (directory / "vault" for directory in directories[0].parents)
    vault = next(place for place in places if place.exists())
    lose_power(vault, directories, rng)


def state(value: float) -> ServerState:
    return ServerState(Bundle(weights={"w": torch.full((2,), value)}), Bundle(), {})


def record(number: int) -> dict[str, object]:
    return {"interaction": number, "round": number, "cohort": [0], "metrics": {}}


def crashed(out: Path, *numbers: int, safe: int = -1) -> str:
    """Commit some interactions, sync up to one of them, and die; return the run's id."""
    store = Store(out, tiny_experiment(), resume=True)
    for number in numbers:
        store.commit(record(number), state(number), None)
        if number == safe:
            store.sync(number)
    os.close(store._lock_file)  # SQLite is not told: a closed database would be synced
    lose(out, out / "server")
    return store.run_id


def test_a_run_is_the_same_from_its_first_moment(out):
    """Clients store whose they are as soon as they have joined."""
    before = crashed(out)
    store = Store(out, tiny_experiment(), resume=True)
    assert store.run_id == before
    store.close()


def test_what_was_synced_is_there(out):
    crashed(out, 0, 1, 2, safe=1)
    store = Store(out, tiny_experiment(), resume=True)
    assert store.committed == 1
    assert torch.equal(store.state(1).common.weights["w"], torch.ones(2))
    store.close()


UNDER_WAY = {
    0: [[0, 0], [2, 0]],
    1: [[2, 0], [1, 1]],
    2: [[1, 1], [0, 2]],
    3: [[0, 2], [2, 3]],
    4: [[2, 3], [1, 4]],
    5: [[1, 4], [0, 5]],
}
"""Of an asynchronous run's commits: clients with an order, and the interaction they got it in."""


def test_a_synced_commit_has_the_states_that_orders_under_way_began_from(out):
    """A slow disk syncs some commits only, and they need states of the others."""
    store = Store(out, tiny_experiment(), resume=True)
    for number, under_way in UNDER_WAY.items():
        store.commit({**record(number), "under_way": under_way}, state(number), None)
        if number in (0, 2, 3, 5):
            store.sync(number)
            store.advance(number - 1)
    os.close(store._lock_file)
    lose(out, out / "server")
    store = Store(out, tiny_experiment(), resume=True)
    assert store.committed == 5
    assert [torch.equal(store.state(n).common.weights["w"], torch.full((2,), float(n)))
            for n in (3, 4, 5)] == [True] * 3  # fmt: skip
    store.close()


def test_a_state_that_is_safe_is_not_synced_again(out, monkeypatch):
    store, synced = Store(out, tiny_experiment(), resume=True), list[str]()
    monkeypatch.setattr("fedsrv.state.store.sync_path", lambda path: synced.append(path.name))
    for number in (0, 1, 2):
        store.commit({**record(number), "under_way": [[0, 1]]}, state(number), None)
        store.sync(number)
    store.close()
    states = [name for name in synced if name.startswith("state-")]
    assert states == [f"state-{number:08d}.safetensors" for number in (0, 1, 2)]


def test_a_commit_names_no_line_of_the_audit_log_that_a_loss_of_power_takes(out):
    """The database may reach the disk before the log does."""
    store = Store(out, tiny_experiment(), resume=True)
    for number in (0, 1):
        store.evidence.audit.tell("sent", client=0, interaction=number)
        store.commit(record(number), state(number), None)
        if number == 0:
            store.sync(0)
    store._sync_log()
    os.close(store._lock_file)
    lose(out, out / "server")
    store = Store(out, tiny_experiment(), resume=True)
    assert store.evidence.audit.differences == []
    assert read_history(out / "run.db").said[-1]["undone_after"] == 0  # its state's file was lost
    store.close()
    assert verified(out).wrong == []


def test_the_lines_of_a_run_are_there_once_it_has_ended(out):
    """Nobody goes on with it, who would write them anew."""
    store = Store(out, tiny_experiment(), resume=True)
    for number in (0, 1):
        store.commit(record(number), state(number), None)
    store.end({"state_sha256": ""})
    os.close(store._lock_file)
    lose(out, out / "server")
    lines = (out / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["interaction"] for line in lines] == [0, 1]
    assert verified(out).wrong == []


def test_a_session_is_there_once_it_is_used(out):
    session = SessionFile(out / "0").begin()
    lose(out / "0")
    assert SessionFile(out / "0").read() == session
    SessionFile(out / "0").write(Session("run", session.token))
    lose(out / "0")
    assert SessionFile(out / "0").read() == Session("run", session.token)


def test_a_personal_model_is_there_when_the_run_is_over(out):
    model = Bundle(weights={"w": torch.ones(2)})
    StateDirectory(out / "0").save_personal(model, {})
    for _ in range(2):  # the second time it is the same file already
        StateDirectory(out / "1").save_personal(model, {}, out / "0" / PERSONAL)
    for client in ("0", "1"):
        lose(out / client)
        assert torch.equal(load(out / client / PERSONAL)[0].weights["w"], torch.ones(2))
    assert {path.name for path in (out / "1").iterdir()} == {PERSONAL, NOTE}


@pytest.mark.parametrize("change", ["go live", "roll back"])
@pytest.mark.parametrize("cut", ["linked", "replace", "sync_path", ""])
def test_a_live_model_is_whole_whenever_the_power_fails(out, cut, change, monkeypatch):
    """During a change and after it, whatever survives of what was not synced."""
    for seed in range(6):
        place = Deployed(out / f"{cut}-{seed}")
        put_live(place, 0)
        put_live(place, 1)
        with monkeypatch.context() as patched, suppress(Killed):
            if cut:
                owner = {"replace": Path, "linked": stored}.get(cut, deployed)
                patched.setattr(owner, cut, dies)
            put_live(place, 2) if change == "go live" else place.roll_back()
        lose(place.folder, rng=random.Random(seed))
        expected = {"go live": {1, 2}, "roll back": {0, 1}}[change] if cut else {2, 0}
        assert TrainedModel.load(place.current).facts.round in expected


def dies(*args: object, **more: object) -> None:
    raise Killed
