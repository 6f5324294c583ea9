"""What an order says that a training or a score follows from.

Every field of an order counts, a new one as well, unless it stands here with the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from fedcli.data.store.client_data import ClientData
from fedmodels.tensors.bundle import Bundle, Weights, state_digest
from fedpb.v1 import coordinator_pb2 as rpc

ECHOED = {
    "kind": "the purpose of the release says it",
    "client_id": "the place of the release says it",
    "issue": "it is handed back",
    "trip": "it is handed back",
    "following": "says how many orders come next",
    "committed": "says which uploads may be forgotten",
    "durable": "says which private states may be forgotten",
    "secure_sum": "masks come after the noise",
    "views": "a score says which model it is of",
    "base": "the private state counts by its content",
    "settings": "the whole experiment counts, as it is with them",
    "new_classes": "the labels and the problem count, as they are with them",
    "class_changes": "the labels and the problem count, as they are with them",
}
"""Fields of an order that no release follows from by themselves."""
OF_SCORES = {
    "tasks_seen": "it says what is scored",
    "first_task": "it says what is scored",
    "global_test": "it says what is scored",
    "confusion": "it says what is told of a score",
    "set_aside": "the examples that are trained on count by their content",
}
"""Fields that no training follows from."""


def beside_training(order: rpc.Order, data: ClientData, kept: Weights) -> str:
    """Return what a training follows from beside what its half knows: all that others may vary.

    ``kept`` is what parts keep beside the private state.
    """
    held = state_digest([("kept", Bundle(weights=kept))])
    return json.dumps([_rest(order, {*ECHOED, *OF_SCORES}), _reading(data), held])


def beside_score(order: rpc.Order) -> str:
    """Return what a score follows from beside the model and the test sets."""
    return _rest(order, ECHOED)


def _rest(order: rpc.Order, apart: Iterable[str]) -> str:
    rest = rpc.Order()
    rest.CopyFrom(order)
    for name in apart:
        rest.ClearField(name)
    told: bytes = rest.SerializeToString(deterministic=True)
    return told.hex()


def _reading(data: ClientData) -> str:
    """Return how inputs become what a net sees; their contents are those of before."""
    file = data.file
    facts = [file.scale, [*file.mean], [*file.std], [*file.input_shape]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
