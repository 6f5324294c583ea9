"""Who a certificate names, and which calls each role may make.

A certificate says whose it is by one URI among its alternative names (:mod:`fedpb.identities`). The
coordinator compares that URI with the call (:data:`MAY`) and with the ids of the clients that
the caller speaks for (:func:`fedpb.identities.covers`).
"""

from __future__ import annotations

import re

from fedmodels.errors import ConfigError
from fedmodels.facts.client_ids import EVALUATOR
from fedpb.identities import (
    CLIENT,
    IDS,
    OPERATOR,
    RELAY,
    SCHEME,
    SERVER,
    WATCHER,
    role_of,
)

_AT_WORK = frozenset({CLIENT, EVALUATOR, RELAY})
MAY: dict[str, frozenset[str]] = {
    "Prepare": _AT_WORK,
    "Join": _AT_WORK,
    "JoinSeveral": frozenset({CLIENT, RELAY}),
    "Pull": _AT_WORK,
    "Push": _AT_WORK,
    "PushSeveral": _AT_WORK,
    "Beat": _AT_WORK,
    "Announce": frozenset({CLIENT, RELAY}),
    "Leave": _AT_WORK,
    "Watch": frozenset({WATCHER, OPERATOR}),
    "Steer": frozenset({OPERATOR}),
    "ListRuns": frozenset({WATCHER, OPERATOR}),
    "SubmitRun": frozenset({OPERATOR}),
    "WithdrawRun": frozenset({OPERATOR}),
}
"""The roles that may make each call of a coordinator or a queue's front, over mutual TLS."""


def identity_uri(identity: str) -> str:
    """Return the URI of an identity in a certificate; ConfigError if there is no such identity."""
    if identity in (SERVER, EVALUATOR, WATCHER, OPERATOR):
        return f"{SCHEME}{identity}"
    match = re.fullmatch(rf"(?:({RELAY}):)?{IDS}(?:-{IDS})?", identity)
    if match is None:
        raise ConfigError(
            f"{identity!r} is no identity: give a client id (7), a range (0-24), '{EVALUATOR}', "
            f"'{WATCHER}', '{OPERATOR}', '{RELAY}:0-24' or '{SERVER}'"
        )
    role, first, last = match.groups()
    if last is None and not role:
        return f"{SCHEME}client:{int(first)}"
    last = last or first
    if int(first) > int(last):
        raise ConfigError(f"the range {identity!r} is empty: its first id exceeds its last")
    return f"{SCHEME}{role or 'clients'}:{int(first)}-{int(last)}"


def why_not(uri: str | None, call: str) -> str:
    """Return why the owner of a certificate may not make a call; empty if it may.

    Args:
        uri: the identity of the certificate; None without one.
        call: the last part of the call's name. Calls of other services are for everybody.
    """
    allowed = MAY.get(call)
    if allowed is None or (uri is not None and role_of(uri) in allowed):
        return ""
    who = uri or "a certificate that names nobody"
    names = sorted(allowed)
    how = f" (fedsrv certs issue {names[-1]})" if names[-1] in (WATCHER, OPERATOR) else ""
    return f"{who} may not call {call}: that takes a certificate as {' or '.join(names)}{how}"
