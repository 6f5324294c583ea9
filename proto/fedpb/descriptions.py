"""A client's description of its data: ``client.json`` to a message and back."""

from __future__ import annotations

import json
from typing import Any

from fedmodels.data_description import ClientFile
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

    Whether the text describes anything is for its reader to check.

    Raises:
        PayloadError: ``partition`` is malformed.
    """
    has_partition = description.HasField("partition")
    facts = {
        "format": description.format,
        "dataset": description.dataset or _default("dataset"),
        "input_shape": list(description.input_shape),
        "num_classes": description.num_classes,
        "scale": description.scale or _default("scale"),
        "mean": list(description.mean) or _default("mean"),
        "std": list(description.std) or _default("std"),
        "class_names": list(description.class_names),
        **({"name": description.name} if description.name else {}),
        **({"recipe": description.recipe} if description.recipe else {}),
        **({"counted": description.counted} if description.counted else {}),
        "partition": values_of(description.partition) if has_partition else None,
        "tasks": [_task_of(task) for task in description.tasks],
    }
    return json.dumps(facts)


def _task_of(task: pb.TaskCounts) -> dict[str, Any]:
    """Return a task as ``client.json`` has it, without what most tasks lack."""
    found: dict[str, Any] = {"train": list(task.train), "test": list(task.test)}
    more = {
        "set_aside": task.set_aside, "why": task.why, "again": task.again, "unusual": task.unusual,
    }  # fmt: skip
    return found | {key: value for key, value in more.items() if value}


def _default(name: str) -> Any:
    return ClientFile.model_fields[name].default
