"""Lengths, winners, records and pictures of a sweep, from figures by hand."""

from __future__ import annotations

import errno
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tomli_w

from fedmodels.errors import ConfigError
from fedmodels.facts.config_file import parse_experiment
from fedplugins.studies.outcome import ForPapers, Outcome, read_record, to_json
from fedplugins.studies.plan import Cell, Sweep, plan
from fedplugins.studies.tables import charts_of, draw, page, section_of
from fedsrv.report.frame import RunNumbers, kept_up_to, winner
from fedsrv.report.table import Name, Table
from fedsrv.report.tables import write_html
from fedsrv.state.run_record import read_run
from tests.conftest import TABLES

LENGTHS = {"1 × rounds": 1, "2 × rounds": 2}
SCORES = {
    ("1 × rounds", "A"): [0.50, 0.60, 0.55],
    ("1 × rounds", "B"): [0.51, 0.59, 0.55],
    ("2 × rounds", "A"): [0.70, 0.80, 0.75],
    ("2 × rounds", "B"): [0.60, 0.70, 0.651],
}


def outcome(scores=SCORES, lengths=LENGTHS) -> Outcome:
    runs = [
        RunNumbers(
            Cell(*cell), seed, {"metrics.a_loc": value}, {"iaa": [0.1, value]}, {"torch": "2"}
        )
        for cell, values in scores.items()
        for seed, value in enumerate(values)
    ]
    cells = [Cell(*cell) for cell in scores]
    return Outcome(runs, cells, {"A_loc": "metrics.a_loc"}, "B", 3, {"IAA": "iaa"}, lengths)


def test_a_row_is_run_at_every_length(tmp_path):
    """The preset's two rounds, the row's three, and the default of what nobody gave."""
    (tmp_path / "preset.toml").write_text(tomli_w.dumps({**TABLES, "schedule": {"rounds": 2}}))
    told = {
        "preset": "preset.toml",
        "columns": {},
        "methods": {"plain": "fedavg", "own": "fedavg schedule.rounds=3"},
        "lengths": [1, 4],
    }
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(told))
    sweep = Sweep.read(tmp_path / "sweep.toml")
    runs = plan(sweep, tmp_path, ["plain", "own"], [0])
    assert [(run.cell.title, parse_experiment(run.config).schedule.rounds) for run in runs] == [
        ("1 × rounds: plain", 2),
        ("1 × rounds: own", 3),
        ("4 × rounds: plain", 8),
        ("4 × rounds: own", 12),
    ]
    assert len({run.directory for run in runs}) == 4
    told |= {"lengthens": "training.local_epochs", "settings": {"s": ["training.lr=0.5"]}}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(told))
    *_, last = plan(Sweep.read(tmp_path / "sweep.toml"), tmp_path, ["plain"], [0])
    assert last.cell.setting == "s, 4 × local_epochs"
    epochs = TABLES.get("training", {}).get("local_epochs", 1)
    assert tomllib.loads(last.config)["training"] == {
        **TABLES.get("training", {}), "lr": 0.5, "local_epochs": 4 * epochs,
    }  # fmt: skip


def test_a_stream_is_lengthened_by_its_parts(tmp_path):
    """With tasks as rounds, more rounds of each task would be more of the same examples."""
    preset = {**TABLES, "scenario": {"kind": "replay_gradual", "parts": 2, "images_per_part": 1}}
    told = {"preset": "preset.toml", "columns": {}, "methods": {"plain": "fedavg"}}
    told |= {"lengths": [1, 4], "lengthens": "scenario.parts"}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(told))
    (tmp_path / "preset.toml").write_text(tomli_w.dumps(preset))
    runs = plan(Sweep.read(tmp_path / "sweep.toml"), tmp_path, ["plain"], [0])
    scenarios = [tomllib.loads(run.config)["scenario"] for run in runs]
    assert [scenario["parts"] for scenario in scenarios] == [2, 8]
    (tmp_path / "preset.toml").write_text(tomli_w.dumps(TABLES))
    with pytest.raises(ConfigError, match=r"'scenario.parts': \[scenario\] .* has no 'parts'"):
        plan(Sweep.read(tmp_path / "sweep.toml"), tmp_path, ["plain"], [0])


def test_a_winner_beats_every_other_row_seed_by_seed():
    """By 5, 5.1 and 5.2 on seeds that differ by more; with two of these seeds nobody wins."""
    a, b = {0: 10.0, 1: 20.1, 2: 30.2}, {0: 5.0, 1: 15.0, 2: 25.0}
    values = {"a": a, "b": b}
    assert winner(values, 1) == "a"
    assert winner(values, -1) == "b"
    assert winner(values, 0) is None
    assert winner({**values, "c": {0: 9.0, 1: 21.0, 2: 28.0}}, 1) is None
    assert winner({**values, "c": {3: 0.0}}, 1) is None  # no seed in common
    assert winner({"a": a}, 1) is None  # nobody to beat
    assert winner({"a": {0: 10.0, 1: 20.1}, "b": {0: 5.0, 1: 15.0}}, 1) is None


def test_names_of_rows_break_no_table():
    """A bar ended a cell; after a row's end, LaTeX takes a star or a bracket as its own."""
    table = Table(
        [Name("a|b < 1")], [Name("[ours]"), Name("*"), Name("2 × x|y\nz")], ["1", "2", "3"]
    )
    head, _, *rows = table.markdown().splitlines()
    assert (head, rows[2]) == (r"| | a\|b < 1 |", r"| 2 × x\|y z | 3 |")
    lines = table.latex().splitlines()
    assert lines[2] == r" & a\textbar{}b \textless{} 1 \\ \midrule"
    assert lines[3:5] == [r"{[}ours] & 1 \\", r"{*} & 2 \\"]
    assert lines[5].startswith(r"2 $\times$ x\textbar{}y")


def test_no_row_without_its_mean_is_bold():
    """Seed 1 has no value: the cell is a dash, which was bold for the mean of the others."""
    scores = {("", "A"): [0.9, None, 0.9], ("", "B"): [0.5, 0.5, 0.5], ("", "C"): [0.4, 0.4, 0.4]}
    made = replace(outcome(scores, {}), paper=ForPapers("3 seeds", {}))
    assert [heading.row for _, heading in made.winners] == ["B"]
    assert "**50.00 ± 0.00**" in page(made)


def test_equal_best_means_are_all_bold():
    """The first of two rows with 50 % was bold alone."""
    scores = {("", "A"): [0.4, 0.6], ("", "B"): [0.5, 0.5], ("", "C"): [0.4, 0.4]}
    made = replace(outcome(scores, {}), paper=ForPapers("2 seeds", {}))
    assert {cell.row for _, cell in made.winners} == {"A", "B"}
    least = {(Cell("", "A"), "metrics.a_loc"): 50.0}
    made = replace(made, paper=ForPapers("2 seeds", least))
    assert {cell.row for _, cell in made.winners} == {"B"}, "A guesses as well"


def test_a_ladder_is_a_table_of_scores_against_length():
    text = page(outcome())
    assert "| A_loc | 1 × rounds | 2 × rounds |\n|---|---|---|\n" in text
    assert "| A | 55.00 ± 5.00 | **75.00 ± 5.00** |\n| B | 55.00 ± 4.00 | 65.03 ± 5.00 |\n" in text
    # differences of 10, 10 and 9.9: s = 0.0577, and t of two degrees of freedom is 4.303
    assert "| 2 × rounds: A | +9.97 [+9.82, +10.11] * |" in text


def test_many_comparisons_are_corrected():
    """Steps of four are 0.0125, 0.025, 0.0375 and 0.05; the last one met keeps those before it."""
    assert kept_up_to([0.04, 0.01, 0.9, 0.03]) == 0.01
    assert kept_up_to([0.9, 0.026, 0.03, 0.037]) == 0.037
    assert kept_up_to([]) == 0


def test_a_star_is_in_brackets_where_it_does_not_stay_after_correction():
    """Of three: p is 1e-5; 0.04, beyond its step of 0.033; and 1, of a difference of nothing."""
    base = [0.1, 0.2, 0.3]
    apart = {"A": [10, 10, 9.9], "C": [0.643, 1, 1.357], "D": [0, 0, 0]}
    scores = {
        ("", row): [each + by / 100 for each, by in zip(base, points, strict=True)]
        for row, points in apart.items()
    }
    text = page(outcome({("", "B"): base, **scores}, {"": 1}))
    assert "| A | +9.97 [+9.82, +10.11] * |" in text
    assert "| C | +1.00 [+0.11, +1.89] (*) |" in text
    assert "| D | +0.00 [+0.00, +0.00] |" in text
    assert "2 of the 3 intervals of scores leave out zero by themselves." in text
    assert "the 1 that stay at a rate of false discoveries of 5 % among" in text


def test_a_page_with_a_picture_names_what_is_open_and_leaves_curves_out():
    """A is apart from B in one setting; in the other the two differ by noise."""
    text = page(outcome(), pictured=True)
    assert "| 2 × rounds: A | +" in text
    assert "Open in every score: 1 × rounds: A." in text
    assert "| 1 × rounds: A | +0.00" not in text
    assert "| 1 × rounds: A | +0.00" in page(outcome())
    assert len(text) < len(page(outcome()))


def test_a_heading_names_the_clients_where_they_are_not_all():
    columns = {f"A_loc, {view}": f"metrics.a_loc_{view}" for view in ("received", "trained")}
    whole = replace(outcome(), columns=columns)
    assert whole.headings == ["A_loc, received", "A_loc, trained"]
    some = replace(whole, selected="10 of 20 clients")
    assert some.headings == ["A_loc, received", "A_loc, trained (10 of 20 clients)"]
    assert some.headings[1] in page(some)
    assert "trained (10 of 20 clients)" in some.table().latex()
    assert some.selected in to_json(some)


def test_a_curve_stands_at_the_rounds_that_were_scored(tmp_path):
    """Scores after rounds 2 and 4; what is no share of one is no percentage."""
    seeds = [[None, 0.1, None, 0.3], [None, 0.2, None, 0.4]]
    curves = [{"iaa": seed, "loss": [1.5, 0.25], "mine": [1, 2, 3][: 2 + place]}
              for place, seed in enumerate(seeds)]  # fmt: skip
    runs = [RunNumbers(Cell("", "A"), seed, {}, found, {}) for seed, found in enumerate(curves)]
    shown = {"IAA": "iaa", "loss": "loss", "not of one length": "mine"}
    made = Outcome(runs, [Cell("", "A")], {}, "A", 2, shown)
    text = page(made)
    assert "| IAA | 2 | 4 | mean |\n|---|---|---|---|\n| A | 15 | 35 | 25.0 |\n" in text
    assert "| loss | 1 | 2 | mean |\n|---|---|---|---|\n| A | 1.500 | 0.250 | 0.875 |\n" in text
    assert "not of one length" not in text
    file = tmp_path / "record.json"
    file.write_text(to_json(made))
    assert page(read_record(file)) == text


def test_a_record_gives_the_same_tables_again(tmp_path):
    file, made = tmp_path / "record.json", outcome()
    file.write_text(to_json(made))
    assert page(read_record(file)) == page(made)
    assert to_json(read_record(file)) == to_json(made)
    file.write_text(to_json(made).replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="has format 2; this version reads 1"):
        read_record(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="is no record of a sweep"):
        read_record(file)


def test_a_picture_has_a_chart_for_each_score_and_curve(tmp_path):
    file, again = tmp_path / "one.svg", tmp_path / "two.svg"
    assert draw(outcome(), file)
    assert draw(outcome(), again)
    assert file.read_bytes() == again.read_bytes()
    texts = ["".join(node.itertext()) for node in ElementTree.parse(file).iter()]
    assert {"A_loc", "IAA", "AA", "BB", "×1", "×2"} <= set(texts), "a label and its hint"
    assert not draw(Outcome([], [], {}, "", 0), tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_a_picture_that_does_not_fit_leaves_the_earlier_one(tmp_path, monkeypatch):
    def full(path: Path, text: str, *_: object, **__: object) -> int:
        path.write_bytes(text.encode()[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "picture.svg").write_text("an earlier one")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        draw(outcome(), tmp_path / "picture.svg")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["an earlier one"]


def test_bands_of_a_picture_are_the_spreads_of_the_tables():
    """Of 50, 60 and 55 the sample standard deviation is 5."""
    ladder, curve = charts_of(outcome())
    found = [(s.mean, s.std, s.n) for s in ladder.values["A"].values()]
    assert found == [pytest.approx((mean, 0.05, 3), abs=1e-6) for mean in (0.55, 0.75)]
    assert "| 1 × rounds: A | 55.00 ± 5.00 |" in page(outcome())
    assert curve.values["A"].keys() == {1, 2}, "the runs of twice the length alone"


def test_settings_and_lengths_have_a_line_for_each_setting():
    lengths = {"s, 1 × rounds": 1, "s, 2 × rounds": 2, "t, 1 × rounds": 1, "t, 2 × rounds": 2}
    scores = {(setting, "A"): [0.5 + n / 10] for n, setting in enumerate(lengths)}
    ladder, curve = charts_of(outcome(scores, lengths))
    assert {label: [s.mean for s in line.values()] for label, line in ladder.values.items()} == {
        "s: A": pytest.approx([0.5, 0.6]), "t: A": pytest.approx([0.7, 0.8]),
    }  # fmt: skip
    assert list(curve.values) == ["s: A", "t: A"]


def test_the_page_of_a_sweep_has_its_tables_and_charts(tmp_path):
    section = section_of(outcome())
    assert [table.corner for table in section.tables] == ["", "A_loc", ""]
    assert [chart.caption for _, charts in section.grids for chart in charts] == ["A_loc", "IAA"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.jsonl").write_text("{}\n")
    write_html([read_run(tmp_path / "run")], tmp_path / "page.html", [section])
    text = (tmp_path / "page.html").read_text()
    assert text.index("The sweep&#39;s columns") < text.index("<h2>Settings</h2>")
    assert "<td class=best>75.00 ± 5.00</td>" in text
    assert "+9.97 [+9.82, +10.11] *" in text
    assert ">×2</text>" in text


def test_a_column_of_dashes_says_why_and_a_verdict_among_which_classes():
    told = replace(outcome(), columns={"A_loc": "metrics.a_loc", "A_glo": "metrics.a_glo"})
    why = "A dash: A_glo: no global model was scored"
    assert why in page(told)
    assert why in section_of(told).tables[0].captions
    assert "A dash" not in page(outcome())
    assert why not in told.table().latex()
    clear = replace(outcome({("", "A"): [0.9, 0.91, 0.92], ("", "B"): [0.1, 0.11, 0.12]}, {}),
                    among="A: chosen among the classes that a client has met")  # fmt: skip
    assert "paired test over seeds. A: chosen among" in page(clear)
    assert "paired test over seeds. A: chosen among" in " ".join(
        section_of(clear).tables[0].captions
    )


def test_rows_are_compared_with_several_and_corrected_together(tmp_path):
    """A row minus another is one comparison: the second table has no line for the first row."""
    values = {"A": (0.5, 0.6, 0.7), "B": (0.4, 0.5, 0.6), "C": (0.6, 0.7, 0.81)}
    runs = [
        RunNumbers(Cell("", row), seed, {"metrics.a_loc": value}, {}, {})
        for row, found in values.items()
        for seed, value in enumerate(found)
    ]
    cells = [Cell("", row) for row in values]
    made = Outcome(runs, cells, {"A_loc": "metrics.a_loc"}, "A", 3, beside=["B"])
    assert [one.mean for one in made.compared] == pytest.approx([-10, 10 + 1 / 3, 20 + 1 / 3])
    file = tmp_path / "record.json"
    file.write_text(to_json(made))
    assert read_record(file).differences == made.differences
    text = page(made)
    assert text.index("Differences to A") < text.index("Differences to B")
    assert "| B |" not in text.partition("Differences to B")[2]
    assert text.count("intervals of scores leave out zero") == 1
