import json
import os
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fedmodels.errors import ArchiveError, ArchiveNotRead, ConfigError, RunFailed
from fedmodels.tensors.bundle import Bundle, state_digest
from fedmodels.training.contexts import ServerState
from fedsrv.engine.commits import Syncer
from fedsrv.state.run_directory import refuse_existing
from fedsrv.state.store import Store
from tests.conftest import tiny_experiment


@pytest.fixture
def opened(tmp_path):
    """Opens the run directory, closing what was open before."""
    held = []

    def open_store(experiment=None, resume=True):
        close()
        held.append(Store(tmp_path / "run", experiment or tiny_experiment(), resume))
        return held[-1]

    def close():
        while held:
            held.pop().close()

    yield open_store
    close()


def state(value):
    weights = {"base/w": torch.full((3,), float(value)), "base/n": torch.tensor(value)}
    kept = {4: Bundle(scalars={"s": 0.5})}
    return ServerState(Bundle(weights=weights), Bundle(weights={"own": torch.ones(2)}), kept)


def record(number, **facts):
    return {"interaction": number, "round": number, "cohort": [0], "metrics": {}, **facts}


def committed(store, *numbers):
    for number in numbers:
        store.commit(record(number), state(number), None)
    return store


def lines(store):
    text = (store.path / "rounds.jsonl").read_text()
    return [json.loads(line)["interaction"] for line in text.splitlines()]


def files(store):
    """Names of everything but the parts, which test_client_parts.py looks at."""
    found = (p.name for p in store.states.glob("state-*"))
    return sorted(name for name in found if not name.startswith("part-"))


def digest(found):
    return state_digest(found.named())


def test_the_last_committed_state_goes_to_the_pages_of_its_file(opened):
    store, first, other = opened(resume=False), state(0), state(7)
    initial = store.mapped(first)
    assert digest(initial) == digest(first)
    assert "initial.safetensors" in Path("/proc/self/maps").read_text()
    assert os.listdir(store.states) == [], "the file has no name"
    store.commit(record(0), first, None)
    assert store.mapped(other) is other, "its file holds another state"
    after = store.mapped(first)
    assert digest(after) == digest(first)
    assert str(store.states / "state-00000000") in Path("/proc/self/maps").read_text()
    assert after.clients is first.clients
    assert store.mapped(after) is after


def test_a_state_whose_file_is_gone_stays_in_memory(opened):
    store, first = opened(resume=False), state(0)
    store.commit(record(0), first, None)
    (store.states / files(store)[0]).unlink()
    assert store.mapped(first) is first


# --- commits --------------------------------------------------------------------------------------


def test_a_fresh_directory(opened):
    store = opened(resume=False)
    assert store.committed == -1
    assert store.has_state(-1)
    assert not store.has_state(0)
    assert store.ledger.records() == []
    assert lines(store) == []


def test_what_is_committed_is_there_again(opened):
    run_id = committed(opened(resume=False), 0, 1).run_id
    store = opened()
    assert store.run_id == run_id
    assert store.committed == 1
    assert [(r["interaction"], scored) for r, scored in store.ledger.records()] == [
        (0, True),
        (1, True),
    ]
    for number in (0, 1):
        assert digest(store.state(number)) == digest(state(number))
    assert lines(store) == [0, 1]
    assert store.state(1).clients.keys() == {4}


def test_an_empty_state_survives(opened):
    store = opened(resume=False)
    store.commit(record(0), ServerState(Bundle()), None)
    assert digest(opened().state(0)) == digest(ServerState(Bundle()))


def test_scores_come_later(opened):
    store = opened(resume=False)
    store.commit(record(0), state(0), '[["counts"]]')
    assert lines(store) == []
    assert store.ledger.pending() == (record(0), '[["counts"]]')
    store = opened()
    assert store.ledger.pending() == (record(0), '[["counts"]]')
    store.add_scores(record(0, metrics={"a_glo": 0.5}))
    assert store.ledger.pending() is None
    assert lines(store) == [0]
    assert opened().ledger.records() == [(record(0, metrics={"a_glo": 0.5}), True)]


def test_an_interaction_is_committed_once(opened):
    store = committed(opened(resume=False), 0)
    with pytest.raises(Exception, match="committed already"):
        store.commit(record(0), state(9), None)


# --- after a crash --------------------------------------------------------------------------------


def test_a_state_without_a_record_is_no_commit(opened):
    """The server died between the rename and the record."""
    store = committed(opened(resume=False), 0)
    with pytest.MonkeyPatch.context() as kill:
        kill.setattr(store.ledger, "append", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.commit(record(1), state(1), None)
    store = opened()
    assert store.committed == 0
    assert files(store) == ["state-00000000.safetensors"]
    assert lines(store) == [0]


@pytest.mark.parametrize("harm", ["gone", "empty", "truncated", "flipped"])
def test_a_record_without_its_state_is_no_commit(opened, harm):
    """The power failed: the record came to the disk, the state did not, or not whole."""
    store = committed(opened(resume=False), 0, 1, 2)
    path = store.states / "state-00000002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "truncated": data[:-5], "flipped": data}[harm])
    store = opened()
    assert store.committed == 1
    assert lines(store) == [0, 1]
    assert digest(store.state(1)) == digest(state(1))
    assert not path.exists()


def test_a_state_that_cannot_be_read_now_is_not_dropped(opened, monkeypatch):
    """The process has too many files open, say: the commit is whole."""
    store = committed(opened(resume=False), 0, 1)
    before = {path.name: path.read_bytes() for path in store.states.iterdir()}

    def short(*args, **options):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr("fedmodels.tensors.archive.safe_open", short)
        with pytest.raises(ArchiveNotRead, match="cannot be read: Too many open files"):
            opened()
    store = opened()
    assert store.committed == 1
    assert {path.name: path.read_bytes() for path in store.states.iterdir()} == before


def test_nothing_usable_is_left(opened):
    store = committed(opened(resume=False), 0, 1)
    for path in store.states.glob("state-*"):
        path.write_bytes(b"")
    store = opened()
    assert store.committed == -1
    assert lines(store) == []


def test_lines_are_written_anew(opened):
    """What a crash left half written, or a line of a commit that did not count, goes."""
    store = committed(opened(resume=False), 0)
    with (store.path / "rounds.jsonl").open("a") as file:
        file.write('{"interaction": 1, "rou')
    assert lines(opened()) == [0]


def test_what_a_write_left_behind_is_removed(opened):
    store = committed(opened(resume=False), 0)
    leftover = store.states / ".state-00000001.safetensors.x7w2"
    leftover.write_bytes(b"half")
    store = opened()
    assert files(store) == ["state-00000000.safetensors"]
    assert not leftover.exists()


def test_roll_back(opened):
    """What was undone stays until it is passed again."""
    store = committed(opened(resume=False), 0, 1, 2, 3)
    store.roll_back(1)
    assert (store.committed, store.newest) == (1, 3)
    assert lines(store) == [0, 1]
    assert len(files(store)) == 4
    committed(store, 2)
    store.roll_back(-1)
    assert (store.committed, store.newest) == (-1, 3)
    assert len(files(store)) == 4
    assert lines(store) == []


def test_prune_keeps_what_may_be_rolled_back_to(opened):
    store = committed(opened(resume=False), 0, 1, 2, 3)
    store.prune(-1)
    assert len(files(store)) == 4
    store.prune(2)
    assert files(store) == ["state-00000002.safetensors", "state-00000003.safetensors"]
    store.prune(9)
    assert files(store) == ["state-00000003.safetensors"]
    assert store.committed == 3
    with pytest.raises(ArchiveError):
        store.state(1)


# --- who may use it -------------------------------------------------------------------------------


def test_a_directory_is_used_by_one(opened, tmp_path):
    opened(resume=False)
    with pytest.raises(RunFailed, match="in use by another process"):
        Store(tmp_path / "run", tiny_experiment(), True)
    with pytest.raises(RunFailed, match="in use by another process"):  # --resume would not help
        refuse_existing(tmp_path / "run")


def test_a_directory_that_exists_needs_resume(tmp_path):
    committed(Store(tmp_path / "run", tiny_experiment(), False), 0).close()
    with pytest.raises(ConfigError, match="already holds a run; add --resume"):
        refuse_existing(tmp_path / "run")
    (tmp_path / "run" / "run.db").unlink()
    with pytest.raises(ConfigError, match="run exists and is not empty; add --resume"):
        refuse_existing(tmp_path / "run")
    other = tmp_path / "other"
    other.mkdir()
    refuse_existing(other)
    (other / "notes").write_text("")
    with pytest.raises(ConfigError, match="other holds files that are no run; give another --out"):
        refuse_existing(other)
    refuse_existing(tmp_path / "new")


@pytest.mark.parametrize(
    ("left", "resume"),
    [
        ([], False),
        (["server/"], False),
        (["server/"], True),
        ([".lock"], True),
        ([".lock", "server/"], True),
        ([".lock", "server/", "run.db"], True),
    ],
)
def test_a_start_killed_in_its_first_moment_can_be_begun_again(tmp_path, left, resume):
    path = tmp_path / "run"
    path.mkdir()
    for name in left:
        (path / name).mkdir() if name.endswith("/") else (path / name).touch()
    with closing(Store(path, tiny_experiment(), resume)) as store:
        assert store.committed == -1
        assert store.run_id


def test_a_stranger_s_lock_makes_no_run(tmp_path):
    for name in (".lock", "poetry.toml"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="holds files that are no run; give another --out"):
        Store(tmp_path, tiny_experiment(), True)


def test_the_lock_is_the_first_file_of_a_run(tmp_path, monkeypatch):
    def killed(path):
        raise KeyboardInterrupt(sorted(inner.name for inner in path.iterdir()))

    monkeypatch.setattr("fedsrv.state.store.lock", killed)
    with pytest.raises(KeyboardInterrupt) as caught:
        Store(tmp_path / "run", tiny_experiment(), False)
    assert caught.value.args == ([],)


def test_a_link_in_a_directory_is_not_followed(tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "else")
    refuse_existing(tmp_path / "run")  # the place itself may be a link
    (tmp_path / "else" / "loop").symlink_to(tmp_path / "else")
    with pytest.raises(ConfigError, match="holds files that are no run"):
        refuse_existing(tmp_path / "run")


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "out").write_text("")
    for resume in (False, True):
        with pytest.raises(ConfigError, match="out is a file, not a directory; give another --out"):
            Store(tmp_path / "out", tiny_experiment(), resume)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "differs in seed"),
        ({"method": {"name": "fedprox", "mu": 0.5}}, r"method\.mu, method\.name"),
        (
            {"schedule": {"rounds": 1}},
            r"rounds may be added .* never taken away\. Resume",
        ),
        ({"schedule": {"per_round": 2, "rounds": 9}}, r"differs in schedule\.per_round"),
    ],
)
def test_another_config_is_refused_by_its_keys(opened, changes, named):
    opened(resume=False)
    with pytest.raises(ConfigError, match=named) as caught:
        opened(tiny_experiment(**changes))
    assert "\n" not in str(caught.value)
    opened()  # the refusal left the run as it was


def test_a_schedule_without_a_length_is_why_no_rounds_are_added(opened):
    course = {"training": {"lr_schedule": {"kind": "cosine"}}}
    opened(tiny_experiment(**course), resume=False)
    with pytest.raises(ConfigError, match=r"as \[training\.lr_schedule\] has no length: rounds"):
        opened(tiny_experiment(schedule={"rounds": 9}, **course))


def test_rounds_may_grow(opened):
    run_id = committed(opened(resume=False), 0).run_id
    store = opened(tiny_experiment(schedule={"rounds": 5}))
    assert (store.run_id, store.committed) == (run_id, 0)
    with pytest.raises(ConfigError, match=r"schedule\.rounds"):
        opened()  # back to fewer


@pytest.mark.parametrize(
    "scenario", [{"tasks": 2}, {"tasks": [1, 1, 2]}, {"kind": "replay_gradual", "parts": 2}]
)
def test_rounds_may_not_grow_where_tasks_follow(opened, scenario):
    """With ``tasks_outer`` more rounds on the first task would move all that follows."""
    tables = {"scenario": scenario, "evaluate": {"every": 1}}
    opened(tiny_experiment(schedule={"order": "tasks_outer"}, **tables), resume=False)
    with pytest.raises(ConfigError, match=r"schedule\.rounds"):
        opened(tiny_experiment(schedule={"order": "tasks_outer", "rounds": 3}, **tables))


def test_rounds_on_a_single_task_may_grow(opened):
    one = {"scenario": {"tasks": 1}, "schedule": {"order": "tasks_outer"}}
    opened(tiny_experiment(**one), resume=False)
    opened(tiny_experiment(scenario={"tasks": 1}, schedule={"order": "tasks_outer", "rounds": 3}))


def test_clients_are_remembered(opened):
    store = opened(resume=False)
    store.add_profiles({2: "two"})
    store.add_profiles({0: "zero"})
    store.add_profiles({2: "two again"})
    assert opened().ledger.profiles() == {0: "zero", 2: "two again"}


# --- the disk -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("synced")
@pytest.mark.parametrize(("durability", "waits"), [("watermark", False), ("strict", True)])
def test_who_waits_for_the_disk(opened, monkeypatch, durability, waits):
    """With ``strict``, a commit waits for the state's file, its one part, and their names."""
    store, synced, sync = (
        opened(tiny_experiment(server={"durability": durability}), False),
        [],
        os.fsync,
    )
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), sync(handle)))
    committed(store, 0)
    assert bool(synced) == waits
    (mode,) = store.owner.run(lambda: store.ledger.db.execute("PRAGMA synchronous").fetchone())
    assert mode == (2 if waits else 1)


def test_sync_of_what_is_gone(opened):
    store = committed(opened(resume=False), 0, 1)
    store.prune(1)
    store.sync(0)
    store.sync(1)


def wait_for(condition):
    done = threading.Event()
    for _ in range(500):
        if condition():
            return
        done.wait(0.01)
    pytest.fail("it did not happen in time")


def test_the_syncer_follows():
    synced = []
    syncer = Syncer(synced.append)
    try:
        assert syncer.durable == -1
        syncer.want(3)
        wait_for(lambda: syncer.durable == 3)
        syncer.want(1)  # rolled back
        assert syncer.durable == 1
        syncer.want(2)
        wait_for(lambda: syncer.durable == 2)
    finally:
        syncer.close()
    assert synced == [3, 2]


def test_a_sync_that_failed_is_tried_again_with_the_next_commit(caplog):
    asked = []

    def sync(interaction):
        asked.append(interaction)
        if interaction == 3:
            raise OSError(5, "Input/output error")

    syncer = Syncer(sync)
    try:
        syncer.want(3)
        wait_for(lambda: caplog.messages)
        assert syncer.durable == -1
        syncer.want(4)
        wait_for(lambda: syncer.durable == 4)
    finally:
        syncer.close()
    assert asked == [3, 4]
    assert caplog.messages == ["interaction 4 is not safe on the disk: Input/output error"]


def test_a_roll_back_while_a_sync_is_under_way():
    """What was synced meanwhile does not count beyond what is wanted now."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(interaction):
        begun.set()
        go_on.wait(5)

    syncer = Syncer(slow)
    try:
        syncer.want(5)
        begun.wait(5)
        syncer.want(2)
        go_on.set()
        wait_for(lambda: syncer.durable >= 0)
        assert syncer.durable == 2
    finally:
        syncer.close()
