"""The studies of benchmarks/: every row is an experiment that could be launched."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from benchmarks.study import Study, config_for
from fedmodels.config import parse_experiment

STUDIES = sorted((Path(__file__).parents[2] / "benchmarks" / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_row_is_a_valid_experiment(path: Path) -> None:
    study = Study.read(path)
    preset = tomllib.loads(study.preset.read_text())
    for row, method in study.methods.items():
        found = parse_experiment(config_for(preset, method, study.set), row)
        assert found.method.name == method.split()[0]


def test_there_are_studies() -> None:
    assert {"gldp", "fedmlp", "pfedgrp"} <= {path.stem for path in STUDIES}


def test_switches_go_to_the_table_they_name() -> None:
    preset = {"method": {"name": "gldp", "t": 3}, "net": {"name": "mlp"}, "seed": 0}
    own = tomllib.loads(config_for(preset, "gldp s=2", ["schedule.rounds=4"]))
    assert own["method"] == {"name": "gldp", "t": 3, "s": 2}
    assert own["schedule"] == {"rounds": 4}
    other = tomllib.loads(config_for(preset, 'fedprox mu=0.5 net.name="cnn5"', []))
    assert other["method"] == {"name": "fedprox", "mu": 0.5}
    assert other["net"] == {"name": "cnn5"}
    assert preset["net"] == {"name": "mlp"}
