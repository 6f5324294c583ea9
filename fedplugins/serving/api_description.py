"""What a server of models answers, as OpenAPI has it: ``GET /openapi.json``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from fedplugins.serving.bodies import KINDS
from fedplugins.serving.open_inference import KINDS as DATATYPES

OBJECT: dict[str, Any] = {"type": "object"}
NAME = {"type": "string"}
SHAPE = {"type": "array", "items": {"type": "integer"}}
MAY = {
    "200": "the answer", "400": "the request does not fit the model",
    "401": "labels come with a token", "403": "a page of another origin may not send this",
    "404": "no such model",
    "408": "the body did not come in time", "413": "the body is too long",
    "415": "the content type is not taken", "421": "the request means another server",
    "429": "more labels come than are taken: come again after Retry-After seconds",
    "500": "the model cannot answer", "501": "a package is missing",
    "503": "there is no model yet, or no room: come again after Retry-After seconds",
}  # fmt: skip
"""Statuses, and what they say."""


def _tensor(kinds: Iterable[str], *, data: bool) -> dict[str, Any]:
    parts = {"name": NAME, "datatype": {"enum": [*kinds]}, "shape": SHAPE}
    more = {"data": {"type": "array"}, "parameters": OBJECT} if data else {}
    return {**OBJECT, "required": [*parts], "properties": {**parts, **more}}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


REQUEST = {
    **OBJECT,
    "required": ["inputs"],
    "properties": {
        "id": {"type": ["string", "integer"]},
        "inputs": {**_list(_tensor(DATATYPES, data=True)), "minItems": 1, "maxItems": 1},
        "outputs": _list({**OBJECT, "required": ["name"], "properties": {"name": NAME}}),
    },
}
INFERRED = {
    **OBJECT,
    "required": ["model_name", "model_version", "outputs"],
    "properties": {
        "model_name": NAME, "model_version": NAME, "id": {"type": ["string", "integer"]},
        "outputs": _list(_tensor(("FP32", "BYTES"), data=True)),
    },
}  # fmt: skip
METADATA = {
    **OBJECT,
    "required": ["name", "versions", "platform", "inputs", "outputs"],
    "properties": {
        "name": NAME, "versions": _list(NAME), "platform": NAME,
        "inputs": _list(_tensor(("FP32",), data=False)),
        "outputs": _list(_tensor(("FP32", "BYTES"), data=False)),
    },
}  # fmt: skip
PREDICTED = {
    **OBJECT,
    "required": ["model", "predictions"],
    "properties": {"model": OBJECT, "classes": _list(NAME), "predictions": _list(OBJECT)},
}
FEEDBACK = {
    **OBJECT,
    "required": ["labels"],
    "properties": {
        "request": NAME, "id": {**NAME, "minLength": 16, "maxLength": 128},
        "inputs": {"type": "array"},
        "labels": _list({"type": ["string", "number", "null", "object", "array"]}),
    },
}  # fmt: skip
COUNT = {"type": "integer"}
TAKEN = {
    **OBJECT,
    "required": ["model", "taken", "known", "corrected", "late", "waiting", "task_at"],
    "properties": {
        "model": OBJECT, "taken": COUNT, "known": COUNT, "corrected": COUNT, "late": COUNT,
        "waiting": COUNT, "task_at": COUNT,
    },
}  # fmt: skip
BODIES = {
    "predict": {
        kind: {"schema": {} if kind == "application/json" else {"type": "string"}} for kind in KINDS
    },
    "infer": {
        "application/json": {"schema": REQUEST},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
    "index": {"application/json": {"schema": OBJECT}},
    "feedback": {"application/json": {"schema": FEEDBACK}},
}
"""What is sent to each answer that takes a body."""
ABOUT = {
    "predict": ("The classes, or the targets, of new inputs", PREDICTED, "400 403 404 408 413 415"),
    "infer": (
        "An inference of the Open Inference Protocol (V2)",
        INFERRED,
        "400 403 404 408 413 415",
    ),
    "feedback": (
        "Labels that came later, of asked inputs or of others",
        TAKEN,
        "400 401 403 404 408 413 415 429",
    ),
    "schema": ("The JSON Schema of what predict takes as JSON", OBJECT, "404"),
    "health": ("The live model", OBJECT, "404"),
    "model_ready": ("Whether the model is ready", OBJECT, "404"),
    "metadata": ("The model's tensors", METADATA, "404"),
    "config": ("The model's tensors, as Triton's configuration has them", OBJECT, "404"),
    "stats": ("What became of inferences", OBJECT, "404"),
    "index": ("The models, and whether they are ready", _list(OBJECT), "400 403"),
    "about": ("What this server is", OBJECT, ""),
    "live": ("Whether the server answers", OBJECT, ""),
    "ready": ("Whether every model is ready", OBJECT, ""),
    "metrics": ("Figures for Prometheus", None, "501"),
    "openapi": ("This description", OBJECT, ""),
}
"""What each answer is for: in words, its schema (none: text), and how it may be refused."""


def described(places: Mapping[str, str], models: Iterable[str]) -> dict[str, Any]:
    """Return the description of a server of models: its paths, and which answer stands at each."""
    names = {"model": {"enum": [*models]}, "version": NAME}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Models of fedtide", "version": version("fedtide")},
        "paths": {place: _place(place, answer, names) for place, answer in places.items()},
        "components": {
            "schemas": {"Error": {**OBJECT, "required": ["error"], "properties": {"error": NAME}}}
        },
    }


def _place(place: str, answer: str, names: Mapping[str, Any]) -> dict[str, Any]:
    summary, schema, refusals = ABOUT[answer]
    kind = {"application/json": {"schema": schema}} if schema else {"text/plain": {}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    statuses: dict[str, Any] = {"200": {"description": MAY["200"], "content": kind}}
    often = "421 503" if answer in ("about", "live", "metrics", "openapi") else "421 500 503"
    for code in sorted([*refusals.split(), *often.split()]):
        statuses[code] = {"description": MAY[code], "content": error}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in names.items() if f"{{{name}}}" in place
    ]  # fmt: skip
    one: dict[str, Any] = {
        "summary": summary,
        "operationId": re.sub(r"\W+", "_", f"{answer}{place}").strip("_"),
        "parameters": parameters,
        "responses": statuses,
    }
    if answer in BODIES:
        one["requestBody"] = {"required": True, "content": BODIES[answer]}
    return {"post" if answer in BODIES else "get": one}
