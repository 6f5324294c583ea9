import json
import os
import threading
import time

import pytest
import torch

from fedcli.data.store.opened_data import open_data
from fedcli.runtime.link import Link, Membership
from fedcli.runtime.state import _SYNCER, StateDirectory, _Syncer
from fedcli.runtime.worker import Worker
from fedmodels.errors import ArchiveError, ArchiveNotRead, ArchiveReplaced
from fedmodels.tensors.archive import load
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.stored import NOTE, noted
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import context_of, payload_of, tiny_experiment
from tests.fedmodels.tensors.test_stored import negate

INITIAL = Bundle(weights={"w": torch.zeros(2)})


def private(value):
    return Bundle(weights={"w": torch.full((2,), float(value))})


def value_of(bundle):
    return bundle.weights["w"][0].item()


def saved(path, *versions):
    states = StateDirectory(path)
    for version in versions:
        states.save(version, private(version))
    return states


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchiveError, match="state directory"):
        StateDirectory(tmp_path / "file" / "0")


def test_a_state_replaced_by_its_negative_is_refused_when_it_is_opened_and_loaded(tmp_path):
    states = saved(tmp_path, 0, 1)
    negate(tmp_path / "state-00000000.safetensors")
    with pytest.raises(ArchiveReplaced, match="is not what was stored there"):
        states.load(0, INITIAL)
    with pytest.raises(ArchiveReplaced, match="put back the file"):
        StateDirectory(tmp_path)


def test_a_state_that_was_copied_in_is_dropped(tmp_path, caplog):
    """As one whose line a power loss took: it is no state that counts."""
    saved(tmp_path, 0)
    saved(tmp_path / "other", 5)
    name = "state-00000005.safetensors"
    (tmp_path / "other" / name).rename(tmp_path / name)
    assert StateDirectory(tmp_path).versions() == [0]
    assert "was never noted as stored; it is dropped" in caplog.text


def test_states_of_an_earlier_version_are_taken_and_noted_by_the_first_save(tmp_path):
    saved(tmp_path, 0, 1)
    (tmp_path / NOTE).unlink()
    states = StateDirectory(tmp_path)
    assert value_of(states.load(1, INITIAL)) == 1
    states.save(2, private(2))
    assert [len(noted(tmp_path / f"state-0000000{n}.safetensors")) for n in range(3)] == [1] * 3


def test_a_model_that_was_kept_or_is_the_last_one_is_noted(tmp_path):
    states = StateDirectory(tmp_path)
    states.keep_scored(3, 2, private(3), {})
    _, _, place = states.scored(3)
    states.save_personal(private(3), {}, place)
    negate(tmp_path / "personal.safetensors")
    with pytest.raises(ArchiveReplaced):
        load(tmp_path / "personal.safetensors")
    load(place)
    negate(place)
    with pytest.raises(ArchiveReplaced):
        states.scored(3)


# --- private states -------------------------------------------------------------------------------


def test_states_by_interaction(tmp_path):
    states = saved(tmp_path, 0, 3, 7)
    assert states.versions() == [0, 3, 7]
    again = StateDirectory(tmp_path)
    assert again.versions() == [0, 3, 7]
    assert value_of(again.load(7, INITIAL)) == 7


def test_never_trained(tmp_path):
    assert StateDirectory(tmp_path).load(-1, INITIAL) is INITIAL
    assert StateDirectory(tmp_path).durable == -1


def test_later_states_stay_until_the_run_has_passed_them(tmp_path):
    """The run rolled back to interaction 3: what came after may serve again, but is not safe."""
    states = saved(tmp_path, 0, 3, 7)
    wait_for(lambda: states.durable == 7)
    states.settle(3, 3)
    assert value_of(states.load(3, INITIAL)) == 3
    assert states.versions() == [0, 3, 7]
    assert states.durable == 3
    states.save(7, private(7.5))
    assert value_of(states.load(7, INITIAL)) == 7.5
    assert states.load(-1, INITIAL) is INITIAL
    assert states.versions() == [0, 3, 7]
    assert states.durable == -1


def test_states_that_did_not_count_are_deleted(tmp_path):
    """Commits went on without this client's upload of interaction 3."""
    states = saved(tmp_path, 0, 3, 7)
    states.settle(0, 5)
    assert states.versions() == [0, 7]
    states.settle(-1, 7)
    assert states.versions() == []


def test_a_sync_that_ends_after_a_roll_back_makes_nothing_safe(tmp_path, monkeypatch):
    """The state of interaction 7 is of commits that were undone; 3 is the last that counts."""
    begun, go_on, durable = threading.Event(), threading.Event(), {}

    def slow(self, path):
        durable[path] = self.durable
        if "7" in path.name:
            begun.set()
            go_on.wait(30)
        return True

    monkeypatch.setattr(StateDirectory, "_sync", slow)
    states = saved(tmp_path, 0, 3, 7)
    begun.wait(30)
    states.load(3, INITIAL)
    go_on.set()
    states.save(4, private(4))
    wait_for(lambda: states.durable == 4)
    assert durable[tmp_path / "state-00000004.safetensors"] == 3, "7 was not safe in between"
    assert states.load(4, INITIAL) is not INITIAL


def test_a_sync_of_a_state_that_was_replayed_makes_the_new_one_not_safe(tmp_path, monkeypatch):
    """The run went back to 3 while the state of 4 was synced, and 4 was trained again since."""
    begun, go_on, again = threading.Event(), threading.Event(), threading.Event()
    asked = []

    def slow(self, path):
        asked.append(path.name)
        if path.name.endswith("04.safetensors"):
            if asked.count(path.name) == 1:
                begun.set()
                go_on.wait(30)
            else:
                again.wait(30)
        return True

    monkeypatch.setattr(StateDirectory, "_sync", slow)
    states = saved(tmp_path, 3, 4)
    begun.wait(30)
    states.load(3, INITIAL)
    states.save(4, private(4.5))
    go_on.set()
    wait_for(lambda: len(asked) == 3)
    assert states.durable == 3, "what is in the file now was not synced"
    again.set()
    wait_for(lambda: states.durable == 4)


def test_a_disk_that_fails_to_sync_makes_nothing_safe(tmp_path, monkeypatch, caplog):
    def fails(handle):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", fails)
        states = saved(tmp_path, 0)
        wait_for(lambda: "not safe on the disk: Input/output error" in caplog.text)
    assert states.durable == -1
    states.save(1, private(1))
    wait_for(lambda: states.durable == 1)


def test_a_state_that_is_gone(tmp_path):
    states = saved(tmp_path, 0, 3)
    with pytest.raises(ArchiveError, match=r"state-00000002\.safetensors is missing"):
        states.load(2, INITIAL)


def test_the_last_state_is_kept_in_memory(tmp_path):
    states = saved(tmp_path, 5)
    (tmp_path / "state-00000005.safetensors").write_bytes(b"")
    assert value_of(states.load(5, INITIAL)) == 5


def test_prune_keeps_what_a_roll_back_needs(tmp_path):
    """A roll-back to the watermark asks for the newest state up to it, which may be older."""
    states = saved(tmp_path, 0, 3, 7, 9)
    states.prune(-1)
    assert states.versions() == [0, 3, 7, 9]
    states.prune(8)
    assert states.versions() == [7, 9]
    states.prune(100)
    assert states.versions() == [9]
    assert value_of(states.load(9, INITIAL)) == 9


def test_states_become_durable_in_the_background(tmp_path):
    states = StateDirectory(tmp_path)
    for version in range(4):
        states.save(version, private(version))
    wait_for(lambda: states.durable == 3)


def test_states_of_an_earlier_process_are_synced_before_they_count(tmp_path, monkeypatch):
    """It may have been killed before its own sync: the files are there, but not safe yet."""
    saved(tmp_path, 0, 1)
    monkeypatch.setattr(StateDirectory, "_sync", lambda self, path: time.sleep(0.2) or True)
    states = StateDirectory(tmp_path)
    assert states.durable == -1
    wait_for(lambda: states.durable == 1)


@pytest.mark.parametrize("harm", ["empty", "truncated", "flipped"])
def test_states_a_power_loss_damaged_are_dropped(tmp_path, harm):
    """Else the client would say that it holds a state which it cannot take up."""
    saved(tmp_path, 0, 1)
    path = tmp_path / "state-00000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes({"empty": b"", "truncated": data[:-3], "flipped": data}[harm])
    states = StateDirectory(tmp_path)
    assert states.versions() == [0]
    assert not path.exists()


def test_states_that_cannot_be_read_now_are_not_dropped(tmp_path, monkeypatch):
    """The process has too many files open, say: the states are whole."""
    saved(tmp_path, 0, 1)

    def short(*args, **options):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr("fedmodels.tensors.archive.safe_open", short)
        with pytest.raises(ArchiveNotRead, match="cannot be read: Too many open files"):
            StateDirectory(tmp_path)
    assert StateDirectory(tmp_path).versions() == [0, 1]


def test_states_below_a_path_that_is_no_utf8_are_not_dropped(tmp_path):
    saved(tmp_path / "old", 0)
    latin = tmp_path / os.fsdecode(b"st\xe9")
    (tmp_path / "old").rename(latin)
    with pytest.raises(ArchiveNotRead, match="its path is not UTF-8"):
        StateDirectory(latin)
    assert {p.name for p in latin.iterdir()} == {"state-00000000.safetensors", NOTE}


def test_files_of_other_names_are_left_alone(tmp_path):
    states = saved(tmp_path, 0)
    names = ("state-backup", "scored-old", "state-²²²²²²²²", "state-7", "scored-1")
    theirs = {f"{name}.safetensors" for name in names}
    for name in theirs:
        (tmp_path / name).write_bytes(b"mine")
    again = StateDirectory(tmp_path)
    again.keep_scored(4, 4, private(1), {})
    assert again.versions() == states.versions() == [0]
    assert theirs <= {path.name for path in tmp_path.iterdir()}


def test_what_a_crash_left_is_removed(tmp_path):
    saved(tmp_path, 0)
    for name in ("session.json.tmp", ".state-00000001.safetensors.a8_x", ".personal.safetensors.q"):
        (tmp_path / name).write_bytes(b"half")
    StateDirectory(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"state-00000000.safetensors", NOTE}


def test_personal_model(tmp_path):
    states = saved(tmp_path, 0)
    states.save_personal(private(2), {})
    states.save_personal(private(3), {})
    assert value_of(load(tmp_path / "personal.safetensors")[0]) == 3
    assert states.versions() == [0]


# --- what a worker makes of them ------------------------------------------------------------------


@pytest.fixture
def worker(digits, tmp_path):
    experiment = tiny_experiment(method="local")
    return Worker(
        0, open_data(digits, 0), StateDirectory(tmp_path / "0"), experiment, torch.device("cpu")
    )


def order_of(kind, interaction, base, committed=-1, **facts):
    return rpc.Order(
        kind=kind, client_id="0", interaction=interaction, base=base, committed=committed,
        durable=-1, **facts,
    )  # fmt: skip


def bytes_of(states, version):
    return (states.path / f"state-{version:08d}.safetensors").read_bytes()


def trained(worker, interaction, base, committed=-1):
    order = order_of(rpc.ORDER_KIND_TRAIN, interaction, base, committed)
    found = worker.execute(order, Bundle())
    assert found.failure == ""
    return found


def test_a_result_is_kept_until_it_is_committed(worker, monkeypatch):
    first = trained(worker, 0, -1)
    monkeypatch.setattr("fedmodels.training.loop.ClientHalf.train", None)  # must not be needed
    again = trained(worker, 0, -1)
    assert again.report == first.report
    evaluate = order_of(rpc.ORDER_KIND_EVALUATE, 0, 0, committed=0, views=["after_downlink"])
    assert worker.execute(evaluate, Bundle()).failure == ""
    assert "NoneType" in worker.execute(order_of(rpc.ORDER_KIND_TRAIN, 0, -1), Bundle()).failure


def test_a_worker_that_comes_back_computes_the_same(worker, digits):
    trained(worker, 0, -1)
    trained(worker, 1, 0, committed=0)
    expected = bytes_of(worker.states, 1)
    again = Worker(
        0, worker.data, StateDirectory(worker.states.path), worker.experiment, worker.device
    )
    trained(again, 1, 0, committed=0)
    assert bytes_of(again.states, 1) == expected


def test_a_kept_result_whose_state_was_dropped_is_computed_again(worker):
    """A round without this client was scored, and now it is its turn again.

    Sending the result kept in memory alone would leave the client without the state its upload
    belongs to.
    """
    trained(worker, 0, -1)
    trained(worker, 5, 0, committed=0)
    expected = bytes_of(worker.states, 5)
    score = order_of(rpc.ORDER_KIND_EVALUATE, 4, 0, committed=4, views=["after_downlink"])
    assert worker.execute(score, Bundle()).failure == ""
    assert worker.states.versions() == [0, 5]
    (worker.states.path / "state-00000005.safetensors").unlink()
    trained(worker, 5, 0, committed=4)
    assert bytes_of(worker.states, 5) == expected
    trained(worker, 6, 5, committed=5)


def test_after_a_roll_back_nothing_kept_in_memory_is_sent(worker, monkeypatch):
    """The replay may come to another payload, from which the same interaction gives another."""
    trained(worker, 0, -1)
    trained(worker, 1, 0, committed=0)
    trained(worker, 2, 1, committed=1)
    monkeypatch.setattr(
        "fedmodels.training.loop.ClientHalf.train", None
    )  # computed again: it is called
    assert "NoneType" in worker.execute(order_of(rpc.ORDER_KIND_TRAIN, 2, 0, 0), Bundle()).failure


def test_what_goes_wrong_fails_one_order(worker):
    lost = worker.execute(order_of(rpc.ORDER_KIND_TRAIN, 5, 3), Bundle())
    assert "state-00000003.safetensors is missing" in lost.failure
    unknown = worker.execute(order_of(rpc.ORDER_KIND_TRAIN, 0, -1, task=9), Bundle())
    assert "has no task 9" in unknown.failure
    trained(worker, 0, -1)


def test_superseded_work_is_abandoned(worker, monkeypatch):
    tick = Worker._tick

    def superseded(self, *facts):
        self.progress.superseded = True
        tick(self, *facts)

    monkeypatch.setattr(Worker, "_tick", superseded)
    assert worker.execute(order_of(rpc.ORDER_KIND_TRAIN, 0, -1), Bundle()) is None
    assert worker.states.versions() == []
    monkeypatch.setattr(Worker, "_tick", tick)
    trained(worker, 0, -1)


@pytest.mark.parametrize(("kind", "is_dropped"), [("TRAIN", True), ("EVALUATE", False)])
def test_a_beat_ends_a_training_and_no_score(worker, monkeypatch, kind, is_dropped):
    """An interaction is committed when its scores are asked for: nobody wants its training then.

    A client that is not of the cohort trains for its score, which may take longer than a beat.
    """
    link = Link("127.0.0.1:1")
    monkeypatch.setattr(link, "_beat", lambda *a, **k: rpc.BeatResponse(superseded=True))
    tick = Worker._tick

    def beating(self, *facts):
        assert link.beat(Membership(0, "run", b"token"), self.progress, -1)
        tick(self, *facts)

    monkeypatch.setattr(Worker, "_tick", beating)
    order = order_of(rpc.OrderKind.Value(f"ORDER_KIND_{kind}"), 0, -1)
    order.views.append("after_local")
    found = worker.execute(order, Bundle())
    assert (found is None) == is_dropped
    assert is_dropped or not found.failure


def test_method_without_private_state_writes_nothing(digits, tmp_path):
    experiment = tiny_experiment()
    states = StateDirectory(tmp_path / "0")
    worker = Worker(0, open_data(digits, 0), states, experiment, torch.device("cpu"))
    ctx = context_of(experiment, digits)
    payload, _ = payload_of(experiment, ctx)
    found = worker.execute(order_of(rpc.ORDER_KIND_TRAIN, 0, -1), payload)
    assert found.failure == ""
    assert states.versions() == []
    assert json.loads(worker.data.announcement())["num_classes"] == 10


def test_a_sync_that_fails_ends_no_later_one(caplog):
    """Their thread is started once in a process."""
    done = threading.Event()
    _SYNCER.want(lambda: 1 / 0)
    _SYNCER.want(done.set)
    assert done.wait(30)
    assert "ZeroDivisionError" in caplog.text


def test_a_fork_begins_with_no_thread_that_syncs():
    """The values of the parent are there when they are set anew, without the parent's lock."""
    syncer, done = _Syncer(), [threading.Event(), threading.Event()]
    syncer.want(done[0].set)
    assert done[0].wait(60)
    syncer._begin_anew()  # as what os.register_at_fork calls
    with syncer._starting:
        assert syncer._thread is None
    syncer.want(done[1].set)
    assert done[1].wait(60)
