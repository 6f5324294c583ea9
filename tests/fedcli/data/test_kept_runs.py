"""What a site that stays keeps of its runs: bounded, shared where it is alike, never grown rows."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from fedcli.data.kept_runs import INDEX, KEPT, make_room
from fedcli.data.store.site import cut
from tests.fedcli.data.test_site import TABLE, recording


def names(states: Path) -> list[str]:
    return sorted(path.name for path in states.iterdir() if path.is_dir())


def test_the_last_runs_are_kept(tmp_path: Path) -> None:
    clock = itertools.count()
    (tmp_path / "not-of-a-run").mkdir()
    for number in range(KEPT + 5):
        make_room(tmp_path, f"run-{number:04d}", lambda: float(next(clock)))
        (tmp_path / f"run-{number:04d}").mkdir()
    make_room(tmp_path, "run-0005", lambda: float(next(clock)))  # used again
    make_room(tmp_path, "run-9999", lambda: float(next(clock)))
    expected = [f"run-{n:04d}" for n in range(5, KEPT + 5) if n != 6]
    assert names(tmp_path) == ["not-of-a-run", *expected]


def test_a_run_under_way_is_kept_however_many_others_are_joined_beside_it(tmp_path: Path) -> None:
    clock = itertools.count()
    make_room(tmp_path, "first-run", lambda: float(next(clock)))
    (tmp_path / "first-run").mkdir()
    for number in range(2 * KEPT):
        beside = ["first-run"]
        make_room(tmp_path, f"run-{number:04d}", lambda: float(next(clock)), under_way=beside)
    assert names(tmp_path) == ["first-run"]
    make_room(tmp_path, "run-last", lambda: float(next(clock)))
    assert names(tmp_path) == []


def test_what_was_added_to_a_run_is_kept(tmp_path: Path) -> None:
    clock = itertools.count()
    make_room(tmp_path, "first-run", lambda: float(next(clock)))
    task = tmp_path / "first-run" / "own-data" / "abc" / "0" / "task-1"
    task.mkdir(parents=True)
    (task / "source.json").touch()
    for number in range(KEPT + 1):
        make_room(tmp_path, f"run-{number:04d}", lambda: float(next(clock)))
    assert (task / "source.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"../..": 1}', '{"a": "x"}', "\x00"])
def test_a_damaged_index_removes_nothing(tmp_path: Path, text: str) -> None:
    states = tmp_path / "site" / "states"
    (states / "some-run").mkdir(parents=True)
    (states / INDEX).write_text(text)
    for number in range(KEPT + 1):
        make_room(states, f"run-{number:04d}")
    assert (states / "some-run").exists()
    assert tmp_path.exists()


def test_cuts_that_are_alike_share_their_arrays(tmp_path: Path) -> None:
    files, states = recording(tmp_path / "a.csv", "walk sit run"), tmp_path / "states"
    places = []
    for run in ("run-0000", "run-0001"):
        make_room(states, run)
        places.append(cut(files, TABLE, 0, 0, states / run / "own-data"))
    one, other = places
    assert one != other
    arrays = sorted(path.relative_to(one) for path in one.rglob("*.npy"))
    assert arrays
    assert all(os.path.samefile(one / path, other / path) for path in arrays)
    about = Path("0") / "client.json"
    assert (one / about).read_text() == (other / about).read_text()
    assert not os.path.samefile(one / about, other / about)


def test_a_run_with_a_state_directory_of_its_own_shares_nothing(tmp_path: Path) -> None:
    files = recording(tmp_path / "a.csv", "walk sit run")
    one, other = (cut(files, TABLE, 0, 0, tmp_path / name / "own-data") for name in ("a", "b"))
    array = next(one.rglob("*.npy")).relative_to(one)
    assert not os.path.samefile(one / array, other / array)
