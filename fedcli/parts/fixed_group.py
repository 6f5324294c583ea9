"""The one group of clients whose sums a client takes part in, for good.

Two sums over sets that differ by a client tell that client's upload, and many sums over many sets
tell the mean upload of each. So a client notes the certificates of its group before it opens the
first sum, and opens that set or none (So et al., Securing Secure Aggregation, AAAI 2023). The note
outlives runs: another run id with the same settings, or with almost the same, asks for the same
uploads. Its owner lets go of a group by deleting the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedmodels.errors import ArchiveError, PayloadError
from fedmodels.host.files import write_once

NAME = "fedtide-group-{}.json"
"""The note of a client, beside its state directory."""


class FixedGroup:
    """The group of one client; used by the thread that trains. Processes may share the note."""

    def __init__(self, path: Path, members: Collection[int] | None, *, keeps: bool = True) -> None:
        """Read nothing yet.

        Args:
            path: the note.
            members: who is in the group by the config of the run; None where the clients of its
                sums may change: then the note of an earlier run holds, and none is made.
            keeps: whether its clients keep private states.
        """
        self.of_one_state = members is not None and keeps
        """Whether all of a sum begin from the private state of one interaction."""
        self.path, self._members = path, None if members is None else sorted(members)

    def check(self, keys: Mapping[int, bytes]) -> None:
        """Check that a sum is over the group, and over the same one as ever.

        Args:
            keys: the key of each client's certificate, in DER; empty where clients sign nothing.

        Raises:
            PayloadError: it is over other clients, or one has another certificate.
            ArchiveError: the note cannot be read.
        """
        if self._members is not None and sorted(keys) != self._members:
            raise PayloadError(
                f"a secure sum is over clients {_listed(keys)}, and the fixed group of this client "
                f"is {_listed(self._members)}: it opens the sum of that group or none"
            )
        noted = self._noted()
        if noted and noted.keys() != keys.keys():
            raise PayloadError(
                f"a secure sum is over clients {_listed(keys)}, and this client has opened sums "
                f"over {_listed(noted)} before: the difference would tell what single clients "
                f"sent. {self._advice}"
            )
        other = [client for client in noted if noted[client] != _digest(keys[client])]
        if other:
            raise PayloadError(
                f"client {other[0]} has another key than when this client first opened a sum with "
                "it: its certificate was issued anew, or somebody speaks for it. fedcli enrol with "
                f"the .key of before renews a certificate without that. {self._advice}"
            )

    def note(self, keys: Mapping[int, bytes], run: str) -> None:
        """Note the group, safely on the disk, before a sum over it is opened.

        Args:
            keys: as for :meth:`check`.
            run: the id of the run, for people to read.

        Raises:
            PayloadError: as :meth:`check`, as another process may have noted a group meanwhile.
            ArchiveError: it cannot be stored.
        """
        if self._members is None or self._noted():
            return
        members = {str(client): _digest(key) for client, key in sorted(keys.items())}
        facts = {"first_run": run, "members": members}
        try:
            write_once(self.path, json.dumps(facts, indent=1).encode() + b"\n", private=True)
        except OSError as error:
            raise ArchiveError(f"cannot write {self.path}: {error.strerror}") from None
        self.check(keys)

    def _noted(self) -> dict[int, str]:
        """Return the digest of each member's key; nothing before the first sum."""
        with _readable(self.path):
            try:
                members = json.loads(self.path.read_text("ascii"))["members"]
            except FileNotFoundError:
                return {}
            return {int(client): str(digest) for client, digest in members.items()}

    @property
    def _advice(self) -> str:
        return f"If that is as its owner wants it, delete {self.path}"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say that without the note nothing is opened; raise ArchiveError."""
    try:
        yield
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArchiveError(
            f"{path} is damaged; it says with whom this client opens sums, and without it none is "
            "opened"
        ) from None


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _listed(clients: Collection[int]) -> str:
    return ", ".join(map(str, sorted(clients)))
