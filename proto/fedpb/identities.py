"""Whose a certificate is: one URI among its alternative names.

fedtide:client:7    fedtide:clients:0-24    fedtide:relay:0-24
fedtide:evaluator    fedtide:watcher    fedtide:operator    fedtide:server
"""

from __future__ import annotations

import re

from fedmodels.tensors.bundle import EVALUATOR, ClientId

SCHEME = "fedtide:"
CLIENT, RELAY, WATCHER, OPERATOR, SERVER = "client", "relay", "watcher", "operator", "server"
MONITOR = "monitor"
"""The former name of a watcher, who could steer as well."""
SERVER_URI = f"{SCHEME}{SERVER}"
MONITOR_URI = f"{SCHEME}{MONITOR}"

IDS = r"([0-9]{1,9})"
_CLIENT = re.compile(rf"fedtide:client:{IDS}")
_RANGE = re.compile(rf"fedtide:(clients|relay):{IDS}-{IDS}")


def role_of(uri: str) -> str:
    """Return the role that an identity's URI stands for; empty if it stands for none."""
    if _CLIENT.fullmatch(uri):
        return CLIENT
    if match := _RANGE.fullmatch(uri):
        return RELAY if match[1] == RELAY else CLIENT
    word = uri.removeprefix(SCHEME)
    is_word = uri.startswith(SCHEME) and word in (EVALUATOR, WATCHER, OPERATOR, MONITOR, SERVER)
    return word if is_word else ""


def covers(uri: str, client_id: ClientId) -> bool:
    """Tell whether the owner of a certificate with this URI may speak for a client."""
    if client_id == EVALUATOR:
        return role_of(uri) == EVALUATOR
    if match := _CLIENT.fullmatch(uri):
        return int(match[1]) == client_id
    if match := _RANGE.fullmatch(uri):
        return int(match[2]) <= int(client_id) <= int(match[3])
    return False
