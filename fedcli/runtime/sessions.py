"""Who the clients of a process are to the server, over crashes and restarts.

A client alone in its process keeps its session in its state directory. Clients that share a process
share a file in the directory above: each derives its token from the one token in it. So ten
thousand clients of one process sync one file before they join, and not ten thousand.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedmodels.errors import ArchiveError
from fedmodels.files import replacing, sync_path
from fedmodels.tensors.bundle import ClientId

TOKEN_BYTES = 16


@dataclass(frozen=True)
class Session:
    """Which run a directory belongs to, and the token that proves it."""

    run_id: str = ""
    token: bytes = b""


class SessionFile:
    """``session.json`` of a directory, readable by its owner only."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "session.json"

    def read(self) -> Session:
        """Return the session, or an empty one where there is none.

        Raises:
            ArchiveError: the file is damaged.
        """
        try:
            facts = json.loads(self.path.read_text())
            return Session(facts["run_id"], bytes.fromhex(facts["token"]))
        except (FileNotFoundError, NotADirectoryError):
            return Session()
        except (ValueError, KeyError, TypeError):
            raise ArchiveError(f"{self.path} is damaged; delete it to join afresh") from None

    def write(self, session: Session) -> None:
        """Store a session whole or not at all, safely on the disk.

        Raises:
            ArchiveError: it cannot be written.
        """
        write_private(self.path, _text(session))

    def begin(self) -> Session:
        """Return the session; where there is none, store a fresh token first.

        Several processes may begin at the same time: all get the token of the first.

        Raises:
            ArchiveError: the file is damaged, or cannot be written.
        """
        if not (found := self.read()).token:
            fresh = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
            session = Session(found.run_id, secrets.token_bytes(TOKEN_BYTES))
            try:
                fresh.parent.mkdir(parents=True, exist_ok=True)
                write_private(fresh, _text(session))
                with suppress(FileExistsError):
                    os.link(fresh, self.path)
                fresh.unlink()
                sync_path(self.path.parent)
            except OSError as error:
                raise ArchiveError(
                    f"state directory {self.path.parent}: {error.strerror}"
                ) from None
            found = self.read()
        return found


class Sessions:
    """The sessions of the clients of one process."""

    def __init__(self, root: Path, *, shared: bool) -> None:
        """Store where they are kept: by client, or, where ``shared``, together in ``root``."""
        self._root, self._is_shared = root, shared

    def of(self, client: ClientId) -> Session:
        """Return a client's session; its token is safe on the disk before it is first used.

        The layout of an earlier process counts: a client finds its session in either place.

        Raises:
            ArchiveError: a file is damaged, or cannot be written.
        """
        own = SessionFile(self._root / str(client))
        found = own.read()
        if found.token:
            return found
        if self._is_shared or (own.path.parent.is_dir() and SessionFile(self._root).read().token):
            together = SessionFile(self._root).begin()
            return Session(together.run_id, derived(together.token, client))
        return own.begin()

    def joined(self, client: ClientId, run_id: str) -> None:
        """Store which run a client's session is of."""
        for file in (SessionFile(self._root / str(client)), SessionFile(self._root)):
            session = file.read()
            if session.token:
                if session.run_id != run_id:
                    file.write(Session(run_id, session.token))
                return


def derived(token: bytes, client: ClientId) -> bytes:
    """Return the token of one client of a process, (16,) bytes."""
    return hmac.digest(token, str(client).encode(), hashlib.sha256)[:TOKEN_BYTES]


def _text(session: Session) -> bytes:
    return json.dumps({"run_id": session.run_id, "token": session.token.hex()}).encode()


def write_private(path: Path, data: bytes) -> None:
    """Write a small file, readable by its owner only, whole or not at all, safely on the disk.

    Raises:
        ArchiveError: it cannot be written.
    """
    try:
        with replacing(path, sync=True, private=True) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise ArchiveError(f"cannot write {path}: {error.strerror}") from None
