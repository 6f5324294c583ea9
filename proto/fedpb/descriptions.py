"""A client's description of its data: ``client.json`` to a message and back."""

from __future__ import annotations

import json
import math

from fedmodels.errors import PayloadError
from fedpb.tables import table_of, values_of
from fedpb.v1 import description_pb2 as pb


def description_of(client_json: str) -> pb.ClientDescription:
    """Return the text of a ``client.json`` that was checked as a message.

    Raises:
        PayloadError: its ``partition`` holds what no message can.
    """
    facts = json.loads(client_json)
    plain = {key: value for key, value in facts.items() if key != "partition" and value is not None}
    partition = facts.get("partition")
    return pb.ClientDescription(
        **plain, partition=None if partition is None else table_of(partition)
    )


def client_json_of(description: pb.ClientDescription) -> str:
    """Return a message as the text of a ``client.json``, defaults filled in.

    Raises:
        PayloadError: ``scale`` is not a number above 0, or ``partition`` is malformed.
    """
    scale = description.scale or 1.0
    if not (math.isfinite(scale) and scale > 0):
        raise PayloadError(f"client.json is malformed: scale is {scale:g}, not above 0")
    has_partition = description.HasField("partition")
    facts = {
        "format": description.format,
        "dataset": description.dataset or "own",
        "input_shape": list(description.input_shape),
        "num_classes": description.num_classes,
        "scale": scale,
        "mean": list(description.mean) or [0.0],
        "std": list(description.std) or [1.0],
        "class_names": list(description.class_names),
        "partition": values_of(description.partition) if has_partition else None,
        "tasks": [{"train": list(t.train), "test": list(t.test)} for t in description.tasks],
    }
    return json.dumps(facts)
