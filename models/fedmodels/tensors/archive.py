"""Bundles on disk: safetensors plus a small JSON header.

No other module of fedmodels reads or writes files of tensors.

    metadata["fedtide"] = {"format": 1, "crc32": …, "header": {…}}
    weights/head/bias              a tensor of a bundle saved alone, under its flat key
    core:weights/head/bias         a tensor of the bundle named "core"

A file appears whole or not at all: :func:`save` writes a temporary file and renames it. Tensors are
read through a private memory map, so that writing to a tensor never reaches the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor
from zlib_ng import zlib_ng

from fedmodels.console.printable import printable
from fedmodels.errors import (
    ArchiveError,
    ArchiveNotRead,
    ArchiveNotWritten,
    PayloadError,
    reason_of,
)
from fedmodels.host.files import replacing, sha256_of
from fedmodels.tensors import stored
from fedmodels.tensors.bundle import DTYPE_NAMES, Bundle, tensor_bytes
from fedmodels.tensors.packed_weights import PackedWeights

PERSONAL, LIVE = "personal.safetensors", "model"
"""In a client's state directory: the file of its final model, and the folder of its live one."""
FORMAT = 1
_KEY = "fedtide"
_FIELDS = {field.name for field in fields(Bundle)}
_UNREAD = (OSError, MemoryError, RuntimeError)
"""Errors from reading a file that may be whole: rights, handles or memory are missing."""
_UNUSABLE = (
    SafetensorError, PayloadError, KeyError, TypeError, ValueError, OverflowError, RecursionError,
)  # fmt: skip
"""Errors from reading a file that is damaged, crafted, or no archive."""


def save(
    path: str | os.PathLike[str],
    bundle: Bundle,
    header: Mapping[str, Any],
    *,
    fsync: bool = False,
    noted: str = "",
) -> None:
    """Write a bundle and its header to ``path``, atomically.

    Args:
        path: the file; a rename at the end replaces an old one.
        bundle: tensors of any dtype that may travel.
        header: a small header of JSON values.
        fsync: wait until the file and its name would survive a power loss.
        noted: the name under which the file's digest is noted beside it
            (:mod:`fedmodels.tensors.stored`); empty for none.

    Raises:
        ArchiveError: the header is no JSON, a dtype may not travel, or the file cannot be written.
    """
    save_named(path, {"": bundle}, header, fsync=fsync, noted=noted)


def save_named(
    path: str | os.PathLike[str],
    bundles: Mapping[str, Bundle],
    header: Mapping[str, Any],
    *,
    fsync: bool = False,
    noted: str = "",
) -> None:
    """Write several bundles to one file; as :func:`save`, with names that hold no colon."""
    target = Path(path)
    entries = {
        f"{name}:{key}" if name else key: entry
        for name, bundle in bundles.items()
        for key, entry in _entries(target, bundle)
    }
    data = {key: bytes_of for key, (_, bytes_of) in entries.items()}
    facts = {"format": FORMAT, "crc32": _checksum(data), "header": dict(header)}
    try:
        metadata = {_KEY: json.dumps(facts, sort_keys=True, allow_nan=False)}
    except (TypeError, ValueError) as error:
        raise ArchiveError(f"the header of {target} is no JSON: {error}") from None
    try:
        with replacing(target, sync=fsync, private=True) as temporary:
            serialize_file({key: spec for key, (spec, _) in entries.items()}, temporary, metadata)
            if noted:
                stored.note(target.with_name(noted), sha256_of(temporary), sync=fsync)
    except (OSError, SafetensorError) as error:
        # The system's words, without the temporary file that they name.
        why = (isinstance(error, OSError) and error.strerror) or _line(error)
        raise ArchiveNotWritten(f"cannot write {target}: {why}") from None


def load(path: str | os.PathLike[str], *, verify: bool = True) -> tuple[Bundle, dict[str, Any]]:
    """Read a bundle and its header.

    Args:
        path: a file that :func:`save` wrote.
        verify: compare the checksum of all tensors, which reads the file once, and the digest
            that is noted beside it, if one is; with ``False`` tensors are paged in when they are
            used.

    Returns:
        The bundle, on memory-mapped tensors, and the header.

    Raises:
        ArchiveReplaced: it is not the file that was stored under its name.
        ArchiveError: the file is missing, damaged, or no archive.
    """
    bundles, header = load_named(path, verify=verify)
    return bundles.get("", Bundle()), header


def load_named(
    path: str | os.PathLike[str], *, verify: bool = True
) -> tuple[dict[str, Bundle], dict[str, Any]]:
    """Read a file of :func:`save_named`; empty bundles are absent.

    Raises:
        ArchiveNotRead: it cannot be read now.
        ArchiveError: it is missing, damaged, or of another format.
    """
    source = Path(path)
    try:
        if not source.is_file():
            raise ArchiveError(f"{source} is missing")
        facts, tensors = _read(source)
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, flat_key = _split(key)
            by_name.setdefault(name, {})[flat_key] = tensor
        bundles = {name: Bundle.from_keys(own) for name, own in by_name.items()}
    except _UNUSABLE as error:
        raise ArchiveError(f"{source} is damaged, or no archive: {_line(error)}") from None
    except _UNREAD as error:
        raise ArchiveNotRead(f"{source} cannot be read: {printable(reason_of(error))}") from None
    if facts["format"] != FORMAT:
        kind = printable(str(facts["format"]), 40)
        raise ArchiveError(f"{source} has format {kind}; this version reads format {FORMAT}")
    if verify and facts["crc32"] != _checksum({k: tensor_bytes(t) for k, t in tensors.items()}):
        raise ArchiveError(f"{source} is damaged: its checksum does not match")
    if verify:
        _check_stored(source)
    return bundles, facts["header"]


def _check_stored(source: Path) -> None:
    """Hold a file against what is noted beside it."""
    try:
        stored.check(source)
    except OSError as error:
        raise ArchiveNotRead(f"{source} cannot be read: {printable(reason_of(error))}") from None


def header_in(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the header of a file of :func:`save` without its tensors, which nothing checks.

    Raises:
        ArchiveError: it is missing, or no such file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads((file.metadata() or {})[_KEY])["header"]
    except (*_UNUSABLE, *_UNREAD, UnicodeEncodeError) as error:
        raise ArchiveError(f"{path} cannot be read: {_line(error)}") from None
    if not isinstance(found, dict):
        raise ArchiveError(f"{path} cannot be read: its header is no JSON object")
    return found


def is_plain(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file is of safetensors, and not of :func:`save`."""
    try:
        with safe_open(path, framework="pt") as file:
            return _KEY not in (file.metadata() or {})
    except (*_UNUSABLE, *_UNREAD):
        return False


def plain_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of any safetensors file by name; ArchiveError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (*_UNUSABLE, *_UNREAD) as error:
        raise ArchiveError(f"{path} cannot be read: {_line(error)}") from None


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the facts of a file and its tensors; raise one of ``_UNUSABLE`` or ``_UNREAD``."""
    try:
        str(source).encode()
    except UnicodeEncodeError:  # safetensors refuses it
        raise OSError("its path is not UTF-8") from None
    with safe_open(source, framework="pt") as file:
        facts = json.loads((file.metadata() or {})[_KEY])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if not isinstance(facts, dict) or not isinstance(facts["header"], dict):
        raise ValueError("its header is no JSON object")
    if not isinstance(facts["crc32"], int) or not isinstance(facts["format"], int | str):
        raise ValueError("its format or checksum is no number")
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"tensor {key!r} is {tensor.dtype}, which may not travel")
    return facts, tensors


def _split(key: str) -> tuple[str, str]:
    """Return the name of a tensor's bundle, empty if it was saved alone, and its flat key."""
    if key.partition("/")[0] in _FIELDS:  # colons may follow in the names of weights
        return "", key
    name, _, flat_key = key.partition(":")
    return name, flat_key


def _entries(target: Path, bundle: Bundle) -> Iterator[tuple[str, tuple[TensorSpec, memoryview]]]:
    """Yield every tensor by its flat key: its entry for safetensors, and its bytes.

    The entry holds an address. Only tensors outside the CPU, or not in the order of their shape,
    are copied. Weights in one block are written without making tensors of them.
    """
    weights = bundle.weights
    if isinstance(weights, PackedWeights) and weights.block.is_cpu:
        block, address = tensor_bytes(weights.block), weights.block.data_ptr()
        layout = weights.layout
        places = zip(weights.names, layout.facts, layout.offsets, layout.ends, strict=True)
        for name, (dtype, shape), begin, end in places:
            key = f"weights/{name}"
            spec = _spec(key, target, dtype, shape, address + begin, end - begin)
            yield key, (spec, block[begin:end])
        bundle = replace(bundle, weights={})
    for key, tensor in bundle.by_key().items():
        plain = tensor.detach().cpu().contiguous()
        spec = _spec(key, target, plain.dtype, plain.shape, plain.data_ptr(), plain.nbytes)
        yield key, (spec, tensor_bytes(plain))


def _spec(
    key: str, target: Path, dtype: torch.dtype, shape: Sequence[int], address: int, size: int
) -> TensorSpec:
    if dtype not in DTYPE_NAMES:
        raise ArchiveError(f"tensor {key!r} for {target} is {dtype}, which may not travel")
    return TensorSpec(dtype=DTYPE_NAMES[dtype], shape=shape, data_ptr=address, data_len=size)


def _checksum(data: Mapping[str, memoryview]) -> int:
    """Return the CRC-32 over the tensors' bytes, by key."""
    crc = 0
    for key in sorted(data):
        crc = zlib_ng.crc32(data[key], zlib_ng.crc32(key.encode(), crc))
    return crc


def _line(error: BaseException) -> str:
    """Return an error's message on one line."""
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    return printable(" ".join(text.split())) or type(error).__name__
