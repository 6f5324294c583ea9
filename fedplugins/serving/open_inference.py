"""The Open Inference Protocol (KServe V2) over HTTP: a model's tensors, in JSON or as bytes.

Sources: "Open Inference Protocol (V2)", HTTP/REST, by KServe; of its extensions for binary data and
for the configuration of models, Triton's pages.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcli.data.own.new_inputs import NewInputs, given
from fedcli.predicting.predicted_targets import TargetPredictions
from fedcli.predicting.prediction import Predictions, predicted
from fedmodels.console.printable import printable
from fedmodels.errors import DataError
from fedmodels.nets.trained import ModelFacts, TrainedModel
from fedplugins.serving.bodies import IN_PARTS, MAX_NUMBERS, array_of, check_answer, kinds_in
from fedplugins.serving.inference_stats import Tally

SIZES = (8, 16, 32, 64)
INPUT = "input"
"""The one tensor that a model takes: raw inputs (n, *input_shape), as those of ``/predict``."""
KINDS = {
    "BOOL": np.dtype(np.bool_),
    **{f"{of}{bits}": np.dtype(f"{of.lower()}{bits}") for of in ("UINT", "INT") for bits in SIZES},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in SIZES[1:]},
}
"""Datatypes of a tensor that is sent, and the numbers that each one holds."""
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics", "model_repository(index)")
"""Of Triton's extensions of the protocol those that are here."""
MAX_ID = 1 << 53
"""Up to here a number of JSON is the one that was sent."""


class Inferred(NamedTuple):
    """The answer to a request to infer."""

    found: Predictions
    told: dict[str, Any]
    """Its JSON."""
    data: bytes
    """The tensors that were wanted as bytes, which follow that."""


def metadata(name: str, model: TrainedModel) -> dict[str, Any]:
    """Return what the protocol tells of a model, and the order of its classes or targets."""
    tensors = {INPUT: ("FP32", list(model.facts.input_shape)), **_outputs(model)}
    inputs, *outputs = (
        {"name": tensor, "datatype": kind, "shape": [-1, *shape]}
        for tensor, (kind, shape) in tensors.items()
    )
    about = {"name": name, "versions": [version_of(model)], "platform": "fedtide"}
    return {**about, "inputs": [inputs], "outputs": outputs, "classes": model.class_names}


def configuration(name: str, model: TrainedModel) -> dict[str, Any]:
    """Return the model's configuration, as Triton's extension has it."""

    def tensor(one: Mapping[str, Any]) -> dict[str, Any]:
        kind = "STRING" if one["datatype"] == "BYTES" else one["datatype"]
        return {"name": one["name"], "data_type": f"TYPE_{kind}", "dims": one["shape"]}

    told = metadata(name, model)
    return {
        "name": name, "platform": told["platform"], "backend": told["platform"],
        "max_batch_size": 0,  # the first of the dims is the batch
        "input": [*map(tensor, told["inputs"])], "output": [*map(tensor, told["outputs"])],
    }  # fmt: skip


def version_of(model: TrainedModel) -> str:
    """Return the version of a model: its round, from 1."""
    return str(model.facts.round + 1)


def _outputs(model: TrainedModel) -> dict[str, tuple[str, list[int]]]:
    """Return the kind of each tensor of an answer, and its shape without that of inputs."""
    size = len(model.class_names)
    if model.targets is not None:
        ends = {"intervals": ("FP32", [size, 2])} if model.facts.widths else {}
        return {"values": ("FP32", [size]), **ends}
    return {"probabilities": ("FP32", [size]), "class": ("BYTES", [])}


def inferred(
    name: str, model: TrainedModel, body: bytes, json_bytes: str | None, tally: Tally
) -> Inferred:
    """Return the answer to the body of a request to infer.

    Args:
        name: of the model.
        model: that answers.
        body: of the request.
        json_bytes: how many bytes of it are JSON, as a header says; the others are tensors.
        tally: counts the inputs.

    Raises:
        DataError: it is no such request, does not fit the model, or is too large.
    """
    body, data = _apart(body, json_bytes)
    if body.count(b",") + body.count(b"[") > MAX_NUMBERS:
        raise DataError(f"the input has more than {MAX_NUMBERS} numbers and arrays: {IN_PARTS}")
    try:
        request = json.loads(body, parse_int=float)
    except (ValueError, RecursionError):
        request = None
    tensors = request.get("inputs") if isinstance(request, dict) else None
    if not (isinstance(tensors, list) and len(tensors) == 1 and isinstance(tensors[0], dict)):
        raise DataError('a request is {"inputs": […]} with one tensor')
    known_as = _id_of(request.get("id"))
    wanted = _wanted(request.get("outputs"), model)
    as_bytes = _as_bytes(request, wanted)
    inputs = _inputs(tensors[0], data, model.facts)
    begun = time.monotonic_ns()
    found = predicted(model, inputs)
    tally.infer(len(found.shares), time.monotonic_ns() - begun)
    about: dict[str, Any] = {"model_name": name, "model_version": version_of(model)}
    if known_as is not None:
        about["id"] = known_as
    outputs, sent = list[dict[str, Any]](), list[bytes]()
    for output, (kind, shape) in wanted.items():
        values = _values_of(output, found)
        sizes = [len(found.shares), *shape]
        told: dict[str, Any] = {"name": output, "datatype": kind, "shape": sizes}
        if output in as_bytes:
            sent.append(_bytes_of(values))
            told["parameters"] = {"binary_data_size": len(sent[-1])}
        else:
            told["data"] = values.ravel().tolist() if isinstance(values, np.ndarray) else values
        outputs.append(told)
    return Inferred(found, {**about, "outputs": outputs}, b"".join(sent))


def _values_of(output: str, found: Predictions) -> NDArray[Any] | list[str]:
    """Return an output of all inputs: numbers (n, *its shape), or the names of classes."""
    if output == "class":
        return [found.classes[k] for k in found.shares.argmax(1)]
    if output == "intervals" and isinstance(found, TargetPredictions):
        widths = np.asarray(found.widths, found.shares.dtype)
        return np.stack([found.shares - widths, found.shares + widths], 2)
    return found.shares


def _apart(body: bytes, json_bytes: str | None) -> tuple[bytes, bytes | None]:
    """Return the JSON of a body and the bytes behind it; None unless a header says of some."""
    if json_bytes is None:
        return body, None
    if not (re.fullmatch("[0-9]{1,9}", json_bytes) and int(json_bytes) <= len(body)):
        raise DataError("Inference-Header-Content-Length is no length of a part of the request")
    return body[: int(json_bytes)], body[int(json_bytes) :]


def _id_of(told: Any) -> str | int | None:
    """Return the id of a request as it came: the protocol wants a text, and some send a number."""
    if isinstance(told, float) and told.is_integer() and abs(told) < MAX_ID:
        return int(told)
    if not (told is None or isinstance(told, str)):
        raise DataError("the id of a request must be a string or an integer")
    return told if told is None else printable(told, 200)


def _bytes_of(values: NDArray[Any] | Sequence[str]) -> bytes:
    """Return a tensor as bytes, little-endian; of texts, the length of each stands before it."""
    if isinstance(values, np.ndarray):
        return values.astype("<f4").tobytes()
    texts = (text.encode() for text in values)
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def _values(tensor: Mapping[str, Any], data: bytes | None, kind: str) -> NDArray[Any]:
    """Return the numbers of a tensor, as its datatype holds them."""
    size = _parameters(tensor).get("binary_data_size")
    if "data" in tensor:
        if data:
            raise DataError("the bytes behind the JSON are of no tensor")
        values = array_of(tensor["data"])
        if kind != "BOOL" and bool in kinds_in(tensor["data"]):
            raise DataError(f"its data hold true or false, which is no {kind}")
        _check_kind(values, kind)
        return values
    if data is None or size != len(data):
        raise DataError(
            "a tensor has no data in JSON, and its binary_data_size is not that of the bytes behind"
        )
    held = np.dtype(np.uint8) if kind == "BOOL" else KINDS[kind]
    if len(data) % held.itemsize or not data:
        raise DataError(f"its {len(data)} bytes are no numbers of {kind}")
    found = np.frombuffer(data, held.newbyteorder("<"))
    if kind == "BOOL":
        _check_kind(found, kind)
    return found


def _check_kind(values: NDArray[Any], kind: str) -> None:
    """Raise DataError if a tensor holds a number that its datatype does not."""
    held = KINDS[kind]
    if held.kind == "f":
        wrong = np.isfinite(values) & (np.abs(values) > np.finfo(held).max)
    else:
        low, high = (0, 1) if held.kind == "b" else (np.iinfo(held).min, np.iinfo(held).max)
        wrong = ~((values >= low) & (values <= high) & (np.trunc(values) == values))
    if wrong.any():
        raise DataError(f"its data hold {values[wrong].flat[0]:g}, which is no {kind}")


def _wanted(outputs: Any, model: TrainedModel) -> dict[str, tuple[str, list[int]]]:
    """Return the outputs that a request wants; DataError if it wants others."""
    known = _outputs(model)
    if not outputs:
        return known
    found = {}
    for one in outputs if isinstance(outputs, list) else [outputs]:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str) or name not in known:
            raise DataError(f"the model's outputs are {' and '.join(known)}")
        if _parameters(one).get("classification"):
            raise DataError("of an output, classification is not answered")
        found[name] = known[name]
    return found


def _parameters(of: Any) -> Mapping[str, Any]:
    """Return the parameters of a part of a request; nothing where it has none."""
    found = of.get("parameters") if isinstance(of, dict) else None
    return found if isinstance(found, dict) else {}


def _as_bytes(request: Mapping[str, Any], wanted: Collection[str]) -> set[str]:
    """Return which of the wanted outputs are sent as bytes: each may say so, or all at once."""
    usual = _parameters(request).get("binary_data_output")
    said = {
        one["name"]: _parameters(one).get("binary_data", usual)
        for one in request.get("outputs") or ()
    }
    return {name for name in wanted if said.get(name, usual) is True}


def _inputs(tensor: Mapping[str, Any], data: bytes | None, facts: ModelFacts) -> NewInputs:
    """Return the inputs that a tensor holds, in JSON or as bytes; DataError if it is none."""
    if tensor.get("name") != INPUT:
        raise DataError(f"the model takes one tensor, named {INPUT!r}")
    if not isinstance(kind := tensor.get("datatype"), str) or kind not in KINDS:
        raise DataError(f"its datatype is none of {', '.join(KINDS)}")
    values, shape = _values(tensor, data, kind), tensor.get("shape")
    most = len(facts.input_shape) + 1
    if not (isinstance(shape, list) and len(shape) <= most) or not all(
        isinstance(size, float) and 1 <= size <= values.size and size.is_integer() for size in shape
    ):
        raise DataError(f"its shape is no list of sizes, such as {[1, *facts.input_shape]}")
    sizes = [*map(int, shape)]
    if values.size != math.prod(sizes):
        raise DataError(f"it has {values.size} numbers, and its shape is {sizes}")
    if values.ndim > 1 and [*values.shape] != sizes:
        raise DataError(f"its data are nested as {[*values.shape]}, and its shape is {sizes}")
    inputs = given(values.reshape(sizes), Path("the input"), facts)
    check_answer(len(inputs.x), facts)
    return inputs
