"""The bodies of requests: their kinds, and what they may cost before they are read."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
from PIL import Image

from fedcli.data.arrays import DAMAGED
from fedcli.data.image_files import FORMATS
from fedcli.data.own.new_inputs import NewInputs, given, given_rows
from fedcli.data.own.recordings import MAX_GROWTH
from fedmodels.config.transforms import TableTransform, parse_transform
from fedmodels.console.printable import printable
from fedmodels.errors import DataError
from fedmodels.nets.trained import ModelFacts
from fedmodels.problems.targets import Targets, targets_in
from fedmodels.times import WORKBOOK_CPU_S, WORKBOOK_S
from fedplugins.serving.workbook_trial import is_cheap

KINDS = {
    "text/csv": "csv", "text/tab-separated-values": "tsv", "application/json": "npy",
    "image/png": "png", "image/jpeg": "jpg", "image/bmp": "bmp", "image/webp": "webp",
    "application/dicom": "dcm",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
    "image/tiff": "tiff", "image/gif": "gif", "image/x-portable-anymap": "ppm",
}  # fmt: skip
"""Content types that are taken, and how files of them end."""
MAX_PIXELS = 1 << 26
"""Pixels of an image's frames."""
MAX_NUMBERS = 1 << 18
"""Numbers and arrays of a JSON body. While it is read, nothing else of Python runs."""
MAX_UNPACKED = 1 << 26
"""Bytes that a workbook unpacks to."""
TRIED = 1 << 20
"""A workbook that unpacks to more bytes is tried apart first, and takes no more seconds there, of
the processor and in all."""
MAX_CELLS = 1 << 20
"""Cells of a table."""
CELL, ROW = (re.compile(rb"<(?:[\w.-]+:)?" + name + rb"[\s/>]") for name in (b"c", b"row"))
"""How they begin in a sheet, whose place and prefix the workbook says."""
MAX_VALUES = 1 << 24
"""Numbers of a table's windows, and of its rows at the model's rate."""
MAX_ANSWERED = 1 << 17
"""Probabilities of an answer."""
APART = (b",", b";", b"\t", b"|", b"\n", b"\r")
"""What may stand between the cells of a table."""
DRAFT = "http://json-schema.org/draft-07/schema#"
ID = re.compile(r"[!-~]{16,128}")
"""A caller's own id of the labels that it sends."""
IN_PARTS = "send it in parts"


def json_inputs(body: bytes, facts: ModelFacts) -> NewInputs:
    """Return the inputs of a JSON body: numbers, or rows as objects by the names of columns.

    Raises:
        DataError: it is another kind of JSON, does not fit the model, or is too large.
    """
    found = _json_of(body)
    return _inputs_of(found.get("inputs") if isinstance(found, dict) else found, facts)


class Labels(NamedTuple):
    """Labels that come back, and what they are for."""

    request: str
    """The id of the request that was answered, or the caller's own one of this call."""
    inputs: NewInputs | None
    """Inputs that were asked of nobody; None for those of the request."""
    names: list[str | None]
    """The class of each prediction or input, or the JSON of its targets; None for no label."""


def feedback_of(body: bytes, facts: ModelFacts) -> Labels:
    """Return the labels of a body, and what they are for.

    Raises:
        DataError: it is another kind of JSON, does not fit the model, or is too large.
    """
    found = _json_of(body)
    labels = found.get("labels") if isinstance(found, dict) else None
    request, own, inputs = (found.get(k) if labels else None for k in ("request", "id", "inputs"))
    is_own = (request is None, own is not None, inputs is not None)
    if not isinstance(labels, list) or is_own not in ((True,) * 3, (False,) * 3):
        raise DataError(
            'labels come as {"request": ID, "labels": […]}, or of inputs that were asked of '
            'nobody as {"id": …, "inputs": […], "labels": […]}, the id your own, such as a UUID'
        )
    targets = targets_in(facts.transform, "the model")
    names = [
        (None if n is None else target_text(n, targets))
        if targets is not None
        else (str(int(n)) if isinstance(n, float) and n.is_integer() else n)
        for n in labels
    ]
    if not all(name is None or isinstance(name, str) for name in names):
        raise DataError("a label is the name of a class, or null")
    if inputs is None:
        if not isinstance(request, str):
            raise DataError("a request is named by the id that its answer has")
        return Labels(request, None, names)
    if not (isinstance(own, str) and ID.fullmatch(own)):
        raise DataError(
            "the id of labels is one that nobody guesses, such as a UUID: 16 to 128 printable "
            "letters; a call with the same one and the same inputs adds nothing"
        )
    return Labels(own, _inputs_of(inputs, facts), names)


def target_text(label: Any, targets: Targets) -> str:
    """Return what is learned of an example in place of its class, as the JSON of its numbers.

    Raises:
        DataError: a number is missing, or none that there may be.
    """
    names, may = targets.names, (0.0, 1.0) if targets.columns.labels else None
    if may and isinstance(label, list) and all(name in names for name in label):
        label = {name: float(name in label) for name in names}
    elif may is None and len(names) == 1 and isinstance(label, float):
        label = {names[0]: label}
    named = label if isinstance(label, dict) and label.keys() == {*names} else {}
    values = [named.get(name) for name in names]
    numbers = [float(v) for v in values if isinstance(v, float | bool) and math.isfinite(v)]
    if len(numbers) < len(names) or not all(may is None or v in may for v in numbers):
        line = f"a label is an object of a number for each of {printable(', '.join(names), 200)}"
        more = ": 1 where an example has it, else 0; or the list of those that it has"
        raise DataError(line + (more if may else ""))
    return json.dumps(numbers)


def _inputs_of(found: Any, facts: ModelFacts) -> NewInputs:
    """Return the inputs of JSON: numbers, or rows as objects by the names of columns."""
    name = Path("the input")
    if not (isinstance(found, list) and found and all(isinstance(row, dict) for row in found)):
        return given(array_of(found), name, facts)
    how = parse_transform(facts.transform, "the model")
    if not isinstance(how, TableTransform):
        raise DataError("the input has names of columns, and the model was trained on no table")
    _check_rows(len(found), facts, how)
    return given_rows(found, name, facts, how)


def schema_of(facts: ModelFacts, *, with_ranges: bool = True) -> dict[str, Any]:
    """Return the JSON Schema of what ``POST /predict`` takes as JSON.

    The ranges of columns are those of the training data, which a site may hold back.
    """
    shape = list(facts.input_shape)
    arrays = {"type": "array", "description": f"a raw input of shape {shape}, or several"}
    told = {"$schema": DRAFT, "title": "inputs of the model"}
    how = parse_transform(facts.transform, "the model")
    if not isinstance(how, TableTransform):
        return {**told, **arrays}
    names, ranges = how.columns.features or (), (facts.ranges if with_ranges else None) or ()
    columns: dict[str, Any] = {name: {"type": ["number", "string", "null"]} for name in names}
    for name, levels in (how.columns.categories or {}).items():
        columns[name]["description"] = f"one of {', '.join(levels)}; others count as one more"
    for name, (low, high) in zip(how.columns.channels, ranges, strict=False):
        if name not in columns:  # of a level
            continue
        beyond = (high - low) / 4  # what ranges have beyond the quantiles of the data
        low, high = low + beyond, high - beyond
        columns[name]["description"] = f"99 % of the training data: {low:.6g} to {high:.6g}"
    rows = {"type": "array", "items": {"type": "object", "properties": columns}}
    rows["description"] = "rows by the names of columns; a cell that is no number has no answer"
    return {**told, "anyOf": [rows, arrays]}


def _json_of(body: bytes) -> Any:
    """Return JSON; raise DataError if it is none."""
    if body.count(b",") + body.count(b"[") > MAX_NUMBERS:
        raise DataError(f"the input has more than {MAX_NUMBERS} numbers and arrays: {IN_PARTS}")
    try:
        return json.loads(body, parse_int=float)
    except (ValueError, RecursionError):
        raise DataError("the input is no JSON array of numbers") from None


def array_of(found: Any) -> np.ndarray[Any, Any]:
    """Return the numbers of a JSON array; DataError if it is another kind of JSON."""
    try:
        array = np.array(found, dtype=np.float64)  # of texts, numpy would make a huge array
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise DataError("the input is no JSON array of numbers") from None
    if not array.ndim or str in kinds_in(found):  # numpy reads the number in a text
        raise DataError("the input is no JSON array of numbers")
    return array


def kinds_in(found: Any) -> set[type]:
    """Return of which types the values of nested lists are, all of them as long."""
    return {*map(type, np.array(found, dtype=object).ravel().tolist())}


def check_answer(inputs: float, facts: ModelFacts) -> None:
    """Raise DataError if the answer to so many inputs would hold more than ``MAX_ANSWERED``."""
    if inputs * facts.num_classes > MAX_ANSWERED:
        most = max(1, MAX_ANSWERED // facts.num_classes)
        raise DataError(f"the input holds more than {most} inputs of the model: {IN_PARTS}")


def check_growth(file: Path, end: str, body: bytes, facts: ModelFacts) -> None:
    """Raise DataError if a table or an image would cost too much, or is damaged."""
    if end == "xlsx":
        return _check_workbook(file, facts)
    if end not in ("csv", "tsv"):
        try:
            if end == "dcm":
                pixels = importlib.import_module("fedcli.data.dicom").pixels_in(file)
                if pixels > MAX_PIXELS:
                    raise DataError(f"the input makes more than {MAX_PIXELS} pixels: {IN_PARTS}")
                return
            with Image.open(file, formats=FORMATS) as image:
                pixels = image.width * image.height * getattr(image, "n_frames", 1)
        except (*DAMAGED, Image.DecompressionBombError):
            raise DataError("the input is no image, or damaged") from None
        if pixels > MAX_PIXELS:
            raise DataError(f"the input makes more than {MAX_PIXELS} pixels: {IN_PARTS}")
        return
    how = parse_transform(facts.transform, "the model")
    if not isinstance(how, TableTransform):
        return
    if sum(body.count(mark) for mark in APART) > MAX_CELLS:
        raise DataError(f"the input has more than {MAX_CELLS} cells: {IN_PARTS}")
    _check_rows(body.count(b"\n") + body.count(b"\r") + 1, facts, how)


def _check_workbook(file: Path, facts: ModelFacts) -> None:
    """Raise DataError if a workbook would cost too much, or is damaged."""
    try:
        with ZipFile(file) as archive:
            sizes = sum(info.file_size for info in archive.infolist())
            names = archive.namelist()
            if sizes > MAX_UNPACKED:
                raise DataError(f"the input unpacks to more than {MAX_UNPACKED} bytes: {IN_PARTS}")
            if sizes > TRIED and not is_cheap(file, WORKBOOK_CPU_S, WORKBOOK_S):
                raise DataError(
                    f"the input takes more than {WORKBOOK_CPU_S} seconds of the processor to read: "
                    "send it in parts, or its table as CSV"
                )
            cells, rows = (
                sum(len(mark.findall(archive.read(name))) for name in names) for mark in (CELL, ROW)
            )
    except (*DAMAGED, RuntimeError, NotImplementedError):
        raise DataError("the input is no workbook, or damaged") from None
    if cells > MAX_CELLS:
        raise DataError(f"the input has more than {MAX_CELLS} cells: {IN_PARTS}")
    how = parse_transform(facts.transform, "the model")
    if isinstance(how, TableTransform):
        _check_rows(rows, facts, how)


def _check_rows(rows: int, facts: ModelFacts, how: TableTransform) -> None:
    """Raise DataError if so many rows of a table would cost too much."""
    columns = how.columns
    made = rows * (1 if columns.rate is None else MAX_GROWTH)
    hop = columns.hop or columns.window or 1
    if made * max(math.prod(facts.input_shape) / hop, len(columns.channels)) > MAX_VALUES:
        raise DataError(f"the input makes more than {MAX_VALUES} numbers: {IN_PARTS}")
    check_answer(rows / hop, facts)
