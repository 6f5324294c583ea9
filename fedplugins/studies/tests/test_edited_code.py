"""A run of a custom method or net whose file was edited since is not tabulated as a new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from fedmodels.errors import ConfigError
from fedmodels.facts.config_file import parse_experiment
from fedplugins.studies.plan import PlannedRun, Sweep, plan
from fedplugins.studies.sweeping import run_sweep
from tests.conftest import TABLES

METHOD = """
from dataclasses import dataclass
from typing import ClassVar
from fedtide import FedAvg

@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    citation: ClassVar[str] = "none"
"""
NET = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.features, self.head = nn.Flatten(), nn.Linear(64, num_classes)
"""


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Sweep, PlannedRun]:
    """Return a sweep of a custom method and net, and its run, which came to its end."""
    (tmp_path / "method.py").write_text(METHOD)
    (tmp_path / "net.py").write_text(NET)
    own = {
        "method": {"name": f"{tmp_path}/method.py:Mine"},
        "net": {"name": f"{tmp_path}/net.py:Mine"},
    }
    (tmp_path / "preset.toml").write_text(tomli_w.dumps({**TABLES, **own}))
    sweep = Sweep(
        preset=tmp_path / "preset.toml", methods={"Mine": own["method"]["name"]}, seeds=(0,)
    )
    (run,) = plan(sweep, tmp_path / "out", ["Mine"], [0])
    run.directory.mkdir(parents=True)
    run.config_file.write_text(run.config)
    resolved = tomli_w.dumps(parse_experiment(run.config).to_dict())
    (run.directory / "config.toml").write_text(resolved)
    (run.directory / "summary.json").write_text("{}")
    return sweep, run


@pytest.mark.parametrize("table", ["method", "net"])
def test_a_finished_run_of_other_code_is_refused(table, finished, tmp_path):
    sweep, run = finished
    assert run.changes() == []
    with (tmp_path / f"{table}.py").open("a") as file:
        file.write("# edited\n")
    with pytest.raises(ConfigError, match=rf"another config; it differs in {table}\.code_sha256"):
        run_sweep(sweep, tmp_path / "out")


def test_a_config_that_cannot_be_read_is_told_of_elsewhere(finished):
    _, run = finished
    (run.directory / "config.toml").write_text("no TOML")
    assert run.changes() == []
