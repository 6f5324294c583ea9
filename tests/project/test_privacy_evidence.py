"""docs/privacy.md names what tried each cell: the tests and benchmarks are there."""

from __future__ import annotations

import re

import pytest

from tests.sizes import ROOT

TEXT = (ROOT / "docs" / "privacy.md").read_text("utf-8")
PLACE = r"`((?:tests|benchmarks|fedplugins)/[\w/]+\.py(?:::\w+)?)`"
NAMED = sorted({*re.findall(PLACE, TEXT)})
WITHOUT = ("open by principle", "not tried")
COORDINATORS = ["honest", "curious", "deviating"]


def table(head: str) -> dict[str, list[str]]:
    """Return the cells of a table of the page by the first one of each row."""
    (found,) = re.findall(rf"^ *\| {head} \| honest .*\n.*\n((?: *\|.*\n)+)", TEXT, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()]
    return {name: cells for name, *cells in rows}


CONDITIONS, SUMS, EVIDENCE = (
    table(head) for head in ("a site's condition", "secure sums", "condition")
)
CELLS = [
    (name, coordinator, cell)
    for name, cells in EVIDENCE.items()
    for coordinator, cell in zip(COORDINATORS, cells, strict=True)
]


@pytest.mark.parametrize("name", NAMED)
def test_what_is_named_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    text = (ROOT / path).read_text("utf-8")
    assert not function or f"def {function}(" in text


def test_each_row_of_the_conditions_has_its_evidence() -> None:
    sums = [name if name.startswith("…") else f"sums, {name}" for name in SUMS]
    assert [*EVIDENCE] == [*CONDITIONS, *sums]


@pytest.mark.parametrize(("condition", "coordinator", "cell"), CELLS)
def test_each_cell_has_evidence_or_says_why_not(
    condition: str, coordinator: str, cell: str
) -> None:
    assert re.search(PLACE, cell) or any(word in cell for word in WITHOUT)


@pytest.mark.parametrize("name", CONDITIONS)
def test_what_is_said_to_be_tried_names_what_tried_it(name: str) -> None:
    for said, shown in zip(CONDITIONS[name], EVIDENCE[name], strict=True):
        assert "tried" not in said or re.search(PLACE, shown)
