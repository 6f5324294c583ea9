"""Image sets that take long to read, kept as one memory-mapped file each.

The file is named after what it was made from: names, sizes and times of the publisher's files, and
the options. Another version of any of them gives another file; a damaged one is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.source import Source
from fedmodels.errors import DataError
from fedmodels.host.files import replacing

FORMAT, PARTS = 2, ("train", "test")
log = logging.getLogger(__name__)


def prepared(source: Source, files: tuple[str, ...], read: Callable[[Source], Dataset]) -> Dataset:
    """Return a data set from its kept file; or read the publisher's files, and keep it."""
    place = source.cache / "prepared" / f"{source.data.name}-{_stamp(source, files)}.safetensors"
    if place.exists():
        try:
            return _open(place)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, DataError) as error:
            log.warning("%s is damaged and is made again: %s", place, error)
    dataset = read(source)
    try:
        _keep(place, dataset)
    except OSError as error:
        log.warning("%s cannot be kept, and will be read again next time: %s", place, error)
    return dataset


def _stamp(source: Source, files: tuple[str, ...]) -> str:
    """Return the digest of everything the data set follows from."""
    facts: list[Any] = [FORMAT, source.data.identity()]
    for name in files:
        found = source.find(name)
        if found is None:
            continue
        tree = sorted(found.rglob("*")) if found.is_dir() else [found]
        for path in tree:
            if path.is_file():
                stat = path.stat()
                facts.append([str(path.relative_to(found.parent)), stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _keep(place: Path, dataset: Dataset) -> None:
    """Write a data set so that it appears whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    values = vars(dataset) | {
        f"{part}.{name}": value
        for part in PARTS
        for name, value in vars(getattr(dataset, part)).items()
    }
    arrays = {k: v for k, v in values.items() if isinstance(v, np.ndarray)}
    facts = {k: v for k, v in values.items() if k not in arrays and k not in PARTS}
    tensors = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()}
    with replacing(place) as temporary:
        save_file(tensors, temporary, {"fedtide": json.dumps(facts)})


def _open(place: Path) -> Dataset:
    """Return a kept data set; its arrays are memory-mapped."""
    with safe_open(place, framework="pt") as file:
        facts = json.loads(file.metadata()["fedtide"])
        values = {key: file.get_tensor(key).numpy() for key in file.keys()}  # noqa: SIM118
    values |= {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
    for part in PARTS:
        held = [key for key in values if key.startswith(f"{part}.")]
        values[part] = Examples(**{k.removeprefix(f"{part}."): values.pop(k) for k in held})
    return Dataset(**values)
