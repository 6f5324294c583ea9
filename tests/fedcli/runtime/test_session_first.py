"""A client's session outlives a crash at any moment of joining."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcli.runtime.host import Host
from fedcli.runtime.sessions import Session, SessionFile
from fedmodels.errors import PayloadError
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.progress.events import EventLog
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.spool import Spool


class Killed(Exception):
    """What a kill looks like from inside."""


class FatalLink:
    """A link to a server that admits a client; the client never gets to know it."""

    def __init__(self) -> None:
        self.tokens: list[bytes] = []

    def join(self, request: rpc.JoinRequest) -> Any:
        self.tokens.append(request.token)
        raise Killed


def cohort(digits: Path, tmp_path: Path) -> RemoteCohort:
    return RemoteCohort(3, Spool(tmp_path / "spool", 0), EventLog(), admission=Admission({}))


def test_a_client_killed_while_it_joins_comes_back_as_itself(digits, tmp_path):
    link = FatalLink()
    for _ in range(2):
        host = Host([0], link, digits, tmp_path / "states", torch.device("cpu"))  # type: ignore[arg-type]
        with pytest.raises(Killed):
            host.join()
    first, second = link.tokens
    assert len(first) == 16
    assert first == second == SessionFile(tmp_path / "states" / "0").read().token


def test_the_server_takes_the_token_a_client_brings(digits, tmp_path):
    text = (digits / "0" / "client.json").read_text()
    server = cohort(digits, tmp_path)
    assert server.join(0, text, b"a" * 16, ()) == b"a" * 16
    assert server.join(0, text, b"a" * 16, ()) == b"a" * 16
    assert len(server.join(1, text, b"", ())) == 16
    with pytest.raises(PayloadError, match="a session token has 64 bytes at most"):
        server.join(2, text, b"a" * 65, ())


@pytest.mark.usefixtures("synced")
def test_a_session_is_safe_on_the_disk(tmp_path, monkeypatch):
    """The file before it gets its name, and then the name."""
    synced, fsync = list[str](), os.fsync

    def noted(handle: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    (tmp_path / "0").mkdir()
    monkeypatch.setattr(os, "fsync", noted)
    SessionFile(tmp_path / "0").write(Session("run", b"token"))
    content, name = synced
    assert fnmatch(content, ".session.json.*.tmp")
    assert name == "0"
