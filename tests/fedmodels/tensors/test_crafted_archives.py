"""Files that safetensors can read and that are no archives: each is refused with one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmodels.errors import ArchiveError
from fedmodels.tensors.archive import load, load_named, save
from fedmodels.tensors.bundle import Bundle
from fedsrv.state.state_files import ClientParts


def crafted(path: Path, facts: str, tensors: dict[str, tuple[str, list[int], int]]) -> Path:
    """Write a safetensors file with these facts and zeros as its tensors."""
    header: dict[str, Any] = {"__metadata__": {"fedtide": facts}}
    end = 0
    for key, (dtype, shape, size) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


FACTS = json.dumps({"format": 1, "crc32": 0, "header": {}})


@pytest.mark.parametrize(
    ("facts", "tensors"),
    [
        ("[" * 100_000, {}),
        ('{"a":' * 50_000, {}),
        ("[]", {}),
        ("3", {}),
        ('"format"', {}),
        ('{"format": 1, "crc32": 0, "header": []}', {}),
        ('{"format": 1, "crc32": [0], "header": {}}', {}),
        ('{"format": ' + "9" * 5000 + ', "crc32": 0, "header": {}}', {}),
        ('{"format": "\\u001b[2J", "crc32": 0, "header": {}}', {}),
        (FACTS, {"weights/w": ("F8_E4M3", [4], 4)}),
        (FACTS, {"weights/w": ("F8_E5M2", [4], 4)}),
        (FACTS, {"weights/w": ("U16", [2], 4)}),
        (FACTS, {"weights/w": ("U64", [2], 16)}),
        (FACTS, {"weights/w": ("C64", [2], 16)}),
        (FACTS, {"weights/w": ("F4", [2], 1)}),
        (FACTS, {"weights/w": ("F8_E8M0", [2], 2)}),
        (FACTS, {"scalars/loss": ("F32", [2], 8)}),
        (FACTS, {"scalars/loss": ("F32", [0], 0)}),
        (FACTS, {"generators/1/version": ("I64", [2], 16)}),
        (FACTS, {"generators/1/version": ("F32", [0], 0)}),
        (FACTS, {"prototypes/class/vectors": ("F32", [1], 4)}),
        (FACTS, {"histogram/sum": ("F32", [1], 4)}),
        (FACTS, {"nothing": ("F32", [1], 4)}),
        (FACTS, {"\x1b[2J": ("F32", [1], 4)}),
    ],
    ids=map(str, range(24)),
)
@pytest.mark.parametrize("verify", [True, False])
def test_crafted_files_are_refused_with_one_line(tmp_path, facts, tensors, verify):
    path = crafted(tmp_path / "a.safetensors", facts, tensors)
    with pytest.raises(ArchiveError) as refused:
        load_named(path, verify=verify)
    line = str(refused.value)
    assert line.startswith(str(path))
    assert line.isprintable()
    assert len(line) < 1000 + len(str(path))


def test_an_infinite_version_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    text = json.dumps(
        {
            "__metadata__": {"fedtide": FACTS},
            "generators/1/version": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<f", float("inf")))
    with pytest.raises(ArchiveError, match="damaged, or no archive"):
        load(path)


@pytest.mark.parametrize(
    "manifest",
    [
        {"clients/0": "../0.safetensors"},
        {"clients/0": "/elsewhere.safetensors"},
        {"clients/x": "part-a.safetensors"},
        {"clients/1/3": "part-a.safetensors"},
        {"nobody": "part-a.safetensors"},
        {"clients/0": 3},
    ],
    ids=str,
)
def test_a_crafted_manifest_is_refused(tmp_path, manifest):
    directory = tmp_path / "server"
    directory.mkdir()
    for place in (directory / "part-a.safetensors", tmp_path / "0.safetensors"):
        save(place, Bundle(scalars={"s": 1.0}), {})
    with pytest.raises(ArchiveError, match="manifest"):
        ClientParts(directory).load(manifest)


def test_a_file_of_torch_floats_is_read(tmp_path):
    """The crafted files above differ from this one in what is wrong with them alone."""
    facts = json.dumps({"format": 1, "crc32": 3_205_600_405, "header": {}})
    path = crafted(tmp_path / "a.safetensors", facts, {"weights/w": ("F32", [2], 8)})
    assert torch.equal(load(path, verify=False)[0].weights["w"], torch.zeros(2))
