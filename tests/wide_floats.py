"""Runs in float64, whose figures are those of every processor up to the last digits.

Processors round float32 differently, and training makes the difference larger: batch normalisation
of small batches makes it ten times larger in each round. So figures of float32 say little on
another machine. In float64 the same differences begin a billion times smaller.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import sklearn.cluster  # noqa: F401 -- imported while float32 is another name, it stays so
import torch

OURS = ("fedmodels.", "fedcli.", "fedsrv.", "fedtide.")


@contextmanager
def wide_floats() -> Iterator[None]:
    """Let the name float32 stand for float64: in data, nets, optimisers, and what travels.

    Every line of the product runs as it is. Random numbers of float64 are made of other bits of the
    same generators, so they are other numbers than those of float32.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, wide in ((torch, torch.float64), (np, np.float64)):
            patch.setattr(module, "float32", wide)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        _forget()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            patch.undo()
            torch.set_default_dtype(torch.float32)
            _forget()


def _forget() -> None:
    """Clear what functions of the product keep from call to call: it may hold numbers."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(OURS):
            for function in vars(module).values():
                getattr(function, "cache_clear", lambda: None)()
