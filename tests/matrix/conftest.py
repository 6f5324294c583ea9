"""The files and the clients' data of all rows, and secrets that follow from their number."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.plugins import is_here
from tests.matrix.rows import files_in
from tests.runs import let_secrets_be_known


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the files that small configs name."""
    return files_in(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(autouse=True)
def _known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two runs have the same noise."""
    let_secrets_be_known(monkeypatch)


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
