"""A file system without locks: each place that needs one says so, and what to do."""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
from types import SimpleNamespace

import pytest

from fedcli.data.store import known_rows
from fedcli.data.store.growing import alone
from fedcli.runtime.deployed import Deployed
from fedcli.runtime.state import lock_states
from fedmodels.errors import ArchiveError, ArchiveNotWritten, ConfigError, RunFailed
from fedmodels.host import files
from fedmodels.host.files import no_locks
from fedmodels.host.line_file import append_lines
from fedmodels.privacy.ledger_file import LedgerFile
from fedsrv.identity.invitations import invitations
from fedsrv.launch.remote_host import Dealing, deal
from fedsrv.state.ledger import Ledger
from fedsrv.state.run_directory import lock, writing

LINE = "its file system has no locks .*put it on a local disk, or mount this one with locks"
pytestmark = pytest.mark.skipif(files.fcntl is None, reason="Windows has locks of its own")


def sqlite_error(code=sqlite3.SQLITE_IOERR_LOCK):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    return error


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK])
def lockless(request, monkeypatch):
    """Let each lock of a file and each use of a database fail as on such a file system."""

    def fails(*_):
        raise OSError(request.param, os.strerror(request.param))

    def connect(*_, **__):
        raise sqlite_error()

    monkeypatch.setattr(files.fcntl, "flock", fails)
    monkeypatch.setattr(files.fcntl, "lockf", fails)
    monkeypatch.setattr(sqlite3, "connect", connect)


def test_a_run_directory_names_locks(lockless, tmp_path):
    with pytest.raises(RunFailed, match=LINE):
        lock(tmp_path)


def test_invitations_name_locks(lockless, tmp_path):
    with pytest.raises(ConfigError, match=LINE), invitations(tmp_path):
        pass


def test_a_client_says_that_its_states_are_not_locked(lockless, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        handle = lock_states(tmp_path / "states", [0])
    os.close(handle)
    assert "has no locks" in caplog.text


def test_a_served_model_says_that_it_is_not_locked(lockless, tmp_path, caplog):
    Deployed(tmp_path).clear_leftovers()
    assert "has no locks" in caplog.text


def test_a_task_of_a_site_says_that_it_is_not_locked(lockless, tmp_path, caplog):
    with alone(tmp_path / "0"):
        pass
    assert "has no locks" in caplog.text


def test_a_log_says_once_that_it_is_not_locked(lockless, tmp_path, caplog):
    for line in (b"one\n", b"two\n"):
        append_lines(tmp_path / "issued.jsonl", line)
    assert (tmp_path / "issued.jsonl").read_bytes() == b"one\ntwo\n"
    assert caplog.text.count("has no locks") == 1


def test_dealing_on_a_node_names_locks(lockless, tmp_path):
    assert re.search(LINE, deal(Dealing(config="", root=str(tmp_path / "data"))))


@pytest.mark.needs("serving")
def test_labels_of_a_site_name_locks(lockless, tmp_path):
    from fedplugins.serving.label_store import LabelStore

    with pytest.raises(ArchiveNotWritten, match=LINE):
        LabelStore(tmp_path, (3,))


def test_a_privacy_ledger_names_locks(lockless, tmp_path):
    with pytest.raises(ArchiveError, match=LINE):
        LedgerFile(tmp_path / "privacy.db", {})


def test_writes_in_a_run_directory_name_locks(tmp_path):
    with pytest.raises(RunFailed, match=LINE), writing(tmp_path):
        raise sqlite_error()


@pytest.mark.parametrize("code", files._SQLITE_LOCKS)
def test_sqlite_codes_of_locks_are_known(code):
    names = {c for n, c in vars(sqlite3).items() if n.startswith("SQLITE_") and "LOCK" in n}
    assert no_locks(sqlite_error(code))
    assert code == sqlite3.SQLITE_PROTOCOL or code in names


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), sqlite_error(sqlite3.SQLITE_FULL), ValueError()]
)
def test_other_errors_are_not_about_locks(error):
    assert no_locks(error) == ""


class Lockless:
    """A database whose every statement fails."""

    def execute(self, *_):
        raise sqlite_error()

    def close(self): ...


def test_the_database_of_a_run_names_locks(monkeypatch, tmp_path):
    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: Lockless())
    with pytest.raises(RunFailed, match=LINE):
        Ledger(tmp_path / "run.db", strict=False, new=True)


def test_the_known_rows_of_a_site_name_locks(monkeypatch, tmp_path):
    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: Lockless())
    held = SimpleNamespace(directory=tmp_path)
    with pytest.raises(ArchiveNotWritten, match=LINE), known_rows.known_rows(held):
        pass
