"""Reading array files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.data import arrays


@pytest.mark.parametrize("read", [arrays.read_array, arrays.read_npz])
def test_numpy_parses_headers_in_one_thread_at_a_time(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ``ast.literal_eval`` of Python 3.11 fails now and then, with a SystemError."""
    np.savez(tmp_path / "x", x=np.arange(3))
    load, held = np.load, list[bool]()

    def followed(*args: Any, **options: Any) -> Any:
        held.append(arrays._PARSING.locked())
        return load(*args, **options)

    monkeypatch.setattr(np, "load", followed)
    read(tmp_path / "x.npz")
    assert held == [True]
