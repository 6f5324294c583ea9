"""What the server keeps of clients is written when it changes, and only then."""

import dataclasses

import pytest
import torch

from fedmodels.errors import ArchiveError
from fedmodels.tensors.bundle import Bundle, GeneratorState, state_digest
from fedmodels.training.contexts import ServerState
from fedsrv.state.state_files import ClientParts
from fedsrv.state.store import Store
from tests.conftest import tiny_experiment


@pytest.fixture
def opened(tmp_path):
    held = []

    def open_store(resume=True):
        while held:
            held.pop().close()
        held.append(Store(tmp_path / "run", tiny_experiment(), resume))
        return held[-1]

    yield open_store
    while held:
        held.pop().close()


def client(value, **generators):
    made = {
        k: GeneratorState(v, {"net/w": torch.full((4,), float(v))}) for k, v in generators.items()
    }
    return Bundle(weights={"personal/w": torch.full((2,), float(value))}, generators=made)


def state(clients):
    return ServerState(Bundle(weights={"base/w": torch.zeros(2)}), Bundle(), clients)


def commit(store, number, found):
    facts = {"interaction": number, "round": number, "cohort": [0], "metrics": {}}
    store.commit(facts, found, None)


def parts(store):
    return sorted(p.name for p in store.states.glob("part-*"))


def digest(found):
    return state_digest(found.named())


FIRST = [
    "part-clients-0-00000000.safetensors",
    "part-clients-0-g3-00000000.safetensors",
    "part-clients-0-g7-00000000.safetensors",
    "part-clients-10-00000000.safetensors",
]


def test_unchanged_parts_keep_their_file(opened):
    store = opened(resume=False)
    one = state({0: client(1, g3=1, g7=1), 10: client(2)})
    commit(store, 0, one)
    assert parts(store) == FIRST
    inode = (store.states / FIRST[1]).stat().st_ino
    held = one.clients[0]
    new = {**held.generators, "g7": GeneratorState(2, {"net/w": torch.ones(4)})}
    two = state({0: dataclasses.replace(held, generators=new), 10: one.clients[10]})
    commit(store, 1, two)
    added = set(parts(store)) - set(FIRST)
    assert added == {f"part-clients-0{k}-00000001.safetensors" for k in ("", "-g7")}
    assert (store.states / FIRST[1]).stat().st_ino == inode
    assert digest(store.state(0)) == digest(one)
    assert digest(store.state(1)) == digest(two)


def test_what_was_read_is_not_written_again(opened):
    commit(opened(resume=False), 0, state({0: client(1, g3=1, g7=1), 10: client(2)}))
    store = opened()
    commit(store, 1, store.state(0))
    assert parts(store) == FIRST
    assert digest(opened().state(1)) == digest(opened().state(0))


def test_parts_live_as_long_as_a_state_names_them(opened):
    store = opened(resume=False)
    kept = client(1, g3=1)
    for number in range(4):
        commit(store, number, state({0: kept, 1: client(number)}))
    store.prune(2)
    assert parts(store) == [
        "part-clients-0-00000000.safetensors",
        "part-clients-0-g3-00000000.safetensors",
        "part-clients-1-00000002.safetensors",
        "part-clients-1-00000003.safetensors",
    ]
    assert digest(store.state(3)) == digest(state({0: kept, 1: client(3)}))
    store.roll_back(2)
    assert "part-clients-1-00000003.safetensors" in parts(store)  # it may serve again
    commit(store, 3, state({0: kept}))  # the replay came to something else
    assert "part-clients-1-00000003.safetensors" not in parts(store)
    store.roll_back(-1)
    commit(store, 0, state({}))
    assert parts(store) == []


def test_after_a_roll_back_parts_are_written_anew(opened):
    store = opened(resume=False)
    commit(store, 0, state({0: client(1, g3=1)}))
    commit(store, 1, state({0: client(2, g3=2)}))
    store.roll_back(0)
    again = state({0: client(5, g3=5)})
    commit(store, 1, again)
    assert digest(opened().state(1)) == digest(again)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_lost_part_makes_its_commits_unusable(opened, damage):
    """After a crash the run goes on from the last commit that is whole."""
    store = opened(resume=False)
    before = state({0: client(1, g3=1)})
    commit(store, 0, before)
    commit(store, 1, state({0: client(2, g3=2)}))
    path = store.states / "part-clients-0-g3-00000001.safetensors"
    if damage == "gone":
        path.unlink()
        assert not store.has_state(1)
    else:
        path.write_bytes(path.read_bytes()[:-3])
    assert store.has_state(0)
    with pytest.raises(ArchiveError):
        store.state(1)
    store = opened()
    assert store.committed == 0
    assert digest(store.state(0)) == digest(before)


@pytest.mark.parametrize(
    "manifest",
    [
        {"clients/0/g3": "part-clients-0-g3-00000000.safetensors"},
        {"clients/0": "../part-clients-0-00000000.safetensors"},
        {"clients/0": 3},
        {"own": "part-clients-0-00000000.safetensors"},
    ],
)
def test_a_manifest_names_files_of_its_directory_and_clients_before_generators(opened, manifest):
    store = opened(resume=False)
    commit(store, 0, state({0: client(1, g3=1)}))
    (part,) = manifest
    with pytest.raises(ArchiveError, match=f"the manifest of parts is damaged at '{part}'"):
        ClientParts(store.states).load(manifest)


def test_parts_of_a_commit_that_never_was(opened):
    """A crash between the parts and the state file, or in the middle of a part."""
    store = opened(resume=False)
    commit(store, 0, state({0: client(1)}))
    (store.states / "part-clients-0-00000001.safetensors").write_bytes(b"whole")
    (store.states / ".part-clients-1-00000001.safetensors.x1").write_bytes(b"half")
    store = opened()
    assert parts(store) == ["part-clients-0-00000000.safetensors"]
    assert not list(store.states.glob(".part-*"))


def test_sync_reaches_parts_of_skipped_interactions(opened, monkeypatch):
    """The syncing thread asks for the newest interaction only."""
    store, synced = opened(resume=False), []
    monkeypatch.setattr("fedsrv.state.store.sync_path", lambda path: synced.append(path.name))
    kept = client(1, g3=1)
    commit(store, 0, state({0: kept}))
    commit(store, 1, state({0: kept, 1: client(3)}))
    store.sync(1)
    wanted = {"part-clients-0-00000000", "part-clients-0-g3-00000000", "part-clients-1-00000001"}
    assert wanted <= {name.removesuffix(".safetensors") for name in synced}
    synced.clear()
    store.sync(1)
    assert not [name for name in synced if name.startswith("part-")]
