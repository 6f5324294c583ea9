"""Whose a certificate is: one URI among its alternative names.

fedtide:client:7    fedtide:clients:0-24    fedtide:relay:0-24
fedtide:evaluator    fedtide:watcher    fedtide:operator    fedtide:server

Where some clients of a range were revoked before its certificate was made, it has several parts:
``fedtide:clients:0-2,4-24``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedmodels.facts.client_ids import EVALUATOR, ClientId

SCHEME = "fedtide:"
CLIENT, RELAY, WATCHER, OPERATOR, SERVER = "client", "relay", "watcher", "operator", "server"
SERVER_URI = f"{SCHEME}{SERVER}"

IDS = r"([0-9]{1,9})"
_CLIENT = re.compile(rf"fedtide:client:{IDS}")
MAX_PARTS = 64
"""Of a range of clients without those that were revoked."""
_RELAY = re.compile(rf"fedtide:relay:{IDS}-{IDS}")
_RANGES = re.compile(r"fedtide:clients:([0-9]{1,9}-[0-9]{1,9}(?:,[0-9]{1,9}-[0-9]{1,9}){0,63})")


def role_of(uri: str) -> str:
    """Return the role that an identity's URI stands for; empty if it stands for none."""
    if _CLIENT.fullmatch(uri):
        return CLIENT
    if _RANGES.fullmatch(uri):
        return CLIENT
    if _RELAY.fullmatch(uri):
        return RELAY
    word = uri.removeprefix(SCHEME)
    is_word = uri.startswith(SCHEME) and word in (EVALUATOR, WATCHER, OPERATOR, SERVER)
    return word if is_word else ""


def covers(uri: str, client_id: ClientId) -> bool:
    """Tell whether the owner of a certificate with this URI may speak for a client."""
    if client_id == EVALUATOR:
        return role_of(uri) == EVALUATOR
    if match := _RELAY.fullmatch(uri):
        return int(match[1]) <= int(client_id) <= int(match[2])
    return any(first <= int(client_id) <= last for first, last in clients_of(uri))


def clients_of(uri: str) -> list[tuple[int, int]]:
    """Return the first and the last id of each part of what is a client's identity; else none."""
    if match := _CLIENT.fullmatch(uri):
        return [(int(match[1]), int(match[1]))]
    if match := _RANGES.fullmatch(uri):
        ends = (part.split("-") for part in match[1].split(","))
        return [(int(first), int(last)) for first, last in ends]
    return []


def without(uri: str, others: Iterable[str]) -> str:
    """Return a client's identity without the clients of others; empty if none of it is left.

    Empty as well where more than ``MAX_PARTS`` parts would be.
    """
    parts = whole = clients_of(uri)
    for first, last in (ends for other in others for ends in clients_of(other)):
        rest = [((a, min(b, first - 1)), (max(a, last + 1), b)) for a, b in parts]
        parts = [(a, b) for two in rest for a, b in two if a <= b]
    if parts == whole:
        return uri
    if not 0 < len(parts) <= MAX_PARTS:
        return ""
    return f"{SCHEME}clients:{','.join(f'{a}-{b}' for a, b in parts)}"
