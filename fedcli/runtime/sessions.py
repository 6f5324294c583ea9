"""Sessions of the clients of a process on the disk, where crashes and restarts do not lose them.

A client that is alone in its process keeps its session in its state directory. Clients that share
a process share a file in the directory above, and each derives its token from the token in that
file. So ten thousand clients of one process sync one file before they join, and not ten thousand.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedmodels.errors import ArchiveError
from fedmodels.host.files import replacing, sync_path, write_once
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
            ArchiveError: the file is damaged, or cannot be read.
        """
        try:
            facts = json.loads(self.path.read_text("utf-8"))
            found = Session(facts["run_id"], bytes.fromhex(facts["token"]))
        except (FileNotFoundError, NotADirectoryError):
            return Session()
        except OSError as error:
            raise ArchiveError(f"cannot read {self.path}: {error.strerror}") from None
        except (ValueError, RecursionError, KeyError, TypeError):
            found = Session()
        if not found.token:  # tokens derived from none could be guessed
            raise ArchiveError(f"{self.path} is damaged; delete it to join afresh")
        return found

    def write(self, session: Session) -> None:
        """Store a session as :func:`write_private` does."""
        write_private(self.path, _text(session))

    def begin(self) -> Session:
        """Return the session; where there is none, store one with a fresh token first.

        Where several processes begin at the same time, all get the token of the first.

        Raises:
            ArchiveError: the file is damaged, or cannot be written.
        """
        if not (found := self.read()).token:
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                first = Session("", secrets.token_bytes(TOKEN_BYTES))
                write_once(self.path, _text(first), private=True)
            except OSError as error:
                raise ArchiveError(
                    f"state directory {self.path.parent}: {error.strerror}"
                ) from None
            found = self.read()
        return found


class Sessions:
    """The sessions of the clients of one process."""

    def __init__(self, root: Path, *, shared: bool) -> None:
        """Read and write nothing yet; clients have their state directories in ``root``.

        ``shared`` says whether clients without a session get one together, in ``root``.
        """
        self._root, self._is_shared = root, shared

    def of(self, client: ClientId) -> Session:
        """Return a client's session; its token is safe on the disk before it is first used.

        A client looks for the session of an earlier process in its own directory, then in the
        shared one. A client that is alone takes the shared session only if its state directory
        exists without a session, since it then shared a process before. A new client gets a new
        session, because the shared one may belong to another run.

        Raises:
            ArchiveError: a file is damaged, or cannot be written.
        """
        own = SessionFile(self._root / str(client))
        found = own.read()
        if found.token:
            return found
        if self._is_shared or (own.path.parent.is_dir() and SessionFile(self._root).read().token):
            common = SessionFile(self._root).begin()
            return Session(common.run_id, derived(common.token, client))
        return self._begin_alone(own)

    def joined(self, client: ClientId, run_id: str) -> None:
        """Store which run a client's session is of.

        Raises:
            ArchiveError: meanwhile another process joined another run with this session, or the
                file is damaged or cannot be written.
        """
        for file in (SessionFile(self._root / str(client)), SessionFile(self._root)):
            session = file.read()
            if session.token:
                if session.run_id not in ("", run_id):
                    raise ArchiveError(
                        f"{file.path} belongs to run {session.run_id[:8]} by now, and client "
                        f"{client} joined run {run_id[:8]}; give each run a --state-dir of its own"
                    )
                if not session.run_id:
                    file.write(Session(run_id, session.token))
                return

    def _begin_alone(self, own: SessionFile) -> Session:
        """Return a session of a client's own, as :meth:`SessionFile.begin` does.

        A state directory that this makes has its session from the first moment on. A crash that
        left one without would make the client pass for one that shared a process.
        """
        place = own.path.parent
        if not place.is_dir():
            fresh = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
            SessionFile(fresh).begin()
            with suppress(OSError):  # another process was first, or begin() says what is wrong
                os.rename(fresh, place)
                sync_path(self._root)
            shutil.rmtree(fresh, ignore_errors=True)
        return own.begin()


def derived(token: bytes, client: ClientId) -> bytes:
    """Return the token of one client of a process, 16 bytes; no other client has the same."""
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
