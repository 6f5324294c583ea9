"""The secret that noise comes from, and every release made with it: ``privacy.jsonl`` of a run.

The first line holds 32 bytes of the operating system's entropy. Each further line is one release:
its interaction, and a keyed digest of what the noise was added to. A line is on the disk before
anything of the release leaves the coordinator. After a crash the same sum gets the same noise, and
its line is there already, so nothing is spent twice. Another sum of the same interaction, as after
a roll-back with other clients, gets other noise and a line of its own: that is spent as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedmodels.errors import ArchiveError, ArchiveNotWritten, reason_of
from fedmodels.facts.position import Interaction
from fedmodels.host.files import replacing
from fedmodels.host.line_file import append_lines
from fedmodels.numerics.secrecy import SECRET_BYTES, Secret
from fedmodels.tensors.bundle import tensor_bytes

NAME = "privacy.jsonl"


@dataclass(frozen=True)
class Over:
    """What a sum is over whose clients added the noise."""

    given: str
    """Digest of what they trained from."""
    clients: tuple[int, ...]
    """Whose uploads are in it, ascending."""


class ReleaseLog:
    """A secret and its releases."""

    def __init__(self, path: Path, committed: int = -1) -> None:
        """Open the file, or make it.

        Args:
            path: the file, in a directory that is locked.
            committed: of a run, the last committed interaction; with one, the file must be there.

        Raises:
            ArchiveError: the file is gone or damaged; nobody can say what was spent.
        """
        self.path = path
        if not self.path.exists() and committed < 0:
            with replacing(self.path, sync=True, private=True) as made:
                made.write_text(json.dumps({"secret": Secret.fresh().key.hex()}) + "\n", "ascii")
        try:
            text = self.path.read_text("ascii")
            whole = text[: text.rfind("\n") + 1]  # behind it is a torn line: nothing has left yet
            first, *lines = map(json.loads, whole.splitlines())
            self.secret = Secret(bytes.fromhex(first["secret"]))
            self._made = [(int(one["interaction"]), str(one["digest"])) for one in lines]
            self._over = [_over_of(one) for one in lines]
        except FileNotFoundError:
            raise self._lost("is gone") from None
        except (ValueError, KeyError, TypeError) as error:
            raise self._lost(f"cannot be read ({error})") from None
        if len(self.secret.key) != SECRET_BYTES:
            raise self._lost("holds no secret")
        if missing := {*range(committed + 1)} - {interaction for interaction, _ in self._made}:
            raise self._lost(f"lacks the release of interaction {min(missing) + 1}")

    def _lost(self, why: str) -> ArchiveError:
        return ArchiveError(
            f"{self.path} {why}: what the run has spent of its privacy cannot be told; put a copy "
            "of it back"
        )

    def __len__(self) -> int:
        """Return how many releases were made."""
        return len(self._made)

    def after(self, interaction: Interaction) -> int:
        """Return how many releases are made once every interaction up to one has its own.

        After a roll-back an interaction that is replayed has a release already. Whether it needs
        another one is not known before its uploads are summed, so that one is not counted.
        """
        done = {number for number, _ in self._made}
        return len(self._made) + len({*range(interaction + 1)} - done)

    def until(self, interaction: Interaction) -> int:
        """Return how many releases were made of interactions up to one.

        Later ones may be there where it is computed once more.
        """
        return sum(number <= interaction for number, _ in self._made)

    def has(self, interaction: Interaction, content: Tensor) -> bool:
        """Tell whether a release of this content was made before."""
        return self._one(interaction, content) in self._made

    def _one(self, interaction: Interaction, content: Tensor) -> tuple[int, str]:
        keyed = hashlib.blake2b(tensor_bytes(content), key=self.secret.key, digest_size=16)
        return interaction, keyed.hexdigest()

    def others(self, interaction: Interaction, over: Over) -> tuple[int, ...]:
        """Return the clients of another sum of the same interaction and training; else nothing."""
        for (number, _), made in zip(self._made, self._over, strict=True):
            if number == interaction and made is not None and made.given == over.given:
                return made.clients if made.clients != over.clients else ()
        return ()

    def note(self, interaction: Interaction, content: Tensor, over: Over | None = None) -> None:
        """Write down a release of this content; call it before anything of it leaves.

        ``over`` says of whom the sum is, where clients added the noise.

        Raises:
            ArchiveNotWritten: the disk is full, or fails; nothing may leave.
        """
        one = self._one(interaction, content)
        if one in self._made:
            return
        facts: dict[str, Any] = {"interaction": one[0], "digest": one[1]}
        line = json.dumps(facts if over is None else facts | {"over": asdict(over)})
        try:
            append_lines(self.path, f"{line}\n".encode(), sync=True)
        except OSError as error:
            raise ArchiveNotWritten(f"{self.path} cannot be written: {reason_of(error)}") from None
        self._made.append(one)
        self._over.append(over)


def _over_of(line: Mapping[str, Any]) -> Over | None:
    found = line.get("over")
    return None if found is None else Over(str(found["given"]), tuple(map(int, found["clients"])))
