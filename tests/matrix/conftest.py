"""The files and the clients' data of all rows, and secrets that follow from their number."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.numerics.secrecy import Secret
from fedmodels.plugins import is_here
from tests.matrix.rows import files_in


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the files that small configs name."""
    return files_in(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(autouse=True)
def _known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let secrets follow from whose they are, so that two runs have the same noise."""

    def fresh(cls: type[Secret]) -> Secret:
        told = sys._getframe(1).f_locals
        where = getattr(told.get("self"), "path", told.get("path", Path()))
        number = [part for part in where.parts if part.isdigit()][-1:]
        return cls(sha256(f"{sys._getframe(1).f_code.co_filename} {number}".encode()).digest())

    monkeypatch.setattr(Secret, "fresh", classmethod(fresh))


class Notes:
    """A tracker that notes in the run directory what it gets."""

    def __init__(self, experiment: Experiment, out: Path, run_id: str) -> None:
        self.file = out / "noted.jsonl"

    def log(self, interaction: int, metrics: Mapping[str, float]) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps([interaction, dict(metrics)]) + "\n")

    def close(self, results: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _noting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tracker of the matrix be there, whatever is installed."""
    if not is_here("trackers"):
        return
    trackers = importlib.import_module("fedplugins.trackers.trackers")
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Notes)
    monkeypatch.setattr(trackers, "check_installed", lambda experiment: None)
