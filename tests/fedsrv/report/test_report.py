"""Reports: what is merged, what may be missing, and that a page needs nothing but itself."""

from __future__ import annotations

import base64
import csv
import errno
import html
import io
import json
import math
import os
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import tomli_w
from rich.console import Console
from rich.table import Table

from fedmodels.console.charts import Spread
from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.numerics.metric_tables import metric
from fedmodels.numerics.metrics import forgetting
from fedsrv.engine.summary import accuracy_lost
from fedsrv.report import quantities
from fedsrv.report import tables as report
from fedsrv.report.frame import difference, group_runs
from fedsrv.report.page import Section
from fedsrv.report.page import page as whole_page
from fedsrv.report.panels import of_uploads
from fedsrv.report.quantities import by_task, view_name
from fedsrv.report.story import story
from fedsrv.report.table import Name
from fedsrv.report.table import Table as ReportTable
from fedsrv.state.run_record import read_run
from tests.conftest import records_of

PARTS = {"metrics", "bytes", "seconds", "clients", "series", "task"}


def write_run(
    path: Path,
    *,
    method: str = "gldp",
    seed: int = 0,
    rounds: int = 4,
    tasks: int = 2,
    clients: int = 3,
    parts: set[str] = PARTS,
    summary: bool = True,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    kind: str = "long_tail",
) -> Path:
    """Write a synthetic run directory; ``parts`` says what its rows hold."""
    path.mkdir(parents=True)
    rng = random.Random(f"{method} {seed}")
    rows = [
        _row(rng, round_, task, round_ * tasks + task, tasks, clients, parts)
        for round_ in range(rounds)
        for task in range(tasks)
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = {
        "seed": seed,
        "data": {"name": "digits", "root": str(path / "data")},
        "scenario": {"kind": kind},
        "method": {"name": method},
        "schedule": {"rounds": rounds, "clients": clients},
        **(config or {}),
    }
    (path / "config.toml").write_text(tomli_w.dumps(tables))
    if summary:
        facts = {
            "format": 1,
            "method": tables["method"]["name"],
            "data": "digits",
            "scenario": kind,
            "seed": seed,
            "rounds": rounds,
            "metrics": metrics or {"a_glo": 0.8 + seed / 100, "a_loc": 0.9, "afm": 0.05},
            "bytes": {"down": 12_300_000, "up": 4_560, "wire_down": 1, "wire_up": 2},
            "seconds": {"train": 10.0, "server": 0.5, "wall": 12.0},
            "state_sha256": "0" * 64,
        }
        (path / "summary.json").write_text(json.dumps(facts))
    return path


def _row(
    rng: random.Random, round_: int, task: int, at: int, tasks: int, clients: int, parts: set[str]
) -> dict[str, Any]:
    grown = 1 - 0.8 * 0.8**at

    def view(bonus: float) -> dict[str, Any]:
        met = [
            min(1.0, max(0.0, grown + bonus - 0.1 * abs(task - k))) if k <= at else None
            for k in range(tasks)
        ]
        known = [value for value in met if value is not None]
        return {"accuracy": sum(known) / len(known), "tasks": met, "classes": [0.5, None, 1.0]}

    facts = {
        str(c): {
            "loss": 2 * 0.8**at + rng.random() / 10,
            "seconds": 0.3 + rng.random() / 10,
            "num_examples": 100,
            "views": {"after_local": view(0.03), "global": view(-0.05)},
        }
        for c in range(clients)
    }
    matrix = [[rng.random() for _ in range(clients)] for _ in range(clients)]
    row: dict[str, Any] = {
        "metrics": {"a_glo": grown, "a_loc": grown, "loss": 1 - grown, "round_best": round_},
        "bytes": {
            "down": 1000 * clients,
            "up": 500 * clients,
            "wire_down": 1100 * clients,
            "wire_up": 550 * clients,
            "per_client": {str(c): {"down": 1000, "up": 500} for c in range(clients)},
        },
        "seconds": {"train": 1.0, "server": 0.1, "wall": 1.2},
        "clients": {**facts, "evaluator": {"seconds": 99.0}},
        "series": {"aggregation_weights": matrix},
        "task": task,
    }
    kept = {key: value for key, value in row.items() if key in parts}
    return {"round": round_, "interaction": at, "cohort": list(range(clients)), **kept}


def label(name: str) -> str:
    return metric(name).label


def lines_of(*runs: Any, everything: bool = False) -> dict[str, list[str]]:
    """Return the cells of a comparison by the names of their rows."""
    table = report.comparison(group_runs(runs), everything)
    return {name.text: list(c) for name, c in zip(table.rows, table.cells, strict=True)}


def best_of(*runs: Any) -> dict[str, str]:
    """Return which column of a comparison is bold in a row, where one is."""
    table = report.comparison(group_runs(runs))
    return {table.rows[row].text: table.columns[column].text for row, column in table.bold}


def text_of(table: Table) -> str:
    console = Console(file=io.StringIO(), width=160, no_color=True)
    console.print(table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def line_of(text: str, name: str) -> list[str]:
    """Return the cells of the table's line that begins with ``name``."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"[│┃]", line)]
        if cells[1:2] == [name]:
            return cells[2:-1]
    raise AssertionError(f"no line {name!r} in\n{text}")


def page_of(tmp_path: Path, *runs: Path) -> str:
    report.write_html([read_run(run) for run in runs], tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


# -- tables ---------------------------------------------------------------------------------------


def test_final_table_shows_metrics_and_cost(tmp_path):
    run = write_run(tmp_path / "run", seed=3, kind="replay_gradual")
    text = text_of(report.final_table(run))
    assert "gldp on digits, replay_gradual, 3 clients, seed 3: 4 rounds" in text
    assert line_of(text, label("a_glo")) == ["83.00"]
    assert line_of(text, label("afm")) == ["5.00"]
    assert line_of(text, "bytes up") == ["4.56 kB"]
    assert line_of(text, "seconds wall") == ["12.0 s"]


def test_how_to_see_the_other_figures_is_on_one_line_under_a_narrow_table(tmp_path):
    metrics = dict.fromkeys(("a_loc", "a_sel", "recall", "precision"), 0.5)
    run = read_run(write_run(tmp_path / "run", method="x", metrics=metrics, config={"data": {}}))
    run.summary.pop("data", None)
    assert " more: fedsrv report --all RUN" in text_of(report.final_table(run))


def test_a_run_in_progress_shows_what_it_has(tmp_path):
    run = read_run(write_run(tmp_path / "run", rounds=2, tasks=2, summary=False))
    text = text_of(report.final_table(run, everything=True))
    assert "2 rounds, not finished" in text
    assert line_of(text, label("a_glo")) == [f"{100 * (1 - 0.8 * 0.8**3):.2f}"]
    assert line_of(text, "round_best") == ["1"]
    assert line_of(text, "bytes down") == ["12 kB"]  # four interactions of 3 x 1000


def test_seeds_merge_as_mean_and_sample_deviation(tmp_path):
    """Accuracies .80, .81, .84: mean .81667, deviations -1/60, -1/150, 7/300; std .020817."""
    values = (0.80, 0.81, 0.84)
    runs = [
        read_run(write_run(tmp_path / f"s{i}", seed=i, metrics={"a_glo": v, "entropy": 2.0}))
        for i, v in enumerate(values)
    ]
    text = text_of(report.compare(runs, everything=True))
    assert line_of(text, label("a_glo")) == ["81.67 ± 2.08"]
    assert line_of(text, "entropy") == ["2 ± 0"]
    assert "3 seeds" in text


@pytest.mark.parametrize(
    ("schedule", "trained", "whose"),
    [
        ({"clients": 4, "per_round": 2}, "", " (2 of 4 clients)"),
        ({"clients": 4, "per_round": 2}, "all", ""),
        ({"clients": 4, "per_round": 4}, "", ""),
    ],
)
def test_a_number_of_the_cohort_says_of_how_many(tmp_path, schedule, trained, whose):
    metrics = {"a_loc_trained": 0.5, "a_loc_received": 0.6}
    config = {"schedule": schedule, "evaluate": {"trained": trained}}
    run = read_run(write_run(tmp_path / "run", metrics=metrics, config=config))
    lines = lines_of(run, everything=True)
    assert lines[label("a_loc_trained") + whose] == ["50.00"]
    assert lines[label("a_loc_received")] == ["60.00"]


def test_a_copied_run_is_no_further_seed(tmp_path):
    runs = [read_run(write_run(tmp_path / name, seed=s)) for name, s in [("a", 0), ("b", 0)]]
    assert "2 runs of 1 seed" in text_of(report.compare(runs))
    other = read_run(write_run(tmp_path / "c", seed=1))
    assert "3 runs of 2 seeds" in text_of(report.compare([*runs, other]))


def test_a_run_that_is_given_again_is_told_of(tmp_path, capsys):
    run = write_run(tmp_path / "a", seed=0)
    report.report_command([run, write_run(tmp_path / "b", seed=1), tmp_path / "." / "a"], None)
    said = capsys.readouterr()
    assert f"note: {run.resolve()} is given 2 times, and taken once" in said.err
    assert "2 seeds" in said.out


def test_summaries_are_printed_as_json(tmp_path, capsys):
    run = write_run(tmp_path / "a", seed=0)
    report.report_command([run], tmp_path / "page.html", as_json=True)
    said = capsys.readouterr()
    assert json.loads(said.out) == [{"run": str(run.resolve()), **read_run(run).summary}]
    assert "report written to" in said.err


def test_the_place_of_a_file_of_ones_own_tells_no_experiments_apart(tmp_path):
    runs = []
    for seed, place in enumerate(("/one", "/other")):
        own = {name: {"name": f"{place}/mine.py:Mine"} for name in ("method", "net")}
        runs.append(read_run(write_run(tmp_path / str(seed), seed=seed, config=own)))
    (group,) = group_runs(runs)
    assert (group.label, len(group.runs)) == ("mine.py:Mine", 2)
    assert {run.method for run in runs} == {"mine.py:Mine"}


def test_only_the_seed_may_differ_within_a_group(tmp_path):
    plain = {"method": {"name": "gldp", "lam": 0.5}}
    other = {"method": {"name": "gldp", "lam": 0.3}}
    referring = {**plain, "evaluate": {"reference": "elsewhere"}}
    runs = [
        read_run(write_run(tmp_path / "a", seed=0, config=plain)),
        read_run(write_run(tmp_path / "b", seed=1, config=referring)),
        read_run(write_run(tmp_path / "c", seed=0, config=other)),
        read_run(write_run(tmp_path / "d", method="fedavg")),
    ]
    groups = group_runs(runs)
    assert [g.label for g in groups] == ["gldp (lam=0.5)", "gldp (lam=0.3)", "fedavg"]
    assert [len(g.runs) for g in groups] == [2, 1, 1]


def test_runs_that_differ_in_much_are_called_by_their_directories(tmp_path):
    """The label had every setting in which one of the runs differed, and filled a page."""
    columns = {"label": "Tätigkeit"}
    places = {"walks/run": 0.5, "falls/run": 0.6, "long": 0.7}
    runs = [
        read_run(
            write_run(
                tmp_path / place,
                config={"method": {"name": "gldp"}, "training": dict.fromkeys("abcde", value)},
            )
        )
        for place, value in places.items()
    ]
    assert [g.label for g in group_runs(runs)] == [f"gldp [{place}]" for place in places]
    few = [
        read_run(write_run(tmp_path / name, config={**config, "method": {"name": "gldp"}}))
        for name, config in (("x", {"data": {"columns": columns}}), ("y", {}))
    ]
    assert group_runs(few)[0].label == 'gldp (data.columns.label="Tätigkeit")'


def test_readings_of_an_earlier_version_are_the_same_settings(tmp_path):
    before = {"method": {"name": "gldp", "lam": 0.5, "bn": "local"}}
    now = {"method": {"name": "gldp", "lam": 0.5, "reading": {"bn": "local"}}}
    runs = [
        read_run(write_run(tmp_path / "a", seed=0, config=before)),
        read_run(write_run(tmp_path / "b", seed=1, config=now)),
    ]
    assert [len(g.runs) for g in group_runs(runs)] == [2]


def test_methods_side_by_side(tmp_path):
    runs = [
        read_run(write_run(tmp_path / "a", metrics={"a_glo": 0.5, "afm": 0.1})),
        read_run(write_run(tmp_path / "b", method="fedavg", metrics={"a_glo": 0.6, "afm": 0.2})),
        read_run(write_run(tmp_path / "c", method="local", metrics={"iaa": 0.6})),
    ]
    assert [c.text for c in report.comparison(group_runs(runs)).columns] == [
        "gldp",
        "fedavg",
        "local",
    ]
    assert lines_of(*runs, everything=True)[label("a_glo")] == ["50.00", "60.00", "–"]
    assert best_of(*runs) == {}, "one seed each says nothing of a winner"


def seeds(place: Path, method: str, *values: float, name: str = "a_glo") -> list[Any]:
    return [
        read_run(write_run(place / f"{method}{i}", method=method, seed=i, metrics={name: value}))
        for i, value in enumerate(values)
    ]


def test_a_winner_beats_every_other_in_a_paired_test(tmp_path):
    """Seeds differ more than methods; b is better than a by .02, .03, .04.

    s = .01, and t of two degrees of freedom is 4.303: half a width of .02484. Against c, whose
    differences are .02, .03 and -.03, nothing is known.
    """
    a = seeds(tmp_path, "a", 0.50, 0.60, 0.70)
    b = seeds(tmp_path, "b", 0.52, 0.63, 0.74)
    c = seeds(tmp_path, "c", 0.50, 0.60, 0.77)
    found = difference({0: 0.52, 1: 0.63, 2: 0.74}, {0: 0.50, 1: 0.60, 2: 0.70})
    assert found
    assert (found.low, found.high) == pytest.approx((0.00516, 0.05484), abs=1e-5)
    assert best_of(*a, *b) == {label("a_glo"): "b"}
    assert best_of(*a, *b, *c) == {}
    two = [*seeds(tmp_path / "two", "a", 0.5, 0.6), *seeds(tmp_path / "two", "b", 0.625, 0.725)]
    assert best_of(*two) == {}, "two seeds are too few"
    untold = (
        "With fewer than 3 seeds that all have, no test says whether such differences are chance."
    )
    assert untold in story(group_runs(two))
    assert untold in story(group_runs([*a, *b[1:]])), "two seeds in common"
    assert untold not in story(group_runs([*a, *b, *c]))
    assert best_of(*a, *b[1:]) == {}, "pairs have the seed in common"
    assert "paired t-test over seeds" in text_of(report.compare([*a, *b]))
    assert "paired" not in text_of(report.compare([*a, *b, *c]))


def test_a_seed_of_its_own_makes_nobody_a_winner(tmp_path):
    """a has the higher mean by its fourth seed; on those in common it is worse by .02 to .04."""
    a = seeds(tmp_path, "a", 0.50, 0.60, 0.70, 0.98)
    b = seeds(tmp_path, "b", 0.52, 0.63, 0.74)
    assert best_of(*a, *b) == {}


def test_less_forgetting_wins(tmp_path):
    a = seeds(tmp_path, "a", 0.5, 0.6, 0.7, name="forgetting")
    b = seeds(tmp_path, "b", 0.4, 0.5, 0.6, name="forgetting")
    assert best_of(*a, *b) == {label("forgetting"): "b"}
    assert best_of(*a, *seeds(tmp_path, "same", 0.5, 0.6, 0.7, name="forgetting")) == {}


def test_a_table_shows_the_figures_of_its_scenario(tmp_path):
    names = (
        "a_glo", "a_loc", "a_loc_received", "a_loc_minority", "a_glo_many", "forgetting", "aa",
        "personalization", "generalization", "global_f1", "loss",
    )  # fmt: skip
    metrics = dict.fromkeys(names, 0.5)
    found = {
        kind: [
            re.sub(r".*\((.*)\) %|forgetting %", r"\1", n) or "forgetting"
            for n in lines_of(read_run(run))
        ]
        for kind in ("per_class_shards", "natural", "replay_gradual")
        if (run := write_run(tmp_path / kind, kind=kind, metrics=metrics))
    }
    costs = ["bytes up", "seconds wall"]
    assert found == {
        "per_class_shards": ["a_loc", "a_loc_minority", "forgetting", "a_glo", *costs],
        "natural": ["personalization", "generalization", "global_f1", "a_loc", *costs],
        "replay_gradual": ["aa", "forgetting", "a_loc", "a_glo", *costs],
    }
    several = [read_run(write_run(tmp_path / m, method=m, metrics=metrics)) for m in ("a", "b")]
    assert next(iter(lines_of(*several))) == label("a_loc_received"), "one view for all methods"
    assert len(names) - 4 + 5 == 12
    assert "12 more: fedsrv report --all RUN" in text_of(report.compare(several))
    assert len(lines_of(*several, everything=True)) == 18


def test_forgetting_is_of_the_moment_that_most_runs_scored(tmp_path):
    both = {"forgetting_received": 0.1, "forgetting_trained": 0.3, "forgetting": 0.1}
    one = read_run(write_run(tmp_path / "one", method="a", metrics=both))
    other = read_run(write_run(tmp_path / "other", method="b", metrics=both))
    late = dict(list(both.items())[1:])
    partly = read_run(write_run(tmp_path / "partly", method="c", metrics=late))
    for runs, name in (
        ([one], label("forgetting")),
        ([one, other], label("forgetting_received")),
        ([one, partly], label("forgetting_trained")),
    ):
        assert next(iter(lines_of(*runs))) == name


def test_many_groups_turn_the_table(tmp_path):
    runs = [read_run(write_run(tmp_path / m, method=m)) for m in "abcdef"]
    table = report.compare(runs)
    assert len(table.rows) == 6
    assert len(report.compare(runs[:2]).columns) == 3


# -- quantities -----------------------------------------------------------------------------------


def hand_written(path: Path, *rows: Mapping[str, Any]) -> Any:
    path.mkdir()
    (path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(path)


def at(round: int, interaction: int, task: int) -> dict[str, int]:
    return {"round": round, "interaction": interaction, "task": task}


def scored(*tasks: float | None) -> dict[str, Any]:
    return {"views": {"global": {"accuracy": tasks[0], "tasks": list(tasks)}}}


def test_quantities_by_hand(tmp_path):
    """Two clients, two tasks; client 1 is not scored on task 1, and sits out interaction 2.

    What is lost on task 0 is client 0's alone, 0.9 - 0.5: client 1 is scored at one time only.
    """
    run = hand_written(
        tmp_path / "run",
        {**at(0, 0, task=0), "clients": {"0": scored(0.8), "1": scored(0.6)}},
        {**at(0, 1, task=1), "clients": {"0": scored(0.5, 0.9), "1": scored(0.7, None)}},
        {**at(1, 2, task=0), "clients": {"0": scored(0.9, 0.4)}},
    )
    assert quantities.task_accuracy(run, "global") == pytest.approx(
        {(1, 0): 0.7, (2, 0): 0.6, (2, 1): 0.9, (3, 0): 0.9, (3, 1): 0.4}
    )
    assert quantities.accuracy_matrix(run, "global") == pytest.approx(
        {(0, 0): 0.9, (0, 1): 0.4, (1, 0): 0.6, (1, 1): 0.9}
    )
    assert quantities.lost_by_task(run, "global") == pytest.approx({0: 0.4})
    assert quantities.client_accuracy(run, "global") == {0: 0.9, 1: 0.7}
    assert quantities.view_curve(run, "global") == pytest.approx({1: 0.6, 2: 0.9})


def test_what_was_lost_is_the_summarys_forgetting(tmp_path):
    """Client 1 has no second task, so it is not scored after it; client 0 gained 0.1 on task 0.

    A mean over whoever is scored would fall from 0.6 to 0.5. Nobody that is scored after task 1 in
    the second run was scored after task 0: it has neither an entry nor a figure.
    """
    rows = [
        {**at(0, 0, task=0), "clients": {"0": scored(0.4), "1": scored(0.8)}},
        {**at(0, 1, task=1), "clients": {"0": scored(0.5, 0.9)}},
    ]
    found = quantities.lost_by_task(hand_written(tmp_path / "run", *rows), "global")
    assert found == pytest.approx({0: -0.1})
    assert forgetting(accuracy_lost(rows, "global")) == pytest.approx(-0.1)  # type: ignore[arg-type]
    rows[1]["clients"] = {"2": scored(0.5, 0.9)}
    assert not quantities.lost_by_task(hand_written(tmp_path / "other", *rows), "global")
    assert math.isnan(forgetting(accuracy_lost(rows, "global")))  # type: ignore[arg-type]


def test_a_task_that_nobody_was_scored_on_meanwhile_has_no_entry(tmp_path):
    """Its best may have been after task 1, where client 1 alone is scored. Of task 1, 0.1 is lost.

    The summary's figure is a mean over both tasks, and missing.
    """
    rows = [
        {**at(0, 0, task=0), "clients": {"0": scored(0.4)}},
        {**at(0, 1, task=1), "clients": {"1": scored(0.8, 0.6)}},
        {**at(0, 2, task=2), "clients": {"0": scored(0.3), "1": scored(None, 0.5, 0.9)}},
    ]
    found = quantities.lost_by_task(hand_written(tmp_path / "run", *rows), "global")
    assert found == pytest.approx({1: 0.1})
    assert math.isnan(forgetting(accuracy_lost(rows, "global")))  # type: ignore[arg-type]
    rows[2]["clients"]["1"]["views"]["global"] = {"first_task": 1, "tasks": [0.5, 0.9]}
    found = quantities.lost_by_task(hand_written(tmp_path / "from-1", *rows), "global")
    assert found == pytest.approx({1: 0.1})


def test_a_task_of_any_number_costs_no_time(tmp_path):
    run = hand_written(
        tmp_path / "run",
        {**at(0, 0, task=0), "clients": {"0": scored(0.8)}},
        {**at(0, 1, task=10**9), "clients": {"0": scored(0.5)}},
    )
    assert quantities.lost_by_task(run, "global") == pytest.approx({0: 0.3})


def test_weights_carry_the_clients_they_belong_to(tmp_path):
    vector = hand_written(
        tmp_path / "vector",
        {"interaction": 0, "cohort": [2, 5], "series": {"aggregation_weights": [0.25, 0.75]}},
        {"interaction": 1, "cohort": [5, 7], "series": {"aggregation_weights": [0.5, 0.5]}},
    )
    expected = {(1, 2): 0.25, (1, 5): 0.75, (2, 5): 0.5, (2, 7): 0.5}
    assert quantities.weight_vectors(vector) == expected
    assert quantities.weight_matrices(vector) == {}
    matrix = hand_written(
        tmp_path / "matrix",
        {"cohort": [2, 5], "series": {"aggregation_weights": [[0.9, 0.1], [None, 1.0]]}},
    )
    assert quantities.weight_matrices(matrix) == {1: {(2, 2): 0.9, (2, 5): 0.1, (5, 5): 1.0}}


def test_who_helped_whom_is_shown_over_the_run(tmp_path):
    """The first, the last and some between; and every client's weight on itself."""
    rows = [
        {"interaction": at, "series": {"aggregation_weights": [[0.9, 0.1], [0.2, 0.8]]}}
        for at in range(11)
    ]
    page = page_of(tmp_path, hand_written(tmp_path / "run", *rows).path)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert captions[0] == "Who helped whom: weights of run in interaction 11"
    weights = [c for c in captions if c.startswith("aggregation weights")]
    assert weights == [f"aggregation weights, interaction {at}" for at in (1, 4, 7, 11)]
    assert "weight of a client's own model" in map(html.unescape, captions)


def test_views_come_in_the_order_of_a_round(tmp_path):
    views = ("other", "after_local", "global:nearest", "global")
    run = hand_written(tmp_path / "run", {"clients": {"0": {"views": dict.fromkeys(views)}}})
    assert quantities.views_of(run) == ["global", "global:nearest", "after_local", "other"]
    assert view_name("global:nearest") == "global model, nearest"


def test_costs_add_up_per_client_without_the_evaluator(tmp_path):
    run = read_run(write_run(tmp_path / "run", rounds=3, tasks=2, clients=2))
    assert quantities.bytes_of_client(run, "down") == {0: 6000, 1: 6000}
    assert quantities.bytes_of_client(run, "up") == {0: 3000, 1: 3000}
    assert set(quantities.seconds_of_client(run)) == {0, 1}
    assert quantities.spent(run, "bytes", "wire_up") == dict.fromkeys(range(1, 7), 1100)


# -- what may be missing --------------------------------------------------------------------------


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    path = write_run(tmp_path / "run", rounds=2, tasks=1)
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "interac')
    assert len(read_run(path).rows) == 2


@pytest.mark.parametrize("missing", sorted(PARTS))
def test_a_part_that_is_missing_is_left_out(tmp_path, missing):
    path = write_run(tmp_path / "run", parts=PARTS - {missing}, summary=False)
    report.final_table(read_run(path))
    shown = headings(page_of(tmp_path, path))
    assert "Summary" in shown
    assert ("Who helped whom" in shown) == (missing != "series")
    assert ("Clients" in shown) == (missing != "clients")


def test_curves_are_drawn_from_the_clients_where_a_run_has_no_metrics(tmp_path):
    derived = ("mean client accuracy, global model", "mean training loss of the cohort")
    whole = page_of(tmp_path, write_run(tmp_path / "whole"))
    bare = page_of(tmp_path, write_run(tmp_path / "bare", parts=PARTS - {"metrics"}))
    for caption in derived:
        assert caption in bare
        assert caption not in whole


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "rounds.jsonl"])
def test_one_file_is_enough(tmp_path, name):
    path = write_run(tmp_path / "run")
    for other in {"config.toml", "summary.json", "rounds.jsonl"} - {name}:
        (path / other).unlink()
    run = read_run(path)
    report.final_table(run)
    report.compare([run, run])
    assert "<h2>Summary</h2>" in page_of(tmp_path, path)


def test_odd_values_are_left_out(tmp_path):
    rows: list[dict[str, Any]] = [
        {
            "round": None,
            "metrics": {"a_glo": None, "loss": float("nan"), "afm": "x"},
            "clients": [],
        },
        {"metrics": {"a_loc": 10**400}, "round": 10**400, "bytes": {"up": 10**400}},
        {"metrics": 3, "bytes": {"per_client": {"x": 1, "3": None}}, "cohort": None},
        {"clients": {"1": {"views": {"global": {"accuracy": None, "tasks": None}}}, "2": None}},
        {"series": {"aggregation_weights": [[], 1, None]}},
        {"series": {"aggregation_weights": []}, "seconds": {"wall": float("inf")}},
        {"confusions": {"global": [3, [None, "x"]], "after_local": 7}},
    ]
    run = hand_written(tmp_path / "run", *rows)
    assert run.metrics() == {}
    report.final_table(run)
    open_ = ["Summary", "Settings", "Everything else", "Every number"]
    assert headings(page_of(tmp_path, tmp_path / "run")) == open_


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", "{", "summary.json is damaged"),
        ("summary.json", "[]", "it holds no object"),
        ("summary.json", "[" * 100_000, "summary.json is damaged"),
        ("config.toml", "seed = ", "config.toml is damaged"),
        ("config.toml", f"seed = {'9' * 5000}", "config.toml is damaged"),
        ("config.toml", f"seed = {'[' * 5000}", "config.toml is damaged"),
        ("rounds.jsonl", '{}\n{"round"\n{}\n', "rounds.jsonl line 2 is damaged"),
        ("rounds.jsonl", '{"round"\n', "; fedsrv launch --resume of this run rewrites the file"),
        ("rounds.jsonl", b"\xff\n", "rounds.jsonl cannot be read: it is not text"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path, name, content, message):
    path = write_run(tmp_path / "run")
    (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArchiveError) as caught:
        read_run(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_run_that_cannot_be_read_hides_no_other(tmp_path, capsys):
    run, damaged = write_run(tmp_path / "run"), write_run(tmp_path / "damaged")
    (damaged / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match=r"summary\.json is damaged.*; .*nowhere is not a run"):
        report.report_command([run, damaged, tmp_path / "nowhere"], tmp_path / "page.html")
    assert "a_loc" in capsys.readouterr().out
    assert (tmp_path / "page.html").exists()


def test_what_is_no_run_directory_is_one_line(tmp_path):
    """A place that is no directory is a mistake in the command, with the exit status of those."""
    for path, kind, status in ((tmp_path / "nowhere", ConfigError, 2), (tmp_path, ArchiveError, 1)):
        with pytest.raises(kind, match="is not a run directory") as error:
            report.report_command([path], None)
        assert error.value.exit_code == status
    (file := tmp_path / "page.html").touch()
    with pytest.raises(ConfigError, match=r"page\.html is a file; name the run directory"):
        report.report_command([file], None)
    with pytest.raises(ConfigError, match="at least one"):
        report.report_command([], None)
    run = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be written"):
        report.report_command([run], tmp_path / "nowhere" / "report.html")


# -- the page -------------------------------------------------------------------------------------


class References(HTMLParser):
    """Collects tags, and whatever a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "xlink:href", "data", "poster")
        self.references += [value or "" for name, value in attrs if name in names]


def test_page_needs_nothing_but_itself(tmp_path):
    runs = [write_run(tmp_path / f"s{i}", seed=i) for i in range(2)]
    page = page_of(tmp_path, *runs, write_run(tmp_path / "other", method="fedavg"))
    found = References()
    found.feed(page)
    assert found.references
    assert all(r.startswith(("#", "data:image/", "data:text/csv")) for r in found.references)
    assert not {"script", "link", "iframe", "img"} & set(found.tags)
    assert "http" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_page_has_every_section_and_sound_figures(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "run"))
    open_ = ["Summary", "Settings", "Everything else"]
    folded = ["Every number", "Over rounds", "Clients", "Classes", "Tasks"]
    assert headings(page) == [*open_, *folded, "Who helped whom", "Cost"]
    figures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert len(figures) == len(captions) == 24
    assert "matrix of accuracies, global model" in captions
    for figure in figures:
        ElementTree.fromstring(figure.replace("<svg", '<svg xmlns:xlink="x"', 1))


def test_what_a_rounds_clients_know_after_each_task_is_drawn(tmp_path):
    """Figure 4 of FedMLP and of GLDP: a line for each method, b and d of the rare classes."""
    names = ("a_sel_trained_task", "a_sel_trained_minority_task")
    scores = {f"{name}_{task}": 0.9 - task / 10 for name in names for task in range(3)}
    page = page_of(tmp_path, write_run(tmp_path / "run", metrics={"a_glo": 0.8, **scores}))
    captions = map(html.unescape, re.findall(r"<figcaption>(.*?)</figcaption>", page))
    assert [text for text in captions if text.endswith("after each task")] == [
        f"{metric(name).title}, after each task" for name in names
    ]
    assert by_task(read_run(tmp_path / "run"), names[1]) == {0: 0.9, 1: 0.8, 2: 0.7}


def test_one_task_has_no_forgetting(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "run", tasks=1))
    assert "matrix of accuracies" not in page
    assert "What was forgotten" not in page


def test_a_view_scored_at_the_end_only_has_no_forgetting(tmp_path):
    hand_written(tmp_path / "run", {**at(0, 1, task=1), "clients": {"0": scored(0.5, 0.9)}})
    assert "matrix of accuracies" not in page_of(tmp_path, tmp_path / "run")


def test_the_answer_stands_before_the_folds(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "run"))
    before = page[: page.index("<h2>Settings</h2>")]
    titles = re.findall(r"<figcaption>(.*?)[:<]", before)
    questions = ["On old tasks", "What was forgotten", "Who helped whom", "At what cost"]
    assert titles == ["How good", *questions]
    assert page.count("<details") == page.count("</details>") == 8
    assert "prefers-color-scheme: dark" in page


def test_a_figure_of_the_whole_run_leaves_the_first_curve_to_the_next_metric(tmp_path):
    """A replay stream's main metric is AA, a mean over the run, which no round has."""
    metrics = {"aa": 0.7, "a_loc": 0.9, "a_glo": 0.8}
    page = page_of(tmp_path, write_run(tmp_path / "run", kind="replay_gradual", metrics=metrics))
    assert "<figcaption>How good: clients&#39; models, own test data" in page
    assert "Average accuracy over the run" in page


def test_a_report_has_no_confusion_matrix_of_a_view_that_scored_nothing(tmp_path):
    row = {"clients": {"0": {"views": {"global": {"accuracy": 0.9, "classes": [0.75, 1.0]}}}}}
    empty = {"confusions": {"global": [[0, 0], [0, 0]]}}
    hand_written(tmp_path / "run", {**at(0, 0, task=0), **row, **empty})
    assert "confusion-matrix" not in page_of(tmp_path, tmp_path / "run")


def test_the_confusion_matrix_of_a_report_is_of_the_last_record(tmp_path):
    """Class 0 was taken for class 1 by a quarter; class 2 has no test example."""
    end = {"global": [[3, 1, 0], [0, 4, 0], [0, 0, 0]]}
    row = {"clients": {"0": {"views": {"global": {"accuracy": 0.9, "classes": [0.75, 1.0]}}}}}
    last = {**at(0, 1, task=0), **row, "confusions": end}
    hand_written(tmp_path / "run", {**at(0, 0, task=0), **row}, last)
    page = page_of(tmp_path, tmp_path / "run")
    (file,) = re.findall(
        r'download="confusion-matrix-global-model.csv" href="data:text/csv;charset=utf-8,(.*?)"',
        page,
    )
    heads, *cells = csv.reader(io.StringIO(unquote(html.unescape(file))))
    assert heads == ["true class", "predicted class", "share of the true class", "examples"]
    assert cells[:2] == [["0", "0", "0.75", "3.0"], ["0", "1", "0.25", "1.0"]]
    assert {true for true, *_ in cells} == {"0", "1"}


def test_the_numbers_of_a_figure_come_with_it(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "run", clients=2))
    links = re.findall(r'download="(.*?)" href="data:text/csv;charset=utf-8,(.*?)"', page)
    files = {name: list(csv.reader(io.StringIO(unquote(html.unescape(t))))) for name, t in links}
    assert len(links) == page.count("<svg")
    rows = files["logical-bytes-per-client.csv"]
    assert rows[0] == ["line", "client", "bytes, mean", "standard deviation", "runs"]
    assert rows[1] == ["down", "0", "8000.0", "0.0", "1"]


def test_a_page_holds_no_digits_that_nobody_sees(tmp_path):
    """Coordinates have hundredths of a point, numbers six digits; labels stay as they are."""
    rates = {"lr": 0.00012345}, {"lr": 0.5}
    paths = [
        write_run(tmp_path / str(i), config={"training": rate}) for i, rate in enumerate(rates)
    ]
    page = page_of(tmp_path, *paths)
    figures = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    coordinates = re.findall(r' (?:d|x|y)="([^"]*)"', figures)
    assert "." in "".join(coordinates)
    assert not re.search(r"\.\d{3}", " ".join(coordinates))
    assert "<!--" not in figures
    assert "lr=0.00012345" in figures
    (numbers,) = re.findall(r'download="seconds-of-training-per-client.csv" href="(.*?)"', page)[:1]
    assert not re.search(r"\.0*[1-9]\d{6}", unquote(numbers))


def test_what_a_page_asks_for_often_is_computed_once(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    for quantity in (quantities.task_accuracy, quantities.accuracy_matrix):
        assert quantity(run, "global") is quantity(run, "global")
        assert quantity(run, "global") != quantity(run, "after_local")


def test_machine_and_config_are_shown(tmp_path):
    path = write_run(tmp_path / "run")
    assert "no env.json says on which machine it ran" in page_of(tmp_path, path)
    (path / "env.json").write_text('{"torch": "2.9", "git_commit": "abc"}')
    page = page_of(tmp_path, path)
    assert "torch 2.9, git_commit abc" in page
    assert "kind = &#34;long_tail&#34;" in page


def test_sentences_by_hand(tmp_path):
    """Task 0 fell from .8 to .5 in one run, and rose from .5 to .6 in the other."""

    def run(name: str, *row: Mapping[str, Any]) -> Any:
        rows = [{**at(i, i, task=i), "clients": {"0": facts}} for i, facts in enumerate(row)]
        made = hand_written(tmp_path / name, *rows)
        metrics = {"a_loc_received": 0.7, "a_loc_received_minority": 0.6}
        facts = {"method": name, "metrics": metrics, "bytes": {"up": 2000}, "seconds": {"wall": 3}}
        (made.path / "summary.json").write_text(json.dumps(facts))
        return read_run(made.path)

    one = run("forgets", scored(0.8), scored(0.5, 0.9))
    other = run("keeps", scored(0.5), scored(0.6, 0.7))
    assert story(group_runs([one, other])) == [
        "Clients' models, as received: forgets 70.0 %, keeps 70.0 %.",
        "With one seed each, no test says whether such differences are chance.",
        "On the rare classes: forgets 60.0 % (10.0 points less than on all classes), "
        "keeps 60.0 % (10.0 points less than on all classes).",
        "On earlier tasks, models at the end (as received): forgets 50.0 %, keeps 60.0 %.",
        "From the best accuracy on each earlier task to the end (as received): forgets lost 30.0 "
        "points, keeps gained 10.0 points.",
        "Clients sent: forgets 2 kB in 3.0 s, keeps 2 kB in 3.0 s.",
    ]
    assert story(group_runs([one]))[0] == "Clients' models, as received: 70.0 %."
    same = run("same", scored(0.5), scored(0.5001, 0.7))
    summary = json.loads((same.path / "summary.json").read_text())
    summary["metrics"]["a_loc_received_minority"] = 0.7001
    (same.path / "summary.json").write_text(json.dumps(summary))
    said = story(group_runs([read_run(same.path)]))
    assert "On the rare classes: 70.0 % (as on all classes)." in said
    assert any(line.endswith("task to the end (as received): lost nothing.") for line in said)


def test_each_site_and_class_stands_before_the_folds(tmp_path, capsys):
    """A mean of 85 % hid a site of 70 %, and a class of which it found none."""
    path = write_run(
        tmp_path / "run", kind="", rounds=1, tasks=1, clients=2, metrics={"a_loc": 0.85}
    )
    (row,) = records_of(path)
    row["metrics"] |= {"a_loc": 0.85, "a_loc_received": 0.85, "a_loc_trained": 0.9}
    for client, right, found in (("0", 1.0, [1.0, 1.0]), ("1", 0.7, [0.9, 0.0])):
        row["clients"][client] |= {"num_examples": 90, "task": 3}
        view = {"accuracy": right, "classes": found, "auroc": 0.75}
        row["clients"][client]["views"] = {"global": view, "after_local": {"accuracy": 0.9}}
    (path / "rounds.jsonl").write_text(json.dumps(row) + "\n")
    facts = {"classes": ["red", "green"], "clients": {"1": "Ost"}}
    (path / "data.json").write_text(json.dumps(facts))
    (path / "clients/1/model").mkdir(parents=True)
    told = {"last": "live is the model of round 1"}
    (path / "clients/1/model/status.json").write_text(json.dumps(told))
    found = page_of(tmp_path, path).partition("<details>")[0]
    cells = [re.findall(r"<td>(.*?)</td>", line) for line in found.split("<tr>")]
    assert ["100.0", "100.0", "100.0", "75.0", "90", "3", "1", "–"] in cells
    assert ["70.0", "90.0", "0.0", "75.0", "90", "3", "1", "live is the model of round 1"] in cells
    said = "By site: from 70.0 % (client Ost) to 100.0 % (client 0); "
    said += "least recall: 0.0 % of green at client Ost."
    assert said in story(group_runs([read_run(path)]))
    row["clients"]["0"]["views"]["global"]["accuracy"] = 0.7
    (path / "rounds.jsonl").write_text(json.dumps(row) + "\n")
    said = "By site: 70.0 % at each; least recall: 0.0 % of green at client Ost."
    assert said in story(group_runs([read_run(path)])), "nobody is the best and the worst"
    report.report_command([path], html=None)
    assert "client Ost" in capsys.readouterr().out.partition("By site")[0]
    dealt = write_run(tmp_path / "dealt", clients=2)
    assert "recall" not in page_of(tmp_path, dealt).partition("<details>")[0]


def test_a_sites_share_says_of_how_many_examples_it_is(tmp_path):
    """A recall of 100 % rested on 8 rows. The interval of 8 of 8 is that of Wilson's table."""
    path = write_run(
        tmp_path / "run", kind="", rounds=1, tasks=1, clients=2, metrics={"a_loc": 1.0},
        config={"data": {"name": "table", "columns": {"label": "colour"}}},
    )  # fmt: skip
    (row,) = records_of(path)
    for client in ("0", "1"):
        view = {"accuracy": 1.0, "classes": [1.0, 1.0]}
        row["clients"][client] = {"views": {"global": view}}
    (path / "rounds.jsonl").write_text(json.dumps(row) + "\n")
    facts = {"classes": ["red", "green"], "tests": {"0": [8, 92], "1": [0, 0]}}
    (path / "data.json").write_text(json.dumps(facts))
    found = page_of(tmp_path, path).partition("<details>")[0]
    assert "100.0 of 8 [67.6, 100.0]" in found
    assert "100.0 of 100 [96.3, 100.0]" in found
    assert "in brackets the 95 % confidence interval" in found
    assert "<title>gldp on digits, predicting colour, 2 clients</title>" in found


def test_a_dash_is_explained(tmp_path):
    metrics = {"a_glo": 0.5, "forgetting": 0.1}
    runs = [
        write_run(tmp_path / "whole", kind="", metrics={"a_loc": 0.5, **metrics}),
        write_run(tmp_path / "local", kind="", method="local", metrics={"a_loc": 0.6}),
    ]
    said = text_of(report.compare([read_run(run) for run in runs]))
    said = " ".join(said.split())
    assert "global model, clients' test data: no global model was scored" in said
    assert "forgetting: it needs a second task" in said
    assert "A dash" not in text_of(report.compare([read_run(runs[1])]))


@pytest.mark.parametrize(
    ("among", "said"),
    [
        (("classes met", "all classes"), "gldp: chosen among the classes that a client has met; "),
        (("all classes", "all classes"), "Each chooses among all classes."),
        (("classes met", ""), ""),
    ],
)
def test_a_verdict_says_among_which_classes_each_chooses(tmp_path, among, said):
    for method, mean, own in zip(("gldp", "fedavg"), (0.9, 0.5), among, strict=True):
        for seed in range(3):
            metrics = {"a_loc": mean + seed / 1000}
            run = write_run(
                tmp_path / f"{method}-{seed}", method=method, seed=seed, metrics=metrics
            )
            summary = json.loads((run / "summary.json").read_text()) | {"chooses_among": own}
            (run / "summary.json").write_text(json.dumps(summary))
    found = story(group_runs(map(read_run, sorted(tmp_path.iterdir()))))
    assert "gldp is better than every other in a paired test over seeds." in found
    assert any(said in line for line in found if "choose" in line or "chosen" in line) == bool(said)


def test_the_page_of_a_sweep_has_one_summary_table(tmp_path):
    """The table of the sweep stands in place of the report's: both had a row for each method."""
    groups = group_runs([read_run(write_run(tmp_path / "run"))])
    table = ReportTable([Name("A")], [Name("gldp")], [["80.00"]])
    assert whole_page(groups).partition("<details>")[0].count("<table>") == 1
    found = whole_page(groups, [Section("The sweep's columns", "", [], [table])])
    assert found.partition("<details>")[0].count("<table>") == 1
    assert ">80.00</td>" in found


def test_names_stand_in_place_of_numbers(tmp_path):
    path = write_run(tmp_path / "run", clients=2)
    facts = {"classes": ["cat", "dog", "<b>"], "clients": {"0": "ann", "1": "ben \x1b[2J"}}
    (path / "data.json").write_text(json.dumps(facts))
    page = page_of(tmp_path, path)
    assert "<b>" not in page
    assert "\x1b" not in page
    links = re.findall(r'download="(.*?)" href="data:text/csv;charset=utf-8,(.*?)"', page)
    files = {name: list(csv.reader(io.StringIO(unquote(html.unescape(t))))) for name, t in links}
    assert files["last-accuracy-per-class-mean-over-clients.csv"][1][1] == "cat"
    assert files["logical-bytes-per-client.csv"][1][1] == "ann"
    weights = next(rows for name, rows in files.items() if name.startswith("Who-helped"))
    assert weights[2][:2] == ["ann", "ben \\x1b[2J"]
    assert "Most help went to client" in page
    assert re.search(r"to client (ann|ben .{7}), from client (ann|ben)", page)


@pytest.mark.parametrize(
    ("examples", "rare", "said"),
    [
        ([60, 60, 60], [], ""),
        ([60, 61, 59], [2], ""),
        ([60, 50, 20], [2], "On the rare classes (frog): 60.0 % (10.0 points less than on all"),
        (None, None, "On the rare classes: 60.0 %"),
    ],
)
def test_rare_classes_are_spoken_of_where_there_are_any(tmp_path, examples, rare, said):
    """With 60 examples of each, the rare half of the classes was whatever an index made it."""
    metrics = {"a_loc": 0.7, "a_loc_minority": 0.6}
    path = write_run(tmp_path / "run", metrics=metrics)
    rows = records_of(path)
    for row in rows:
        row["metrics"]["a_loc_minority"] = row["metrics"]["a_loc"] / 2
    (path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if examples:
        facts = {"classes": ["cat", "dog", "frog"], "examples": examples, "rare": rare}
        (path / "data.json").write_text(json.dumps(facts))
    run = read_run(path)
    sentences = [line for line in story(group_runs([run])) if "rare" in line]
    assert [line.startswith(said) for line in sentences] == [True] * bool(said)
    assert (label("a_loc_minority") in lines_of(run)) == bool(said)
    assert ("On rare classes" in page_of(tmp_path, path)) == bool(said)


def test_whose_uploads_stood_out_is_said_and_drawn(tmp_path):
    warned = [{"7": "it points"}, {"7": "it", "2": "it"}, {"7": "it", "2": "it"}]
    rows = [{**at(i, i, task=0), "warned": who} for i, who in enumerate(warned)]
    clients = {str(c): {"aggregation_weight": 0.1 * c, "difference_cosine": 1 - c} for c in (2, 7)}
    run = hand_written(tmp_path / "run", *({**row, "clients": clients} for row in rows))
    line = "run: uploads stood out of their cohorts: client 7 (3 times), client 2 (2 times)."
    assert line in story(group_runs([run]))
    drawn = {chart.caption: chart for chart in of_uploads(run)}
    assert drawn["uploads that stood out of their cohort"].values == {
        "": {2: Spread(2.0), 7: Spread(3.0)}
    }
    assert drawn["direction of an upload"].values[""][7, 1] == Spread(-6.0)
    assert drawn["share of an upload in the result"].is_telling


def test_weights_that_are_much_alike_name_no_helper(tmp_path):
    weights = [[0.27, 0.24], [0.25, 0.26]]
    run = hand_written(tmp_path / "run", {"series": {"aggregation_weights": weights}})
    assert "run: all weights are much alike, from 0.24 to 0.27." in story(group_runs([run]))


def test_a_chart_of_zeros_is_left_out(tmp_path):
    rows = [{**at(i, i, 0), "metrics": {"replay_shortage": 0.0, "loss": 1.0}} for i in range(3)]
    hand_written(tmp_path / "run", *rows)
    page = page_of(tmp_path, tmp_path / "run")
    assert "training loss (loss)</figcaption>" in page
    assert "(replay_shortage)</figcaption>" not in page


def test_what_is_forgotten_is_compared_at_one_moment(tmp_path):
    """A run that scored what clients hold at its end alone is compared by trained models."""
    views = {"after_local": {"tasks": [0.4]}}
    whole = hand_written(
        tmp_path / "whole", *[{**at(i, i, i), "clients": {"0": scored(0.5)}} for i in (0, 1)]
    )
    partly = hand_written(
        tmp_path / "partly", *[{**at(i, i, i), "clients": {"0": {"views": views}}} for i in (0, 1)]
    )
    assert quantities.comparable_view([whole]) == quantities.RECEIVED
    assert quantities.comparable_view([whole, partly]) == "after_local"


def test_equal_runs_give_equal_pages(tmp_path):
    path = write_run(tmp_path / "run")
    assert page_of(tmp_path, path) == page_of(tmp_path, path)


def test_names_in_a_page_are_text(tmp_path):
    config = {"method": {"name": "<script>$a_b$"}}
    runs = [write_run(tmp_path / "a", config=config), write_run(tmp_path / "b", method="&x")]
    page = page_of(tmp_path, *runs)
    assert "<script" not in page
    assert "&lt;script&gt;$a_b$" in page


FORGED = "\x1b[2J\x9b31mfine\nerror: forged \u202e"


@pytest.mark.parametrize("summary", [True, False])
def test_nothing_in_a_run_of_others_writes_to_the_terminal_by_itself(tmp_path, capsys, *, summary):
    config = {"method": {"name": FORGED, FORGED: FORGED}, "data": {"name": FORGED}}
    one = write_run(
        tmp_path / "a", config=config, kind=FORGED, summary=summary, metrics={FORGED: 0.5}
    )
    two = write_run(tmp_path / "b", config={"method": {"name": FORGED}}, kind=FORGED)
    for run in (one, two):
        record = records_of(run)[-1]
        record["metrics"][FORGED] = 1.0
        record["clients"]["0"]["views"][FORGED] = {"accuracy": 0.5, "tasks": [0.5]}
        with (run / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    for runs in ([one], [one, two]):
        report.report_command(runs, None, everything=True)
        shown = "".join(capsys.readouterr())
        assert "forged" in shown
        assert "\nerror: forged" not in shown
        assert all(c.isprintable() or c == "\n" for c in shown)


def test_many_clients_and_rounds_stay_light(tmp_path):
    path = write_run(tmp_path / "run", clients=60, rounds=30, tasks=1)
    assert len(page_of(tmp_path, path)) < 1_200_000


def test_command_prints_tables_and_writes_the_page(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", method="fedavg")
    report.report_command([a], None)
    assert label("a_glo") in capsys.readouterr().out
    report.report_command([a, b, a], tmp_path / "out.html")
    out = capsys.readouterr().out
    assert "fedavg" in out
    assert "±" not in out  # the run given twice counts once
    assert (tmp_path / "out.html").exists()


def test_a_page_that_does_not_fit_leaves_the_earlier_one(tmp_path, monkeypatch):
    def full(path: Path, text: str, *_: object, **__: object) -> int:
        path.write_bytes(text.encode()[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    page.write_text("an earlier one")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"page.html cannot be written: No space left"):
        report.report_command([run], page)
    assert page.read_text() == "an earlier one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_page_may_go_into_a_pipe(tmp_path):
    run, pipe = write_run(tmp_path / "run"), tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(pipe.read_text)
        report.report_command([run], pipe)
        assert text.result().rstrip().endswith("</html>")
    assert pipe.is_fifo()


def test_a_page_may_go_to_where_standard_output_goes(tmp_path):
    """/dev/stdout is a link, by way of /proc, to what the shell has opened: a file here."""
    run, standard, page = write_run(tmp_path / "run"), tmp_path / "stdout", tmp_path / "page.html"
    with page.open("w") as opened:
        standard.symlink_to(f"/proc/self/fd/{opened.fileno()}")
        report.report_command([run], standard)
    assert standard.is_symlink()
    assert page.read_text().rstrip().endswith("</html>")


def test_a_finished_run_whose_rounds_are_cut_is_told_of(tmp_path, capsys):
    run = write_run(tmp_path / "a", seed=0)
    report.report_command([run], None)
    assert "note" not in capsys.readouterr().err
    rounds = run / "rounds.jsonl"
    first, *_, last = rounds.read_text().splitlines(keepends=True)
    rounds.write_text(first + last)  # nobody was there in the rounds between
    report.report_command([run], None)
    assert "note" not in capsys.readouterr().err
    rounds.write_text(first)
    report.report_command([run], None)
    assert "rounds.jsonl ends at round 1 of 4: curves" in capsys.readouterr().err


def test_a_page_embeds_no_file_from_outside_of_the_run(tmp_path):
    """A client that can write its directory could have the page of others show what it names."""
    run, drawn = tmp_path / "run", tmp_path / "run" / "clients" / "0" / "pictures"
    drawn.mkdir(parents=True)
    (run / "rounds.jsonl").touch()
    png = b"\x89PNG\r\n\x1a\n"
    (drawn / "a.png").write_bytes(png + b"mine")
    (tmp_path / "secret.png").write_bytes(png + b"secret")
    (tmp_path / "secret").write_bytes(b"secret")
    (drawn / "b.png").symlink_to(tmp_path / "secret.png")
    (drawn / "c.png").symlink_to(tmp_path / "secret")
    (drawn / "d.png").write_bytes(b"no picture")
    (drawn / "e.png").symlink_to("a.png")
    (drawn / "f.png").symlink_to("f.png")
    os.mkfifo(drawn / "g.png")
    (run / "clients" / "1").symlink_to(tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "h.png").write_bytes(png + b"secret")
    mine = f"data:image/png;base64,{base64.b64encode(png + b'mine').decode()}"
    assert read_run(run).pictures() == [("a", 0, mine), ("e", 0, mine)]


def test_a_picture_of_a_client_can_run_nothing(tmp_path):
    """As an image an SVG runs no script and loads nothing; as part of the page it would."""
    run = write_run(tmp_path / "run")
    (drawn := run / "clients" / "0" / "pictures").mkdir(parents=True)
    forged = "<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    (drawn / "prototypes.svg").write_text(forged)
    (drawn / "page.svg").write_text(f"<!DOCTYPE html>{forged}")
    page = page_of(tmp_path, run)
    assert "<script" not in page
    (source,) = re.findall(r'<img alt="prototypes of client 0" src="(.*?)">', page)
    kind, data = source.split(",")
    assert (kind, base64.b64decode(data).decode()) == ("data:image/svg+xml;base64", forged)
    assert page.count("<img") == 1


@pytest.mark.parametrize("name", ["rounds.jsonl", "summary.json", "config.toml"])
def test_a_pipe_in_place_of_a_record_is_no_wait(name, tmp_path):
    (tmp_path / "env.json").touch()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ArchiveError, match=f"{name} cannot be read: it is no regular file"):
        read_run(tmp_path)
