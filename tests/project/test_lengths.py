"""How long our runs are beside the papers', and what a verdict below a tenth of that may say."""

from __future__ import annotations

import pytest

from benchmarks.papers import lengths
from benchmarks.papers.table import PAPERS, ROOT, tables_of
from benchmarks.papers.views import in_the_papers_view
from benchmarks.records import PAGES, RECORDS
from fedplugins.studies.outcome import read_record
from fedplugins.studies.plan import Cell
from tests.project.test_intervals import shown_on

RESULTS = ROOT / "docs" / "results.md"
HEADS = f"| claim | verdict | {lengths.HEADING} | study |\n|---|---|---|---|"


def line(verdict: str, *studies: str, size: str = "") -> str:
    named = ", ".join(f"[`{study}`](results/x.md)" for study in studies)
    return f"| it helps | {verdict} |{size}| {named} |"


def test_every_recorded_study_of_a_paper_has_a_cell_to_be_measured_against():
    tables = {f"{table.paper}/{table.name}": table.table for table in tables_of()}
    for study, (table, row, column) in lengths.papers_cells().items():
        assert row in tables[table].rows, study
        assert column in tables[table].settings, study
    no_papers = {
        "adapters",
        "privacy",
        "compression",
        "fashion-mnist",
        "fedcil-digits",
        "neighbours",
        "drift-alarms",
        "feddrift-sine",
        "ifca-rotated",
        "change-pictures",
        "change-recordings",
        "change-concepts",
        "feddrift-circle",
        "feddrift-sea",
    }
    assert {path.stem for path in RECORDS.glob("*.json")} <= {*lengths.papers_cells(), *no_papers}


def test_the_column_is_computed_and_never_typed():
    page = f"{HEADS}\n{line('open', 'fedali-cifar', size=' 99 % ')}"
    assert " 0.096 %, 0.083 % |" in lengths.rendered(page)
    both = lengths.rendered(f"{HEADS}\n{line('open', 'fedali-cifar', 'fedali-pooling')}")
    assert " 0.096 to 0.77 %, 0.083 to 0.66 % |" in both
    assert lengths.rendered(both) == both


@pytest.mark.parametrize(
    ("study", "said"),
    [("fedali-cifar", "refuted at this length"), ("gldp-paper", "refuted")],
)
def test_below_a_tenth_nothing_is_refuted_but_at_this_length(study, said):
    page = lengths.rendered(f"{HEADS}\n{line('[refuted](x), or so', study)}")
    assert f"[{said}](x)" in page
    assert lengths.rendered(page) == page


def test_pages_of_short_studies_refute_nothing_but_at_this_length():
    papers = lengths.papers_cells()
    for page in sorted(file.name for file in PAGES.glob("*.md")):
        studies = shown_on(page) & papers.keys()
        if any(lengths.shares(study)[0][0] < lengths.ENOUGH for study in studies):
            assert not lengths.REFUTED.search((PAGES / page).read_text()), page


def test_the_papers_view_has_fedavg_just_trained_and_others_as_received():
    outcome = read_record(RECORDS / "gldp-paper.json")
    found = in_the_papers_view("gldp-paper", outcome)
    for row, heading in (("FedAvg", "A_loc, trained"), ("FedRep", "A_loc, received")):
        cell = Cell("", row)
        assert found[cell] == outcome.values[heading][cell]


def test_results_open_with_a_table_that_is_read_in_two_minutes():
    lines = [line for line in RESULTS.read_text().split("\n\n")[3].split("\n") if line]
    assert lines[0].startswith("| method | what to expect |")
    assert len(lines[2:]) <= 12


@pytest.mark.parametrize("paper", PAPERS)
def test_a_papers_page_begins_with_its_verdicts(paper):
    """And they are in one place: the overview links the page and has no second list."""
    text = (PAGES / f"{paper}.md").read_text()
    first = text[text.index("\n| ") :].split("\n\n")[0].strip().split("\n")
    assert first[0].startswith("| claim | ")
    assert lengths.HEADING in first[0]
    assert len(first[2:]) >= 6
    assert all(lengths.STUDY.search(line) for line in first[2:])
    assert text.index(first[0]) < text.index("<!-- record: ")
    overview = RESULTS.read_text()
    assert f"(results/{paper}.md)" in overview
    assert lengths.HEADING not in overview
