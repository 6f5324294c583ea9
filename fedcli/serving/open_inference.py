"""The Open Inference Protocol (KServe V2) over HTTP: a model's tensors, and requests in JSON.

Source: the protocol's page, "Open Inference Protocol (V2)", HTTP/REST, by KServe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.own.new_inputs import NewInputs, given
from fedcli.prediction import Predictions, predicted
from fedcli.serving.bodies import IN_PARTS, MAX_NUMBERS, array_of, check_answer, kinds_in
from fedmodels.errors import DataError
from fedmodels.nets.trained import ModelFacts, TrainedModel
from fedmodels.printable import printable

SIZES = (8, 16, 32, 64)
INPUT = "input"
"""The one tensor that a model takes: raw inputs (n, *input_shape), as those of ``/predict``."""
KINDS = {
    "BOOL": np.dtype(np.bool_),
    **{f"{of}{bits}": np.dtype(f"{of.lower()}{bits}") for of in ("UINT", "INT") for bits in SIZES},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in SIZES[1:]},
}
"""Datatypes of a tensor that is sent, and the numbers that each one holds."""
BINARY = (
    "a tensor has no data in JSON: the binary extension is not taken (of tritonclient, say "
    "binary_data=False)"
)


def metadata(name: str, model: TrainedModel) -> dict[str, Any]:
    """Return what the protocol tells of a model, and the order of its classes or targets."""
    tensors = {INPUT: ("FP32", list(model.facts.input_shape)), **_outputs(model)}
    inputs, *outputs = (
        {"name": tensor, "datatype": kind, "shape": [-1, *shape]}
        for tensor, (kind, shape) in tensors.items()
    )
    about = {"name": name, "versions": [version_of(model)], "platform": "fedtide"}
    return {**about, "inputs": [inputs], "outputs": outputs, "classes": model.class_names}


def version_of(model: TrainedModel) -> str:
    """Return the version of a model: its round, from 1."""
    return str(model.facts.round + 1)


def _outputs(model: TrainedModel) -> dict[str, tuple[str, list[int]]]:
    """Return the kind of each tensor of an answer, and its shape without that of inputs."""
    size = len(model.class_names)
    if model.targets is not None:
        return {"values": ("FP32", [size])}
    return {"probabilities": ("FP32", [size]), "class": ("BYTES", [])}


def inferred(name: str, model: TrainedModel, body: bytes) -> tuple[Predictions, dict[str, Any]]:
    """Return predictions for the body of a request to infer, and the answer to it.

    Raises:
        DataError: it is no such request, does not fit the model, or is too large.
    """
    if body.count(b",") + body.count(b"[") > MAX_NUMBERS:
        raise DataError(f"the input has more than {MAX_NUMBERS} numbers and arrays: {IN_PARTS}")
    try:
        request = json.loads(body, parse_int=float)
    except (ValueError, RecursionError):
        request = None
    tensors = request.get("inputs") if isinstance(request, dict) else None
    if not (isinstance(tensors, list) and len(tensors) == 1 and isinstance(tensors[0], dict)):
        raise DataError('a request is {"inputs": […]} with one tensor')
    known_as = request.get("id")
    if not (known_as is None or isinstance(known_as, str)):
        raise DataError("the id of a request is a text")
    wanted = _wanted(request.get("outputs"), model)
    found = predicted(model, _inputs(tensors[0], model.facts))
    about = {"model_name": name, "model_version": version_of(model)}
    if known_as is not None:
        about["id"] = printable(known_as, 200)
    outputs = []
    for output, (kind, shape) in wanted.items():
        classes = (found.classes[k] for k in found.shares.argmax(1))
        data = [*classes] if output == "class" else found.shares.ravel().tolist()
        sizes = [len(found.shares), *shape]
        outputs.append({"name": output, "datatype": kind, "shape": sizes, "data": data})
    return found, {**about, "outputs": outputs}


def _check_kind(values: NDArray[np.float64], kind: str) -> None:
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
        how = one.get("parameters")
        if isinstance(how, dict) and (how.get("classification") or how.get("binary_data")):
            raise DataError("of an output, neither binary_data nor classification is answered")
        found[name] = known[name]
    return found


def _inputs(tensor: Mapping[str, Any], facts: ModelFacts) -> NewInputs:
    """Return the inputs that a tensor holds; DataError if it is not the model's."""
    if tensor.get("name") != INPUT:
        raise DataError(f"the model takes one tensor, named {INPUT!r}")
    if not isinstance(kind := tensor.get("datatype"), str) or kind not in KINDS:
        raise DataError(f"its datatype is none of {', '.join(KINDS)}")
    if "data" not in tensor:
        raise DataError(BINARY)
    values, shape = array_of(tensor["data"]), tensor.get("shape")
    if kind != "BOOL" and bool in kinds_in(tensor["data"]):
        raise DataError(f"its data hold true or false, which is no {kind}")
    _check_kind(values, kind)
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
