"""Who took part, was set aside or forgotten belongs to what makes runs of several seeds one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from fedmodels.config.experiment import Experiment
from fedsrv.report.frame import group_runs
from fedsrv.report.tables import report_command
from fedsrv.state.run_record import read_run
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedsrv.report.test_report import write_run


def seeds_of(runs: list[Path]) -> list[tuple[str, list[object]]]:
    return [(g.label, [run.seed for run in g.runs]) for g in group_runs(map(read_run, runs))]


def with_summary(run: Path, **facts: object) -> Path:
    said = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**said, **facts}))
    return run


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"clients_forgotten": [1], "clients_set_aside": [1]}, "without=client 1, forgotten"),
        ({"clients_set_aside": [2]}, "without=client 2, set aside"),
        ({"tasks_forgotten": ["1:0"]}, "without=task 1:0, forgotten"),
    ],
)
def test_a_run_without_somebody_is_no_seed_of_the_others(facts, said, tmp_path, capsys):
    runs = [write_run(tmp_path / f"s{seed}", seed=seed) for seed in range(3)]
    with_summary(runs[0], **facts)
    assert seeds_of(runs) == [(f"gldp ({said})", [0]), ("gldp", [1, 2])]
    report_command(runs, None)
    table = capsys.readouterr().out.partition("└")[0]
    assert "3 seeds" not in table
    assert "2 seeds" in table


def test_a_client_that_never_counted_is_missed(tmp_path):
    runs = [write_run(tmp_path / f"s{seed}", seed=seed) for seed in range(2)]
    for number, run in enumerate(runs):
        rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        lines = [json.dumps({**row, "cohort": [0, 1, 2][: 3 - number]}) + "\n" for row in rows]
        (run / "rounds.jsonl").write_text("".join(lines))
    assert seeds_of(runs) == [("gldp", [0]), ("gldp (without=client 2, never there)", [1])]


def test_a_deviation_is_of_seeds_and_of_a_sample(tmp_path, capsys):
    scores = {0: 0.80, 1: 0.81, 2: 0.84}
    runs = [write_run(tmp_path / f"s{s}", seed=s, metrics={"a_glo": scores[s]}) for s in scores]
    twice = write_run(tmp_path / "again", seed=2, metrics={"a_glo": 0.84})
    for given in (runs, [*runs, twice]):
        (group,) = group_runs(map(read_run, given))
        found = group.merge(lambda run: run.metrics())["a_glo"]
        assert (found.n, found.std) == (3, pytest.approx(stdev(scores.values())))
    report_command([runs[2], twice], None)
    assert "±" not in capsys.readouterr().out, "one seed, run twice"


def constant(value: Any, score: float) -> Any:
    """Return a record or a summary all of whose scores are one number."""
    if isinstance(value, dict):
        return {key: constant(each, score) for key, each in value.items()}
    if isinstance(value, list):
        return [constant(each, score) for each in value]
    return score if isinstance(value, float) else value


@pytest.mark.parametrize("kind", ["long_tail", "natural"])
def test_each_deviation_that_is_shown_is_that_of_a_sample(kind, tmp_path, capsys):
    """Scores are 0.80 with one seed and 0.84 with the other: 0.0283 of 0.82; of all, it is 0.02."""
    runs = [write_run(tmp_path / f"s{seed}", seed=seed, kind=kind) for seed in range(2)]
    for run, score in zip(runs, (0.80, 0.84), strict=True):
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        changed = [json.dumps(constant(line, score)) + "\n" for line in lines]
        (run / "rounds.jsonl").write_text("".join(changed))
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(constant(summary, score)))
    page = tmp_path / "page.html"
    report_command(runs, page, everything=True)
    for text in (capsys.readouterr().out, page.read_text()):
        shown = re.findall(r"([0-9.]+)(?: %)? ± ([0-9.]+)", text)
        assert shown
        for mean, deviation in shown:
            if float(mean):
                ratio = float(deviation) / float(mean)
                assert ratio == pytest.approx(0.0283 / 0.82, rel=0.05), (mean, deviation)


def run(out: Path, digits: Path, experiment: Experiment, **options: object) -> None:
    run_in_process(experiment, digits, out, facts=True, **options)


def test_a_forgotten_client_and_task_are_in_the_summary_of_a_run(digits, tmp_path):
    experiment = tiny_experiment(schedule={"rounds": 1})
    run(tmp_path / "run", digits, experiment)
    assert read_run(tmp_path / "run").without == []
    run(tmp_path / "run", digits, experiment, resume=True, forgotten=[1, (2, 0)])
    assert read_run(tmp_path / "run").without == ["client 1, forgotten", "task 2:0, forgotten"]
    (tmp_path / "run" / "summary.json").unlink()  # as while it goes on
    assert read_run(tmp_path / "run").without == ["client 1, forgotten", "task 2:0, forgotten"]
