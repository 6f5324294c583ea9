"""Recorded studies and the pages of docs/results: no number between the marks is typed."""

import subprocess
from dataclasses import replace

import pytest

from benchmarks import measured, records
from fedmodels.errors import ConfigError
from fedplugins.studies.outcome import read_record, to_json
from fedplugins.studies.plan import Sweep

PAGES = sorted(records.PAGES.glob("*.md"))
RECORDS = sorted(records.RECORDS.glob("*.json"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_records(page):
    """After a change: ``python -m benchmarks.records``."""
    assert records.rendered(page.read_text()) == page.read_text()


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_records_are_of_studies_and_are_shown(file):
    study = Sweep.read(records.ROOT / "benchmarks" / "studies" / file.name.replace("json", "toml"))
    outcome = read_record(file)
    assert to_json(outcome) == file.read_text()
    assert {cell.row for cell in outcome.cells} <= study.methods.keys()
    assert all(run.environment["git_commit"] for run in outcome.runs)
    marks = [f"<!-- {kind}: {file.stem} -->" for kind in ("record", "deciding")]
    assert any(mark in page.read_text() for page in PAGES for mark in marks)


def test_there_are_records():
    assert {"continual", "continual-circulating"} <= {file.stem for file in RECORDS}


def test_a_typed_number_does_not_stay():
    text = (records.PAGES / "continual.md").read_text()
    shown = text[text.index("<!-- record: continual -->") :]
    line = next(line for line in shown.splitlines() if line.startswith("| FedAvg"))
    assert records.rendered(text.replace(line, "| FedAvg | 99.99 |")) == text
    assert records.rendered("a page without marks | 1 |") == "a page without marks | 1 |"
    with pytest.raises(ConfigError, match=r"nobody.json is no record"):
        records.rendered(f"<!-- record: nobody -->\n{records.END}\n")


def test_runs_of_another_machine_are_added(tmp_path, monkeypatch):
    study = records.ROOT / "benchmarks" / "studies" / "fedmlp-readings.toml"
    recorded = read_record(records.RECORDS / "fedmlp-readings.json")
    recorded = replace(recorded, runs=[run for run in recorded.runs if run.seed < 3])
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    file = tmp_path / "fedmlp-readings.json"
    old = replace(recorded, runs=[run for run in recorded.runs if run.seed == 0])
    new = [replace(run, values={"made": 1.0}) for run in recorded.runs if run.row.row == "FedMLP"]
    monkeypatch.setattr(records, "outcome_of", lambda *_: replace(recorded, runs=new))

    file.write_text(to_json(old))
    records.keep(study, tmp_path, add=True)
    both = read_record(file)
    assert [(run.row.row, run.seed) for run in both.runs[:4]] == [
        ("FedMLP", 0), ("FedMLP", 1), ("FedMLP", 2), ("KL(c, z)", 0)
    ]  # fmt: skip
    assert [dict(run.values) == {"made": 1.0} for run in both.runs[:4]] == [True] * 3 + [False]
    assert both.cells == recorded.cells

    records.keep(study, tmp_path)
    assert [run.row.row for run in read_record(file).runs] == ["FedMLP"] * 3


@pytest.mark.parametrize(
    "file", sorted(measured.RECORDS.glob("*.json")), ids=lambda file: file.stem
)
def test_what_was_measured_is_shown(file):
    marks = [f"<!-- {kind}: {file.stem} -->" for kind in ("record", "deciding")]
    assert any(mark in page.read_text() for page in PAGES for mark in marks)


def test_exponents_are_of_the_rows_in_which_one_thing_grows():
    rows = [
        {"population": n, "cohort": min(n, 100), "round_s": s, "server_s": 0.0}
        for n, s in ((10, 9.0), (100, 0.1), (1000, 1.0), (10_000, 10.0))
    ]
    assert measured.exponents(rows, "population") == pytest.approx({"round_s": 1.0})
    assert measured.exponents(rows[:2], "population") == {}, "the cohort grows as well"


def test_a_record_names_a_commit_that_outlives_a_rebase(tmp_path):
    """That of the main branch; a plus says that there was more."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        said = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, check=True)
        return said.stdout.decode().strip()

    git("init", "-q", "-b", "main")
    (tmp_path / "code").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    main = git("rev-parse", "HEAD")[:12]
    assert measured.commit_of(tmp_path) == main
    (tmp_path / "code").write_text("2")
    assert measured.commit_of(tmp_path) == f"{main}+"
    git("checkout", "-qb", "other")
    git("commit", "-qam", "two")
    assert measured.commit_of(tmp_path) == f"{main}+"
