"""A request to infer as the HTTP of the protocol has it, and its answer back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedmodels.errors import DataError
from fedplugins.serving.grpc_messages import CHOICE, CLASSES

CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Where a tensor of each datatype has its values; one of FP16 comes as raw bytes alone."""


def body_of(request: Any) -> tuple[bytes, int]:
    """Return a request as JSON with the tensors that came raw behind it, and the JSON's length.

    Raises:
        DataError: its tensors hold their values nowhere, or in the wrong place.
    """
    raw = [*request.raw_input_contents]
    if raw and len(raw) != len(request.inputs):
        raise DataError(
            f"raw_input_contents are {len(raw)}, and the tensors are {len(request.inputs)}"
        )
    inputs = [_tensor(one, raw[n] if raw else None) for n, one in enumerate(request.inputs)]
    outputs = [{"name": o.name, "parameters": _parameters(o.parameters)} for o in request.outputs]
    whole = {**_parameters(request.parameters), "binary_data_output": bool(raw)}
    told: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "parameters": whole}
    if request.id:
        told["id"] = request.id
    text = json.dumps(told).encode()
    return text + b"".join(raw), len(text)


def _tensor(one: Any, raw: bytes | None) -> dict[str, Any]:
    told = {"name": one.name, "datatype": one.datatype, "shape": [*one.shape]}
    held = [field.name for field, _ in one.contents.ListFields()]
    if raw is not None:
        if held:
            raise DataError(f"a tensor has {held[0]} beside its raw_input_contents")
        return {**told, "parameters": {"binary_data_size": len(raw)}}
    place = CONTENTS.get(one.datatype, "raw_input_contents")
    if place == "bytes_contents" or not held:  # what is wrong with that is said as over HTTP
        return told
    if held != [place]:
        raise DataError(
            f"a tensor of {one.datatype or 'no datatype'} has its values in {' and '.join(held)}: "
            f"they belong in {place}"
        )
    return {**told, "data": [*getattr(one.contents, place)]}


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters without those by which HTTP says what is sent as bytes."""
    chosen = {key: (one, one.WhichOneof(CHOICE)) for key, one in given.items()}
    return {
        key: getattr(one, name)
        for key, (one, name) in chosen.items()
        if name and not key.startswith("binary_data")
    }


def answer_of(body: bytes, json_bytes: int | None) -> Any:
    """Return the answer that HTTP would give as a message; tensors in bytes are raw."""
    told = json.loads(body[:json_bytes])
    found = CLASSES["ModelInferResponse"](
        model_name=told["model_name"],
        model_version=told["model_version"],
        id=str(told.get("id", "")),
    )
    for key, value in told["parameters"].items():
        if value is not None:
            found.parameters[key].string_param = value
    at = json_bytes or 0
    for one in told["outputs"]:
        output = found.outputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
        if "data" in one:
            is_text = one["datatype"] == "BYTES"
            values = [v.encode() for v in one["data"]] if is_text else one["data"]
            getattr(output.contents, CONTENTS[one["datatype"]]).extend(values)
            continue
        size = one["parameters"]["binary_data_size"]
        found.raw_output_contents.append(body[at : at + size])
        at += size
    return found
