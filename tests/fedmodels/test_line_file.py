"""Files of lines on a disk that is full for a moment: whole lines, each once."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from fedcli.runtime.shown import Shown
from fedmodels.errors import FedtideError
from fedmodels.host.line_file import LineFile, append_lines
from fedmodels.privacy.releases import ReleaseLog
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.certificates import ISSUED, init_authority, issue
from fedsrv.state.audit import AUDIT, Audit, read
from fedsrv.state.store import Store
from tests.conftest import tiny_experiment


@contextmanager
def room_for(path: Path, more: int) -> Iterator[None]:
    """Let files grow to so many bytes more than one has: the next write is cut short there."""
    size = path.stat().st_size if path.exists() else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def lines(path: Path) -> list[str]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return text.splitlines()


def test_what_was_cut_short_is_gone_and_comes_once(tmp_path):
    path = tmp_path / "log"
    with closing(LineFile(path)) as file:
        file.append(b"one\n")
        with room_for(path, 9), pytest.raises(OSError, match="large"):
            file.append(b"two\nthree\nfour\n")  # "two\nthree" has room
        assert lines(path) == ["one"]
        file.append(b"two\nthree\nfour\n")
    assert lines(path) == ["one", "two", "three", "four"]


@pytest.mark.parametrize("piece", [b"tor", b"", b"x" * 200_000])
@pytest.mark.parametrize("held", [b"", b"one\n", b"y" * 70_000 + b"\n"])
def test_the_piece_that_a_killed_process_left_is_removed(tmp_path, held, piece):
    (tmp_path / "log").write_bytes(held + piece)
    append_lines(tmp_path / "log", b"two\n", sync=True)
    assert (tmp_path / "log").read_bytes() == held + b"two\n"


def fail(*_: int) -> None:
    raise OSError(5, "the disk fails")


def test_a_line_that_is_not_safe_is_not_there(tmp_path, monkeypatch):
    append_lines(tmp_path / "log", b"one\n")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="the disk fails"):
            append_lines(tmp_path / "log", b"two\n", sync=True)
    assert lines(tmp_path / "log") == ["one"]


def test_a_piece_that_could_not_be_removed_goes_before_the_next_line(tmp_path, monkeypatch):
    path = tmp_path / "log"
    with closing(LineFile(path)) as file:
        file.append(b"one\n")
        with monkeypatch.context() as patched, room_for(path, 6):
            patched.setattr(os, "ftruncate", fail)
            with pytest.raises(OSError, match="large"):
                file.append(b"two\nthree\n")
        assert path.read_bytes() == b"one\ntwo\nth"
        file.append(b"two\nthree\n")
    assert lines(path) == ["one", "two", "three"]


def audit_log(place: Path) -> tuple[Path, Callable[[str], None]]:
    log, told = Audit(place / AUDIT, None), set[str]()

    def add(word: str) -> None:
        if word not in told:  # it waits for the next time where it could not be written
            log.tell("sent", client=word)
        told.add(word)
        log.write()

    return log.path, add


def releases(place: Path) -> tuple[Path, Callable[[str], None]]:
    log = ReleaseLog(place / "privacy.jsonl")
    return log.path, lambda word: log.note(0, torch.tensor([*map(ord, word)]))


def certificates(place: Path) -> tuple[Path, Callable[[str], None]]:
    init_authority(place)

    def add(word: str) -> None:
        (place / "client-7.pem").unlink(missing_ok=True)
        (place / "client-7.key").unlink(missing_ok=True)
        issue(place, "7")

    return place / ISSUED, add


def shown(place: Path) -> tuple[Path, Callable[[str], None]]:
    show = Shown(place, [0])
    return place / "client-0.txt", lambda word: show("Leave", rpc.LeaveRequest(client_id=word))


def records(place: Path) -> tuple[Path, Callable[[str], None]]:
    store = Store(place / "run", tiny_experiment(), False)
    return store.path / "rounds.jsonl", lambda word: store._append({"interaction": word})


LOGS = [audit_log, releases, certificates, shown, records]


@pytest.mark.parametrize("log", LOGS)
def test_every_log_of_a_full_disk_holds_each_line_once(tmp_path, log):
    path, add = log(tmp_path)
    add("first")
    before = lines(path)
    with room_for(path, 20), pytest.raises((OSError, FedtideError), match="large"):
        add("second")
    assert lines(path) == before
    add("second")
    add("third")
    found = lines(path)
    assert found[: len(before)] == before
    added = 1 if log is not shown else len(before)
    assert len({*found}) == len(found) == len(before) + 2 * added
    if log is audit_log:
        assert [entry.facts["n"] for entry in read(path)] == [1, 2, 3]
    elif log is releases:
        assert len(ReleaseLog(path)) == 3
    elif log is not shown:
        assert all(json.loads(line) for line in found)
