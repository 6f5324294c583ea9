"""Damaged arrays and images of a participant: each is refused with one line."""

from __future__ import annotations

import io
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from fedcli.data.store.client_data import ClientData
from fedmodels.errors import DataError

FACTS = {"format": 1, "input_shape": [1, 2, 2], "num_classes": 2}


def array(header: bytes) -> bytes:
    """Return an .npy file with this header."""
    text = header + b" " * 16 + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)


def png(damage: bytes = b"", width: int = 2) -> bytes:
    """Return an image of which a chunk may be broken, or which claims another width."""
    out = io.BytesIO()
    Image.new("L", (2, 2), 7).save(out, "PNG")
    whole = bytearray(out.getvalue())
    place = whole.index(b"IHDR")
    whole[place + 4 : place + 8] = struct.pack(">I", width)
    end = place + 17
    whole[end : end + 4] = struct.pack(">I", zlib.crc32(whole[place:end]))
    at = whole.index(b"IDAT")
    return bytes(whole[:at]) + damage + bytes(whole[at + len(damage) :])


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<i8', 'fortran_order': False, 'shape': 2,), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (" + b"(" * 900,
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (10**18,), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (9999999999999999999999,), }",
        b"{'descr': [], 'fortran_order': False, 'shape': (2,), }",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
        b"[1, 2",
        b"",
    ],
)
def test_a_damaged_header_of_an_array(tmp_path, header):
    (tmp_path / "client.json").write_text(json.dumps(FACTS))
    task = tmp_path / "task-0"
    task.mkdir()
    for part in ("train", "test"):
        np.save(task / f"{part}_x.npy", np.zeros((2, 1, 2, 2), dtype=np.uint8))
        (task / f"{part}_y.npy").write_bytes(array(header))
    with pytest.raises(DataError, match=r"train_y\.npy"):
        ClientData(tmp_path)


@pytest.mark.parametrize(
    "image",
    [png(b"b`\x00\x00"), png(width=1 << 30), png(width=0), png(width=70_000), png()[:36], b""],
    ids=["chunk", "bomb", "empty", "wide", "cut", "nothing"],
)
def test_a_damaged_image(tmp_path, image):
    (tmp_path / "client.json").write_text(json.dumps(FACTS))
    for part in ("train", "test"):
        place = tmp_path / "task-0" / part / "0"
        place.mkdir(parents=True)
        (place / "a.png").write_bytes(image)
    with pytest.raises(DataError, match=r"a\.png"):
        ClientData(tmp_path)
