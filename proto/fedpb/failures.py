"""Why a client could not do an order: what kind of failure it is, and the words for it."""

from __future__ import annotations

from fedmodels.errors import OrderDeclined
from fedpb.v1 import coordinator_pb2 as rpc

UNTOLD = "it could not do the order; its own log says why"
"""What is told of a failure whose text may tell of a client's data."""
WORDS: dict[int, str] = {
    rpc.FAILURE_REASON_UNSPECIFIED: UNTOLD,
    rpc.FAILURE_REASON_DECLINED: "a limit of privacy is reached; its own log says which",
    rpc.FAILURE_REASON_REFUSED: "it rejected what it received; its own log says why",
    rpc.FAILURE_REASON_STORAGE: "its data or states cannot be used; its own log says why",
    rpc.FAILURE_REASON_CONFIG: "it lacks what the run needs; its own log says what",
    rpc.FAILURE_REASON_TRAINING: "its training failed; its own log says why",
}
"""What stands for a failure whose site keeps the words to itself."""


def failed_by(reason: int, words: str) -> str:
    """Return why a client failed, as records have it; empty if it did not.

    Only the kind says that it declined, whatever the words are.
    """
    if not (reason or words):
        return ""
    said = words.removeprefix(OrderDeclined.SAID) or WORDS.get(reason, UNTOLD)
    return f"{OrderDeclined.SAID}{said}" if reason == rpc.FAILURE_REASON_DECLINED else said
