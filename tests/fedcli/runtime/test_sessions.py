"""Sessions of one client and of many: kept, private, and the same after any restart."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedcli.runtime.sessions import Session, SessionFile, Sessions
from fedmodels.errors import ArchiveError


def test_a_session_survives_and_is_private(tmp_path: Path) -> None:
    file = SessionFile(tmp_path)
    assert file.read() == Session()
    for token in (b"\x00\xff", b"second"):
        file.write(Session("run", token))
        assert SessionFile(tmp_path).read() == Session("run", token)
    assert stat.S_IMODE((tmp_path / "session.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"run_id": "x", "token": "zz"}', '"text"'])
def test_a_damaged_session(tmp_path: Path, text: str) -> None:
    (tmp_path / "session.json").write_text(text)
    with pytest.raises(ArchiveError, match="delete it to join afresh"):
        SessionFile(tmp_path).read()


def test_processes_that_begin_at_once_share_the_first_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: SessionFile(tmp_path / "a").begin(), range(8)))
    assert len(found) == 1
    assert os.listdir(tmp_path / "a") == ["session.json"]


def test_clients_of_a_process_share_a_file_and_no_token(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, shared=True)
    found = {c: sessions.of(c) for c in range(100)}
    assert len({session.token for session in found.values()}) == 100
    assert all(len(session.token) == 16 for session in found.values())
    for client in found:
        sessions.joined(client, "run")
    assert os.listdir(tmp_path) == ["session.json"]
    again = Sessions(tmp_path, shared=True)
    assert {c: again.of(c).token for c in range(100)} == {c: s.token for c, s in found.items()}
    assert again.of(7).run_id == "run"


@pytest.mark.parametrize("shared", [True, False])
def test_a_client_keeps_its_session_when_others_move_in_or_out(
    tmp_path: Path, shared: bool
) -> None:
    before = Sessions(tmp_path, shared=shared)
    session = before.of(3)
    before.joined(3, "run")
    (tmp_path / "3").mkdir(exist_ok=True)  # where its private state is
    assert Sessions(tmp_path, shared=not shared).of(3) == Session("run", session.token)


def test_a_client_of_another_run_is_not_drawn_in(tmp_path: Path) -> None:
    """A newcomer that is alone in its process begins afresh beside the clients of another run."""
    others = Sessions(tmp_path, shared=True)
    others.of(0)
    others.joined(0, "another")
    assert Sessions(tmp_path, shared=False).of(5).run_id == ""


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchiveError, match="state directory"):
        Sessions(tmp_path / "file", shared=False).of(0)
