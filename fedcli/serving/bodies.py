"""The bodies of requests: their kinds, and what they may cost before they are read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedcli.data.arrays import DAMAGED
from fedcli.data.image_files import FORMATS
from fedcli.data.own.recordings import MAX_GROWTH
from fedmodels.config.transforms import TableTransform, parse_transform
from fedmodels.errors import DataError
from fedmodels.nets.trained import ModelFacts

KINDS = {
    "text/csv": "csv", "text/tab-separated-values": "tsv", "application/json": "npy",
    "image/png": "png", "image/jpeg": "jpg", "image/bmp": "bmp", "image/webp": "webp",
    "image/tiff": "tiff", "image/gif": "gif", "image/x-portable-anymap": "ppm",
}  # fmt: skip
"""Content types that are taken, and how files of them end."""
MAX_PIXELS = 1 << 26
"""Pixels of an image's frames."""
MAX_NUMBERS = 1 << 18
"""Numbers and arrays of a JSON body. While it is read, nothing else of Python runs."""
MAX_CELLS = 1 << 20
"""Cells of a table."""
MAX_VALUES = 1 << 24
"""Numbers of a table's windows, and of its rows at the model's rate."""
MAX_ANSWERED = 1 << 17
"""Probabilities of an answer."""
APART = (b",", b";", b"\t", b"|", b"\n", b"\r")
"""What may stand between the cells of a table."""
IN_PARTS = "send it in parts"


def array_of(body: bytes) -> np.ndarray[Any, Any]:
    """Return the numbers of a JSON array, or of ``{"inputs": [...]}``.

    Raises:
        DataError: it is another kind of JSON, or has more than ``MAX_NUMBERS``.
    """
    if body.count(b",") + body.count(b"[") > MAX_NUMBERS:
        raise DataError(f"the input has more than {MAX_NUMBERS} numbers and arrays: {IN_PARTS}")
    try:
        found = json.loads(body, parse_int=float)
        found = found.get("inputs") if isinstance(found, dict) else found
        array = np.array(found, dtype=np.float64)  # of texts, numpy would make a huge array
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise DataError("the input is no JSON array of numbers") from None
    if not array.ndim:
        raise DataError("the input is no JSON array of numbers")
    return array


def check_answer(inputs: float, facts: ModelFacts) -> None:
    """Raise DataError if the answer to so many inputs would hold more than ``MAX_ANSWERED``."""
    if inputs * facts.num_classes > MAX_ANSWERED:
        most = max(1, MAX_ANSWERED // facts.num_classes)
        raise DataError(f"the input holds more than {most} inputs of the model: {IN_PARTS}")


def check_growth(file: Path, end: str, body: bytes, facts: ModelFacts) -> None:
    """Raise DataError if a table or an image would cost too much, or is damaged."""
    if end not in ("csv", "tsv"):
        try:
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
    columns = how.columns
    rows = body.count(b"\n") + body.count(b"\r") + 1
    made = rows * (1 if columns.rate is None else MAX_GROWTH)
    hop = columns.hop or columns.window or 1
    if made * max(math.prod(facts.input_shape) / hop, len(columns.features or ())) > MAX_VALUES:
        raise DataError(f"the input makes more than {MAX_VALUES} numbers: {IN_PARTS}")
    check_answer(rows / hop, facts)
