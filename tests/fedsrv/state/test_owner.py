"""One thread owns a run's database: what others ask for waits in order, and nothing is torn."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from fedsrv.engine.commits import Syncer
from fedsrv.state.audit import AUDIT, Audit
from fedsrv.state.ledger import Ledger
from fedsrv.state.owner import Owned, Owner, owned
from fedsrv.state.store import Store
from fedsrv.state.verification import verified
from tests.conftest import tiny_experiment
from tests.fedsrv.state.test_store import committed, record, state, wait_for

GROWTH = {"interaction": 1, "tasks": []}


@pytest.fixture
def store(tmp_path):
    with closing(Store(tmp_path / "run", tiny_experiment(), False)) as opened:
        yield opened


class Thing:
    """What a thread owns."""

    value = Owned[int]()

    def __init__(self, owner):
        self.owner = owner

    @owned
    def count(self):
        self.value = self.__dict__.get("value", 0) + 1
        return self.value


def test_another_thread_that_touches_an_owned_value_fails():
    owner = Owner("its thread")
    try:
        thing = Thing(owner)
        assert (thing.count(), thing.count()) == (1, 2)
        for touch in (lambda: thing.value, lambda: setattr(thing, "value", 3)):
            with pytest.raises(AssertionError, match="value belongs to another thread"):
                touch()
        assert owner.run(lambda: thing.value) == 2
    finally:
        owner.close()


def test_a_store_has_such_values(store):
    committed(store, 0)
    for touch in (
        lambda: store._highest,
        lambda: store._files.kept,
        lambda: store._files.drop([0]),
    ):
        with pytest.raises(AssertionError, match="belongs to another thread"):
            touch()
    with pytest.raises(Exception, match="same thread"):
        store.ledger.db.execute("SELECT 1")


@pytest.fixture
def slow(store, monkeypatch):
    """A disk whose next commit waits; yields when it has begun, and what lets it go on."""
    begun, go_on, real = threading.Event(), threading.Event(), Ledger.transaction

    @contextlib.contextmanager
    def waiting(ledger):
        with real(ledger):
            yield
            begun.set()
            go_on.wait(30)

    monkeypatch.setattr(Ledger, "transaction", waiting)
    yield begun, go_on
    go_on.set()


def test_a_growth_waits_for_a_slow_commit(store, slow):
    """Both were transactions of one connection: the second one began within the first."""
    begun, go_on = slow
    with ThreadPoolExecutor(2) as threads:
        commit = threads.submit(store.commit, record(0), state(0), None)
        assert begun.wait(30)
        growth = threads.submit(store.grow, GROWTH)
        described = threads.submit(store.add_profiles, {3: "{}"})
        go_on.set()
        for done in (commit, growth, described):
            done.result(30)
    assert store.ledger.growths() == [GROWTH]
    assert store.committed == 0
    assert verified(store.path).wrong == []


def test_what_is_in_memory_is_read_while_a_commit_is_slow(store, slow):
    begun, go_on = slow
    with ThreadPoolExecutor(1) as threads:
        commit = threads.submit(store.commit, record(0), state(0), None)
        assert begun.wait(30)
        assert (store.committed, store.newest) == (-1, -1)
        assert store.ledger.record(0) is None
        assert store.gone(0) == {}
        assert store.ended() is None
        go_on.set()
        commit.result(30)
    assert store.committed == 0


def test_no_statement_is_lost_or_taken_twice(store):
    """Eight threads write at once; each statement has its own number, and every row one."""
    before = store.evidence.chain.head.number

    def write(thread):
        for n in range(5):
            store.add_profiles({10 * thread + n: "{}"})
            store.grow({"interaction": thread, "tasks": [n]})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert store.evidence.chain.head.number == before + 80
    assert len(store.ledger.growths()) == 40
    assert len(store.ledger.profiles()) == 40
    assert verified(store.path).wrong == []


def test_a_disk_that_is_full_at_the_end_of_a_transaction_leaves_none_open(store, monkeypatch):
    real, full = store.ledger.db, [True]

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def execute(self, statement, *rest):
            if statement == "COMMIT" and full:
                raise OSError(28, "No space left on device")
            return real.execute(statement, *rest)

    monkeypatch.setattr(store.ledger, "db", Full())
    with pytest.raises(Exception, match="No space left"):
        store.grow(GROWTH)
    full.clear()
    store.grow(GROWTH)
    assert store.ledger.growths() == [GROWTH]
    monkeypatch.undo()
    assert verified(store.path).wrong == []


# --- what is safe ---------------------------------------------------------------------------------


def test_what_a_roll_back_undid_is_not_safe_when_a_slow_sync_ends():
    """The sync of 5 began before the run went back to 2; 3 and 4 are other files since."""
    asked, begun, go_on = [], [threading.Event(), threading.Event()], [threading.Event()] * 1
    go_on.append(threading.Event())

    def slow(interaction):
        at = len(asked)
        asked.append(interaction)
        if at < 2:
            begun[at].set()
            go_on[at].wait(30)

    syncer = Syncer(slow)
    try:
        syncer.want(5)
        assert begun[0].wait(30)
        for interaction in (2, 3, 4):
            syncer.want(interaction)
        go_on[0].set()
        assert begun[1].wait(30), "what was replayed is synced by itself"
        assert syncer.durable == -1, "nothing that the first sync saw counts"
        go_on[1].set()
        wait_for(lambda: syncer.durable == 4)
    finally:
        for event in go_on:
            event.set()
        syncer.close()
    assert asked == [5, 4]


def test_parts_that_are_written_again_after_a_roll_back_are_synced_again(store, monkeypatch):
    """A slow sync of the files from before marks none of the new ones as safe."""
    committed(store, 0, 1)
    _, files = store._unsynced(1)
    store.roll_back(0)
    store.owner.run(store._files.synced, files)  # it ends now
    committed(store, 1)
    synced = []
    monkeypatch.setattr("fedsrv.state.store.sync_path", lambda path: synced.append(path.name))
    store.sync(1)
    assert any(name.startswith("part-") for name in synced)


def test_a_log_knows_the_last_line_that_was_synced(tmp_path, monkeypatch):
    """A sync that began earlier and ends later takes nothing back."""
    with closing(Audit(tmp_path / AUDIT, None)) as log:
        log.tell("joined", client=0)
        log.write()
        sync, later = log._file.sync, []

        def slow():
            if not later:
                later.append(True)
                log.tell("joined", client=1)
                log.write()
                log.sync()  # of another thread
            sync()

        monkeypatch.setattr(log._file, "sync", slow)
        log.sync()
        assert log.safe.lines == 2


class Unread(dict):
    """What grows with a run: nobody may go through it at each join, or at each commit."""

    def __iter__(self):
        raise AssertionError("all of it is looked at")

    keys = values = items = copy = __iter__


def test_a_join_and_a_commit_cost_the_same_however_long_the_run_is(tmp_path):
    """A join took nine milliseconds with ten thousand clients, as it sorted and copied them all."""
    ledger = Ledger(tmp_path / "run.db", strict=False, new=True)
    ledger._clients, ledger._states = Unread(ledger._clients), Unread(ledger._states)
    ledger.add_profiles({3: "{}"})
    ledger.append({"interaction": 0}, None, {"state": "ab"})
    assert (ledger._clients[3], ledger.stated_state(0)) == ("{}", "ab")
    ledger.close()
