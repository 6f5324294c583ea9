"""Reading array files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedcli.data import arrays


@pytest.mark.parametrize(
    ("read", "place", "name"),
    [(arrays.read_array, np.lib.format, "read_array"), (arrays.read_npz, np, "load")],
)
def test_numpy_parses_headers_in_one_thread_at_a_time(read, place, name, tmp_path, monkeypatch):
    """Else ``ast.literal_eval`` of Python 3.11 fails now and then, with a SystemError."""
    path = tmp_path / ("x.npz" if name == "load" else "x.npy")
    np.savez(path, x=np.arange(3)) if name == "load" else np.save(path, np.arange(3))
    load, held = getattr(place, name), list[bool]()

    def followed(*args: Any, **options: Any) -> Any:
        held.append(arrays._PARSING.locked())
        return load(*args, **options)

    monkeypatch.setattr(place, name, followed)
    read(path)
    assert held == [True]
