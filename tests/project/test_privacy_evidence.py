"""docs/privacy.md names what tried each cell: the tests and benchmarks are there."""

from __future__ import annotations

import re

import pytest

from tests.sizes import ROOT

TEXT = (ROOT / "docs" / "privacy.md").read_text("utf-8")
NAMED = sorted({*re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py(?:::\w+)?)`", TEXT)})


@pytest.mark.parametrize("name", NAMED)
def test_what_is_named_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    text = (ROOT / path).read_text("utf-8")
    assert not function or f"def {function}(" in text


def test_each_row_of_the_conditions_has_its_evidence() -> None:
    table, evidence = TEXT.split("What tried each cell")
    conditions = table.split("| a site's condition |")[1].splitlines()[2:]
    rows = [row for row in conditions if row.startswith("|")]
    named = {line.split("|")[1].strip() for line in evidence.splitlines() if line.startswith("|")}
    assert len(rows) == 11
    assert len(named - {"", "condition", "---"}) >= len(rows)
