"""``invitations.json`` beside an authority: what it has promised to whom, and what it took back.

An invitation is known by the sha256 of its secret. It is open until it is used, ends or is void.
Whoever is revoked loses the open invitations as well: they would give the same site another
certificate. One of a range of clients goes on without those that were revoked (``without``).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError
from fedmodels.host.files import no_locks, replacing, wait_for_lock
from fedpb.identities import without
from fedsrv.identity.roles import identity_uri

INVITED = "invitations.json"
SHOWN = 12
"""Digits of the hash of a secret by which people name an invitation."""
Invitations = dict[str, dict[str, Any]]


@contextlib.contextmanager
def invitations(directory: Path) -> Iterator[Invitations]:
    """Yield all invitations, for one process at a time; changes of the block are stored.

    Raises:
        ConfigError: they cannot be read or written.
    """
    path = directory / INVITED
    try:
        lock = os.open(directory / f".{INVITED}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            wait_for_lock(lock)
            text = path.read_text("utf-8") if path.is_file() else "{}"
            held: Invitations = json.loads(text)
            yield held
            if (changed := json.dumps(held, indent=1)) != text:
                with replacing(path, sync=True, private=True) as fresh:
                    fresh.write_text(changed, "utf-8")
        finally:
            os.close(lock)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {no_locks(error) or error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is damaged: move it away; its invitations are lost") from None


def given_by(one: dict[str, Any]) -> str:
    """Return the identity whose certificate an invitation gives by now; empty if it gives none."""
    return without(str(one["identity"]), one.get("without", ()))


def _state_of(one: dict[str, Any]) -> str:
    if "void" in one:
        return str(one["void"])
    if "certificate" in one:
        return "was used"
    until = datetime.fromisoformat(str(one["until"]))
    return f"{'ended' if datetime.now(UTC) > until else 'open until'} {until:%Y-%m-%d %H:%M} UTC"


def listed(directory: Path) -> list[str]:
    """Return a line for each invitation: its name, whom it is for, and what became of it."""
    with invitations(directory) as held:
        return [
            f"{name[:SHOWN]} {given_by(one)} {_state_of(one)}"
            + "".join(f", host {host}" for host in one["hosts"])
            for name, one in held.items()
        ]


def void(directory: Path, uris: Collection[str]) -> list[str]:
    """Void every invitation of identities that were revoked; return a line for each open one.

    One that was used is void as well: whoever asks again would get the revoked certificate. An open
    one of other clients as well goes on for these.
    """
    lines = []
    with invitations(directory) as held:
        for name, one in held.items():
            if one["identity"] in uris and "void" not in one:
                if (state := _state_of(one)).startswith("open"):
                    lines.append(f"void: invitation {name[:SHOWN]} of {one['identity']}, {state}")
                one["void"] = f"was revoked on {datetime.now(UTC):%Y-%m-%d}"
            elif _state_of(one).startswith("open"):
                lines += _narrowed(name, one, uris)
    return lines


def _narrowed(name: str, one: dict[str, Any], uris: Collection[str]) -> list[str]:
    """Let an open invitation go on without revoked clients; return a line if it had some."""
    before, which = given_by(one), f"invitation {name[:SHOWN]} of {one['identity']}"
    left = without(before, uris)
    if left == before:
        return []
    if not left:
        one["void"] = f"was revoked on {datetime.now(UTC):%Y-%m-%d}"
        return [f"void: {which}"]
    one["without"] = sorted({*one.get("without", ()), *uris})
    return [f"narrowed: {which} now gives a certificate for {left} only"]


def withdraw(directory: Path, which: str) -> list[str]:
    """Take open invitations back; return a line for each.

    Args:
        directory: of the authority.
        which: the name of an invitation, as :func:`listed` has it, or an identity.

    Raises:
        ConfigError: no open invitation is meant by that.
    """
    with invitations(directory) as held:
        named = {name for name in held if len(which) == SHOWN and name.startswith(which)}
        uri = "" if named else identity_uri(which)
        found = [
            (name, one)
            for name, one in held.items()
            if (name in named or one["identity"] == uri) and _state_of(one).startswith("open")
        ]
        lines = [f"taken back: {name[:SHOWN]} of {one['identity']}" for name, one in found]
        for _, one in found:
            one["void"] = f"was taken back on {datetime.now(UTC):%Y-%m-%d}"
    if not lines:
        raise ConfigError(f"the authority in {directory} has no open invitation of {which!r}")
    return lines
