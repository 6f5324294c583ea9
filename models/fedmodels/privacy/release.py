"""What a release follows from: the identity of a training or of a score at one client.

A ledger asks whether a release was charged before. Two releases have one name only if a client
cannot tell what they follow from apart: then they are the same bytes with the same noise, and
whoever has both knows no more. So whatever a coordinator may vary belongs here. An input that is
missing is a release that nobody pays for; one too many is charged twice.

The draws of noise and batches take their streams from the name as well. So two releases of
different names have independent noise, also where what they hide is equal, and its scale is not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Literal

from fedmodels.numerics.secrecy import Secret


@dataclass(frozen=True)
class Release:
    """One training, or one score, by digests of all that it follows from."""

    purpose: Literal["train", "score"]
    place: str
    """Whose it is, its interaction, round and task, the problem, and what else was ordered."""
    settings: bytes
    """Of the whole experiment."""
    payload: str
    """What the client was given."""
    state: str
    """Its private state, and the model where that is scored."""
    contents: bytes
    """Of the examples, and how inputs are normalised."""
    labels: bytes
    """Of the labels, as the classes of the run are now."""

    def name(self, secret: Secret) -> str:
        """Return a name, 32 hex digits, that nobody without the secret can compute."""
        made = hashlib.blake2b(key=secret.key, digest_size=16, person=b"release")
        for each in fields(self):
            value = getattr(self, each.name)
            known = value if isinstance(value, bytes) else value.encode()
            made.update(f"{each.name}/{len(known)}/".encode() + known)
        return made.hexdigest()
