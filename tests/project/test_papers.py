"""The papers' tables as files: none is missing, each cell is a run that could be made."""

import math
import re
from collections import Counter

import pytest

from benchmarks.papers.__main__ import check, experiments_of, main
from benchmarks.papers.page import experiments_of as experiments_of_study
from benchmarks.papers.page import in_words, not_run, text_of
from benchmarks.papers.settings import decided, faults, lines_of, page
from benchmarks.papers.size import Size, size_of
from benchmarks.papers.table import PAPERS, ROOT, Table, tables_of
from fedmodels.methods import make
from fedmodels.numerics.metric_tables import is_known
from fedmodels.training.asked import local_view
from fedplugins.studies.columns import FIXED
from fedplugins.studies.plan import Cell

TABLES = {f"{table.paper}/{table.name}": table for table in tables_of()}
PRINTED = {
    "gldp": (range(1, 5), range(3, 5)),
    "fedmlp": (range(1, 4), range(3, 6)),
    "pfedgrp": (range(1, 13), range(6, 20)),
    "fedali": (range(1, 7), range(3, 6)),
}
"""Numbers of each paper's tables, and of its figures with results; earlier ones are drawings."""


def test_no_table_or_figure_is_missing():
    wanted = {
        f"{paper}/{kind}-{number}"
        for paper, both in PRINTED.items()
        for kind, numbers in zip(("table", "figure"), both, strict=True)
        for number in numbers
    }
    assert set(TABLES) == wanted
    assert len(wanted) == 47


def test_rows_and_columns_are_those_of_the_papers():
    """Rows and columns of figures, counted in the papers."""
    sizes = {"gldp/table-1": (6, 13), "gldp/table-2": (8, 5), "gldp/table-3": (6, 9)}
    sizes |= {"gldp/table-4": (4, 4), "fedmlp/table-1": (7, 10), "fedmlp/table-2": (7, 10)}
    sizes |= {"fedmlp/table-3": (8, 4), "fedali/table-1": (9, 9), "fedali/table-2": (7, 12)}
    sizes |= {"fedali/table-3": (7, 3), "fedali/table-4": (7, 3), "fedali/table-5": (5, 3)}
    sizes |= {"fedali/table-6": (3, 3)}
    for name, (rows, columns) in sizes.items():
        figures = TABLES[name].table.figures
        assert (len(figures), {*map(len, figures.values())}) == (rows, {columns}), name
        assert figures.keys() == TABLES[name].table.rows.keys(), name


@pytest.mark.parametrize("paper", PAPERS)
def test_every_cell_has_a_config_that_can_be_built_and_dealt(paper):
    for name, table in TABLES.items():
        if name.startswith(paper):
            for experiment in experiments_of(table):
                check(experiment)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_cell_has_the_values_that_its_paper_gives(paper):
    tables = [table for table in TABLES.values() if table.paper == paper]
    found = [fault for table in tables for fault in faults(table)]
    assert not found, "\n".join(found[:20])
    for line, configs in zip(lines_of(paper), decided(paper).values(), strict=True):
        assert configs, f"this line is about no cell: {line}"


def test_a_value_of_another_and_a_key_without_a_line_are_found(monkeypatch):
    table, lines = TABLES["fedali/figure-5"], lines_of("fedali")
    told = [
        line.model_copy(update={"keys": {**line.keys, "training.lr": 1e-3}})
        if "training.lr" in line.keys
        else line
        for line in lines
        if "net.prototypes" not in line.keys
    ]
    monkeypatch.setattr("benchmarks.papers.settings.lines_of", lambda _: told)
    place = "fedali figure-5, FedAli, HHAR, one client, 200 epochs"
    assert list(faults(table)) == [
        f"{place}: training.lr = 0.0001, and the listing has 0.001",
    ], "prototypes are at the default"
    told = [line for line in lines if "training.lr" not in line.keys]
    monkeypatch.setattr("benchmarks.papers.settings.lines_of", lambda _: told)
    assert f"{place}: no line about training.optimizer = 'adam'" in list(faults(table))


def test_the_page_of_settings_is_current():
    written = (ROOT / "docs" / "results" / "settings.md").read_text("utf-8")
    assert written == page(), "python -m benchmarks.papers.settings > docs/results/settings.md"
    lines = [line for paper in PAPERS for line in lines_of(paper)]
    rows = page(every=True).count("\n| `")
    assert (rows, written.count("\n| `")) == (len(lines), sum(bool(line.why) for line in lines))


def test_a_row_may_have_switches_of_its_own_in_a_column():
    """FedCIL's rate depends on the data; diffusion is drawn on CIFAR alone."""
    table = TABLES["pfedgrp/table-1"]
    rates = [
        table.experiment("FedCIL", column).method.hyper_parameters()["lr"]
        for column in table.table.settings
    ]
    assert rates == [1e-4, 1e-4, 2e-4]
    drawn = [column for row, column in table.runs() if row == "pFedGRP+DDPM"]
    assert drawn == ["CIFAR-10"]
    given = table.table.model_dump()
    for wrong in ({"apart": {"FedCIL": {"CIFAR": "lr=1"}}}, {"absent": {"FedSil": ["CIFAR-10"]}}):
        with pytest.raises(ValueError, match="no such row, or no such columns"):
            Table.model_validate(given | wrong)


def test_scores_are_what_runs_write():
    for name, table in TABLES.items():
        for score in table.table.scores.values():
            for row in table.table.rows:
                part, _, metric = score.path(row).partition(".")
                known = is_known(metric) if part == "metrics" else part in (*FIXED, "clients")
                shown = score.counted or table.table.command
                assert known or (not part and shown), (name, score.path(row))


def is_scored(experiment, metric):
    """Tell whether runs of a method score the model that an accuracy is of."""
    method = make(experiment.method.name, **experiment.method.hyper_parameters())
    views = {*method.views}
    if metric.startswith("a_glo"):
        return "global" in views
    if metric.startswith(("a_loc_trained", "a_sel_trained")):
        return "after_local" in views
    if metric.startswith("a_loc"):
        return local_view(method) != "global" and bool(views & {"after_downlink", "global"})
    return True


def test_a_row_has_the_model_that_its_scores_are_of():
    """FedProto shares prototypes alone: no run of it has an A_glo, though FedMLP's tables do."""
    missing = set()
    for name, table in TABLES.items():
        for row, column in table.runs():
            for score, of in table.table.scores.items():
                part, _, metric = of.path(row).partition(".")
                if part == "metrics" and not is_scored(table.experiment(row, column), metric):
                    missing.add((name, row, score))
    said = {
        (name, row, score)
        for name, table in TABLES.items()
        for row, scores in table.table.unscored.items()
        for score in scores
    }
    tables = ("fedmlp/table-1", "fedmlp/table-2", "fedmlp/figure-3")
    assert missing == said == {(name, "FedProto", "A_glo") for name in tables}
    assert "98.17 | no such model" in text_of(TABLES["fedmlp/table-1"])
    given = TABLES["fedmlp/table-1"].table.model_dump()
    with pytest.raises(ValueError, match="has no such scores"):
        Table.model_validate(given | {"unscored": {"FedProto": ["A_gol"]}})


def test_no_two_rows_of_a_table_are_one_run_with_one_score():
    """Two rows by one run differ in the score; Wasserstein is FedAli's own distance."""
    same = set()
    for name, table in TABLES.items():
        for column in table.table.settings:
            found = {}
            for row, _ in (run for run in table.runs() if run[1] == column):
                paths = tuple(score.path(row) for score in table.table.scores.values())
                key = table.config(row, column), paths
                if key in found:
                    same.add((name, *sorted((found[key], row))))
                found[key] = row
    assert same == {("fedali/table-4", "FedAli", "Wasserstein")}


def test_what_stands_beside_a_table_is_in_a_study():
    for name, table in TABLES.items():
        for one in table.table.beside:
            cells = experiments_of_study(one.study)
            for row in one.rows.values():
                assert Cell(one.setting, row) in cells, (name, one.study, row)


def test_the_text_has_every_cell(capsys):
    assert main(["gldp"]) == 0
    text = capsys.readouterr().out
    assert f"{Counter(name.split('/')[0] for name in TABLES)['gldp']} tables and figures" in text
    table = text_of(TABLES["gldp/table-3"])
    assert re.search(r"38\.77 +60\.97", table), "the paper's figures alone"
    assert "54 cells not run; `python -m benchmarks.papers gldp/table-3 --configs DIR`" in table
    assert "not run" in text.splitlines()[-1]
    line = next(line for line in table.splitlines() if line.startswith("A_loc"))
    means = ["78.37 (3)", "90.08 (3)", "89.78 (3)"]
    assert re.split("  +", line)[1:] == means, "FedAvg just trained, others received"
    assert "study gldp-paper, seeds 0, 1, 2, 119 % of the paper's steps" in table
    losses = text_of(TABLES["gldp/table-4"])
    assert "study gldp-paper, 1 to 3 seeds, 119 %" in losses, "without losses one seed alone"
    cells = text_of(TABLES["fedmlp/table-1"])
    assert "98.35 | 99.16 (1)" in cells, "FedAvg's A_glo on MNIST ran at the paper's size"
    assert main(["gdlp"]) == 2
    assert "known: gldp" in capsys.readouterr().err


def test_cells_that_were_not_run_are_a_count_and_a_command(capsys):
    """2,004 cells said "not run", each in its place; a false line stood unseen among them."""
    missing = sum(map(not_run, TABLES.values()))
    assert 0 < missing < sum(len(list(table.cells())) for table in TABLES.values())
    assert main([]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "not run" in line]
    assert told[-1].startswith(f"{missing} cells not run; `python -m benchmarks.papers --configs")
    assert all(line.count("not run") == 1 for line in told)
    assert len(told) <= len(TABLES) + 1


def test_rows_are_averaged_over_the_seeds_that_all_have():
    """GLDP without its losses ran with seed 0 alone, where GLDP's A_glo is 90.22 and not 89.78."""
    block = text_of(TABLES["gldp/table-4"]).split("\n\n")[3].splitlines()
    lines = [re.split("  +", line) for line in block[2:]]
    assert lines[0] == ["A_glo", "90.09 (1)", "90.22 (1)"]
    assert lines[1] == ["− full", "−0.1", "–"], "one pair has no interval"
    assert "[−0.5, +3.6]" in text_of(TABLES["gldp/table-4"]), "five seeds have one"


def test_a_difference_of_more_seeds_than_the_means_says_so():
    """Two rows of FedMLP's losses diverged with three seeds of five, so means are of two."""
    block = text_of(TABLES["fedmlp/table-3"]).split("\n\n")[3].splitlines()
    means, apart = (re.split("  +", line) for line in block[2:4])
    assert means[1] == "36.56 (2)"
    assert apart[1:3] == ["+2.8 [−2.7, +8.4] (5)", "+3.7 [−2.4, +9.8] (5)"]
    assert apart[5] == "−4.0 [−6.7, −1.3] (3)"


def test_deviations_of_the_paper_stand_behind_its_figures():
    table = text_of(TABLES["fedali/table-1"])
    assert "98.15 ± 1.75" in table
    assert "90.68" in table


def test_what_follows_from_a_config_is_counted_without_a_run():
    """HART is 1,445,918 floats, its last two layers 197,632 + 6,150; 8 bytes are n_c.

    FedPAC adds two vectors of 1,024 for each of six classes, with labels and counts; FedAli gates
    and two sets of prototypes. ResNet-20 has 40.55 million multiply-adds on CIFAR-10,
    and 0.27 million weights as in its paper.
    """
    lines = text_of(TABLES["fedali/table-3"]).splitlines()
    found = next(line for line in lines if line.startswith("HHAR, bytes"))
    told = [each.split()[0] for each in found.split(" | ")[1:]]
    assert told == ["5,783,680", "0.86", "1.00", "1.00", "0.00", "1.01", "2.38"]
    assert int(told[0].replace(",", "")) == 4 * 1_445_918 + 8
    assert round(1 - (197_632 + 6_150) / 1_445_918, 2) == 0.86
    models = text_of(TABLES["pfedgrp/table-4"])
    assert "picture | 40,551,040 counted" in models
    assert "picture | 269,722 counted" in models


def test_a_score_that_nothing_shows_is_refused():
    """Fréchet distances are no metric of a run: without its command the table says nothing."""
    given = TABLES["pfedgrp/table-9"].table.model_dump()
    assert not given["scores"]["FID"]["metric"]
    with pytest.raises(ValueError, match="'FID': no metric, no count and no command"):
        Table.model_validate(given | {"command": ""})


def test_configs_are_written_for_cells_that_were_not_run(tmp_path):
    assert main(["fedmlp/table-3", "--configs", str(tmp_path)]) == 0
    written = sorted(path.name for path in (tmp_path / "fedmlp" / "table-3").iterdir())
    assert len(written) == 8
    assert "cifar-10-s-4--without-l-s.toml" in written


def test_steps_by_hand():
    """43,392 images over 100 tasks are 434 each: 14 batches, 20 epochs, 5 tasks, half of 50 rounds.

    MNIST's tail with gamma = 0.5 keeps 43,392 images; 434 / 32 = 13.6.
    """
    found = size_of(TABLES["fedmlp/table-1"].experiment("FedAvg", "MNIST"))
    assert (found.passes, found.steps) == (500, 14 * 20 * 5 * 25)
    assert math.isclose(found.examples, 43392 / 20 * 20 * 25)
    accumulated = TABLES["fedmlp/table-1"].experiment("FedAvg", "MNIST").to_dict()
    accumulated["scenario"]["training_data"] = "accumulated"
    from fedmodels.facts.resolution import experiment_of

    grown = size_of(experiment_of(accumulated))
    assert grown.examples == pytest.approx(3 * found.examples, rel=1e-3), "1 + 2 + … + 5 parts of 5"


def test_shares_in_words():
    assert in_words(Size(5, 37, 2000), Size(1000, 38000, 2e6)) == (
        "0.097 % of the paper's steps, 0.10 % of its examples"
    )
    assert in_words(Size(40, None, None), Size(3000, None, None)) == (
        "1 % of the paper's passes over a client's data"
    )
