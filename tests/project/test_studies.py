"""The studies of benchmarks/: every row is an experiment that could be launched."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from benchmarks.study import Study, config_for, curves, markdown
from fedmodels.resolution import parse_experiment

STUDIES = sorted((Path(__file__).parents[2] / "benchmarks" / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_row_is_a_valid_experiment(path: Path) -> None:
    study = Study.read(path)
    preset = tomllib.loads(study.preset.read_text())
    for row, method in study.methods.items():
        found = parse_experiment(config_for(preset, method, study.set), row)
        assert found.method.name == method.split()[0]


def test_there_are_studies() -> None:
    assert {"gldp", "fedmlp", "pfedgrp", "continual", "continual-circulating"} <= {
        path.stem for path in STUDIES
    }


def test_fedali_is_compared_on_nets_that_pool_by_the_mean_and_on_natural_clients() -> None:
    """The class token sees an image through attention alone, which tokens of norm 1 weaken."""
    vision, wisdm = (
        {row: parse_experiment(config_for(preset, method, study.set), row)
         for row, method in study.methods.items()}
        for study in (Study.read(p) for p in STUDIES if p.stem in ("fedali-cifar", "fedali-wisdm"))
        for preset in (tomllib.loads(study.preset.read_text()),)
    )  # fmt: skip
    by_mean = [row for row, found in vision.items() if found.net.options()["pool"] == "mean"]
    assert [row for row in vision if row not in by_mean] == [
        "the head reads the class token: FedAli",
        "the head reads the class token: FedAvg",
    ]
    assert {found.schedule.clients for found in wisdm.values()} == {58}


def test_switches_go_to_the_table_they_name() -> None:
    preset = {"method": {"name": "gldp", "t": 3}, "net": {"name": "mlp"}, "seed": 0}
    own = tomllib.loads(config_for(preset, "gldp s=2", ["schedule.rounds=4"]))
    assert own["method"] == {"name": "gldp", "t": 3, "s": 2}
    assert own["schedule"] == {"rounds": 4}
    other = tomllib.loads(config_for(preset, 'fedprox mu=0.5 net.name="cnn5"', []))
    assert other["method"] == {"name": "fedprox", "mu": 0.5}
    assert other["net"] == {"name": "cnn5"}
    assert preset["net"] == {"name": "mlp"}


def test_tables_are_means_over_seeds_and_dashes_where_nothing_is_known(tmp_path: Path) -> None:
    runs = [
        finished_run(tmp_path / "0", [0.2, 0.4], 3),
        finished_run(tmp_path / "1", [0.4, 0.6], 5),
    ]
    columns = {"AA": "metrics.aa", "trained": "clients.trained", "w": "clients.w"}
    table = markdown(columns, {"FedAvg": runs, "one seed": runs[:1]}).splitlines()
    assert table[2:] == [
        "| FedAvg | 40.00 ± 10.00 | 4.00 | – |",
        "| one seed (1 of 2 seeds) | 30.00 | 3.00 | – |",
    ]


def test_curves_are_tables_of_a_metric_after_each_round(tmp_path: Path) -> None:
    runs = [
        finished_run(tmp_path / "0", [0.2, 0.4], 3),
        finished_run(tmp_path / "1", [0.4, 0.6], 5),
    ]
    (table,) = curves({"IAA": "iaa"}, {"FedAvg": runs, "failed": []})
    assert table.splitlines() == [
        "| IAA | 1 | 2 | mean |",
        "|---|---|---|---|",
        "| FedAvg | 30 | 50 | 40.0 |",
    ]


def finished_run(run: Path, iaa: list[float], trained: int) -> Path:
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"metrics": {"aa": sum(iaa) / len(iaa)}}))
    clients = {"0": {"trained": trained, "views": {}}, "1": {"trained": trained}, "evaluator": {}}
    lines = [json.dumps({"metrics": {"iaa": value}, "clients": clients}) for value in iaa]
    (run / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    return run
