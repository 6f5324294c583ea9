"""What a coordinator keeps of secure sums under way: sums of masked uploads, until their commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedmodels.errors import ArchiveError
from fedmodels.tensors.archive import load, save
from fedmodels.tensors.bundle import Bundle

Sum = NDArray[np.unsignedinteger] | None


class KeptSums:
    """Files beside the server's states, one for an interaction."""

    def __init__(self, place: Path, *, fsync: bool) -> None:
        """Keep files in a directory; ``fsync`` makes them safe against a power failure."""
        self._place, self._fsync = place, fsync

    def save(self, interaction: int, facts: Mapping[str, Any], totals: Sequence[Sum]) -> None:
        """Store how far an interaction is."""
        tensors = {
            str(place): torch.from_numpy(total.view(f"<i{total.itemsize}"))
            for place, total in enumerate(totals)
            if total is not None
        }
        header = {"facts": facts, "groups": len(totals)}
        save(self._file(interaction), Bundle(weights=tensors), header, fsync=self._fsync)

    def load(
        self, interaction: int, dtype: np.dtype[np.unsignedinteger]
    ) -> tuple[dict[str, Any], list[Sum]] | None:
        """Return how far an interaction is; None if nothing whole was stored."""
        path = self._file(interaction)
        if not path.exists():
            return None
        try:
            found, header = load(path)
        except ArchiveError:
            return None
        weights = found.weights
        totals = [
            weights[str(place)].numpy().view(dtype) if str(place) in weights else None
            for place in range(header["groups"])
        ]
        return header["facts"], totals

    def forget(self, committed: int) -> None:
        """Delete what is kept of committed interactions."""
        for path in self._place.glob("sum-*.safetensors"):
            if int(path.stem.partition("-")[2]) <= committed:
                path.unlink(missing_ok=True)

    def _file(self, interaction: int) -> Path:
        return self._place / f"sum-{interaction:08d}.safetensors"
