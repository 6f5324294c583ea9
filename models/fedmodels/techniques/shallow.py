"""Which weights of a net travel: its extractor, all of them, or its first layers."""

from __future__ import annotations

import re

from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle import Weights


def check_share(share: str) -> None:
    """Check a ``method.reading.share``.

    Raises:
        ConfigError: names what it may be.
    """
    if not re.fullmatch(r"extractor|all|shallow\([1-9]\d*\)", share):
        raise ConfigError(
            f"method.reading.share must be extractor, all or shallow(n), not {share!r}"
        )


def travelling_names(weights: Weights, share: str) -> set[str]:
    """Return the names of the weights that travel.

    Args:
        weights: of a net, in its order.
        share: ``extractor``, ``all``, or ``shallow(n)``: the first n layers with weights.
    """
    if not share.startswith("shallow"):
        return {name for name in weights if share == "all" or name.startswith("base/")}
    left, names = int(share[8:-1]), set()
    for name, tensor in weights.items():
        left -= tensor.dim() > 1  # a matrix or kernel begins a layer, which has vectors after it
        if left >= 0:
            names.add(name)
    return names
