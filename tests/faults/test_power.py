"""The model of a loss of power: what was synced stays, the rest may be gone."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.inside import fault_disk
from tests.faults.power import lose_power


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose syncs are recorded."""
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(fault_disk, "_root", None)
    monkeypatch.setattr(fault_disk, "_vault", Path())
    fault_disk.record(tmp_path / "disk", tmp_path)
    return tmp_path / "disk"


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    safe = fault_disk.about_to_sync(handle)
    os.fsync(handle)
    safe()
    os.close(handle)


def lost(place: Path, rng: random.Random | None = None) -> dict[str, bytes]:
    """Lose the power now; return what is left."""
    lose_power(place.parent / "vault", [place], rng)
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_a_file_stays_with_its_name(place):
    (place / "a").write_bytes(b"one")
    sync(place / "a")
    sync(place)
    assert lost(place) == {"a": b"one"}


def test_a_name_needs_its_directory_synced(place):
    (place / "a").write_bytes(b"one")
    sync(place / "a")
    assert lost(place) == {}


def test_what_was_written_after_the_sync_is_gone(place):
    (place / "a").write_bytes(b"one")
    sync(place / "a")
    sync(place)
    with (place / "a").open("ab") as file:
        file.write(b" two")
    assert lost(place) == {"a": b"one"}


def test_a_name_without_a_synced_file_is_an_empty_one(place):
    (place / "a").write_bytes(b"one")
    sync(place)
    assert lost(place) == {"a": b""}


def test_a_rename_that_was_not_synced_is_undone(place):
    for name, content in (("new", b"two"), ("a", b"one")):
        (place / name).write_bytes(content)
        sync(place / name)
    sync(place)
    (place / "new").replace(place / "a")
    assert lost(place) == {"new": b"two", "a": b"one"}


def test_a_removed_file_comes_back(place):
    (place / "a").write_bytes(b"one")
    sync(place / "a")
    sync(place)
    (place / "a").unlink()
    (place / "b").write_bytes(b"other")  # it must not get the inode of the other
    assert lost(place) == {"a": b"one"}


def test_what_is_there_afterwards_is_safe(place):
    (place / "a").write_bytes(b"one")
    sync(place / "a")
    sync(place)
    assert lost(place) == lost(place) == {"a": b"one"}


def test_seeds_find_every_outcome(place, tmp_path):
    """A file that was rewritten is the old one, the new one or torn, or it has no name yet."""
    found = set()
    for seed in range(40):
        (place / "a").unlink(missing_ok=True)
        sync(place)
        (place / "a").write_bytes(b"four")
        left = lost(place, random.Random(seed))
        found.add(left.get("a"))
    assert found == {None, b"", b"fo", b"four"}


def test_the_database_is_safe_as_it_stands(place):
    (place / "run.db").write_bytes(b"rows")
    (place / "run.db-shm").write_bytes(b"shared memory")
    assert lost(place) == {"run.db": b"rows"}
