"""What is written a second time runs in float64 on both sides, so that only mistakes differ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.wide_floats import wide_floats


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with wide_floats():
        yield
