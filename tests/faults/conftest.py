"""The ground that runs are struck on, for all tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.ground import Ground
from tests.faults.processes import Nursery


@pytest.fixture(scope="session")
def ground(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    root = tmp_path_factory.mktemp("faults")
    nursery = Nursery(root / "nursery.log")
    yield Ground(nursery, digits, root / "runs")
    nursery.close()
