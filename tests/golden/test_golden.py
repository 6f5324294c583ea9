"""Golden traces: what two rounds of every method came to, so that moved numbers show.

``make golden`` writes the traces anew; review the diff. The runs are in float64, so that the
figures are those of every processor: those with AVX2 and those with SSE alone differ by 1e-12 of
themselves at most.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmodels.numerics.metric_tables import is_known
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, script_of
from tests.fedmodels.methods.test_conformance import CASES, experiment_for
from tests.wide_floats import wide_floats

HERE = Path(__file__).parent
PRIVACY = script_of("privacy")
TOLD = PRIVACY.fields_on((HERE.parents[1] / "docs" / "privacy.md").read_text())
"""What docs/privacy.md says that each method uploads."""
REWRITE = os.environ.get("FEDTIDE_REWRITE_GOLDEN") == "1"
OWN_KEYS = {
    "seconds", "num_examples", "skipped_examples", "peak_rss_bytes", "views", "trained", "models",
}  # fmt: skip
"""What a client's row has beside metrics."""
SHOWN = ("loss", "a_glo", "a_loc", "a_sel")
TOLERANCE = 1e-6
"""Of a figure, as a part of it."""


def trace_of(run: Path) -> list[dict[str, float]]:
    """Return the figures of every interaction of a run."""
    records = records_of(run)
    return [
        {
            "interaction": r["interaction"],
            **{k: round(r["metrics"][k], 9) for k in SHOWN if k in r["metrics"]},
        }
        for r in records
    ]


def written_by(run: Path, summary: Mapping[str, Any]) -> set[str]:
    """Return the name of every metric that a run wrote."""
    records = records_of(run)
    of_clients = [facts for record in records for facts in record["clients"].values()]
    names = set(summary["metrics"]).union(*(record["metrics"] for record in records), *of_clients)
    return names - OWN_KEYS


@pytest.mark.parametrize(
    "case", CASES, ids=["-".join([name, *map(str, switches.values())]) for name, switches in CASES]
)
def test_the_trace_is_what_it_was(case, digits, tmp_path, request):
    file = HERE / f"{request.node.callspec.id}.jsonl"
    experiment = experiment_for(case, schedule={"rounds": 2})
    sent = []
    with wide_floats():
        summary = run_in_process(experiment, digits, tmp_path / "run", after=sent.append)
    left = [tensor for result in sent for tensor in result.upload.by_key().values()]
    assert not [t.dtype for t in left if t.is_floating_point() and t.dtype != torch.float64]
    assert {*PRIVACY.fields_in(sent)} == TOLD[PRIVACY.label_of(case)], "make docs writes the page"
    assert [n for n in sorted(written_by(tmp_path / "run", summary)) if not is_known(n)] == []
    trace = trace_of(tmp_path / "run")
    if REWRITE:
        file.write_text("".join(json.dumps(row) + "\n" for row in trace))
    assert file.exists(), "no trace yet: make golden"
    golden = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(trace) == len(golden) == 4
    for found, expected in zip(trace, golden, strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=TOLERANCE, abs=1e-8), (key, expected)
