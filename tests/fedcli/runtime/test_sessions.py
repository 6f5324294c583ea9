"""Sessions of one client and of many: kept, private, and the same after any restart."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedcli.runtime.link import Link
from fedcli.runtime.sessions import Session, SessionFile, Sessions
from fedmodels.errors import ArchiveError


def test_a_session_survives_and_is_private(tmp_path):
    file = SessionFile(tmp_path)
    assert file.read() == Session()
    for token in (b"\x00\xff", b"second"):
        file.write(Session("run", token))
        assert SessionFile(tmp_path).read() == Session("run", token)
    assert stat.S_IMODE((tmp_path / "session.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"run_id": "x", "token": "zz"}', '{"run_id": "", "token": ""}', '"text"'],
)
def test_a_damaged_session_is_one_line(tmp_path, text):
    (tmp_path / "session.json").write_text(text)
    with pytest.raises(ArchiveError, match="delete it to join afresh"):
        SessionFile(tmp_path).read()


def test_processes_that_begin_at_once_share_the_first_token(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: SessionFile(tmp_path / "a").begin(), range(8)))
    assert len(found) == 1
    assert os.listdir(tmp_path / "a") == ["session.json"]


def test_clients_of_a_process_share_a_file_and_no_token(tmp_path):
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
def test_a_client_keeps_its_session_when_others_move_in_or_out(tmp_path, shared):
    before = Sessions(tmp_path, shared=shared)
    session = before.of(3)
    before.joined(3, "run")
    (tmp_path / "3").mkdir(exist_ok=True)  # where its private state is
    assert Sessions(tmp_path, shared=not shared).of(3) == Session("run", session.token)


def test_a_client_of_another_run_is_not_drawn_in(tmp_path):
    """A newcomer that is alone in its process begins afresh beside the clients of another run."""
    others = Sessions(tmp_path, shared=True)
    others.of(0)
    others.joined(0, "another")
    assert Sessions(tmp_path, shared=False).of(5).run_id == ""


def test_a_file_system_without_hard_links_keeps_sessions(tmp_path, monkeypatch):
    def link(*_: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    for shared in (True, False):
        root = tmp_path / str(shared)
        session = Sessions(root, shared=shared).of(0)
        assert len(session.token) == 16
        assert Sessions(root, shared=shared).of(0) == session
        assert [p.name for p in root.rglob("*.tmp")] == []


def test_processes_of_two_runs_do_not_take_a_session_from_each_other(tmp_path):
    """Both begin before either has joined; the one that joins later is told so."""
    first, second = Sessions(tmp_path, shared=True), Sessions(tmp_path, shared=True)
    assert first.of(0).run_id == second.of(1).run_id == ""
    first.joined(0, "first")
    with pytest.raises(ArchiveError, match="a --state-dir of its own"):
        second.joined(1, "second")
    assert first.of(0).run_id == "first"


class Snapshots:
    """Copies of a directory, one from before each call that changes it: what kill -9 may leave."""

    CALLS = ("mkdir", "open", "link", "rename", "replace", "unlink", "rmdir")

    def __init__(self, root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.kept, self.found = root, kept, list[Path]()
        self._is_taking = False
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._before(getattr(os, name)))

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.take()
            return call(*args, **options)

        return wrapped

    def take(self) -> None:
        if not self._is_taking:
            self._is_taking = True
            self.found.append(self.kept / str(len(self.found)))
            shutil.copytree(self.root, self.found[-1])
            self._is_taking = False


@pytest.mark.usefixtures("synced")
def test_kill_at_any_moment_draws_no_newcomer_into_another_run(tmp_path, monkeypatch):
    root = tmp_path / "states"
    Sessions(root, shared=True).of(0)
    Sessions(root, shared=True).joined(0, "another")
    with monkeypatch.context() as patched:
        snapshots = Snapshots(root, tmp_path / "left", patched)
        begun = Sessions(root, shared=False).of(5)
        snapshots.take()
    assert len(snapshots.found) > 8
    for left in snapshots.found:
        again = Sessions(left, shared=False)
        assert again.of(5).run_id == ""
        again.joined(5, "mine")
        assert Sessions(left, shared=True).of(0).run_id == "another"
    assert Sessions(snapshots.found[-1], shared=False).of(5).token == begun.token


@pytest.mark.usefixtures("synced")
def test_kill_at_any_moment_loses_no_session_that_clients_share(tmp_path, monkeypatch):
    root = tmp_path / "states"
    root.mkdir()
    with monkeypatch.context() as patched:
        snapshots = Snapshots(root, tmp_path / "left", patched)
        sessions = Sessions(root, shared=True)
        used = {client: sessions.of(client).token for client in (0, 1)}
        unused = len(snapshots.found)  # up to here, no token was used
        for client in (0, 1):
            sessions.joined(client, "run")
        snapshots.take()
    assert len(snapshots.found) > unused > 4
    for number, left in enumerate(snapshots.found):
        again = Sessions(left, shared=True)
        found = {client: again.of(client) for client in (0, 1)}
        assert found[0].token != found[1].token
        assert number < unused or {c: s.token for c, s in found.items()} == used
        for client in found:
            again.joined(client, "run")
    assert Sessions(snapshots.found[-1], shared=True).of(1).run_id == "run"


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchiveError, match="state directory"):
        Sessions(tmp_path / "file", shared=False).of(0)


def test_a_missing_authority_is_suspected_before_the_first_answer_alone():
    """A server that is killed closes its sockets as well, and has nothing to do with TLS."""
    link = Link("127.0.0.1:1")
    assert "give --tls-ca" in link._explained("Socket closed")
    assert link._patiently("a call", lambda: 1) == 1
    assert link._explained("Socket closed") == "the connection was ended"
    link.close()


def test_a_certificate_is_suspected_where_no_connection_comes_about_alone():
    """A stream that was open has shown that the certificates are right."""
    link = Link("127.0.0.1:1", grpc.ssl_channel_credentials())
    opened = "Stream removed (Socket closed)"
    assert link._explained(opened) == "the connection was ended"
    refused = "failed to connect to all addresses; last error: UNAVAILABLE: Socket closed"
    assert "give --tls-cert and --tls-key beside --tls-ca" in link._explained(refused)
    link.close()
