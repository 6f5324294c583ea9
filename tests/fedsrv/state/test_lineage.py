"""Which data made which version of a model, by its committed records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from fedcli.data.store.growing import add_task
from fedmodels.errors import ArchiveError
from fedsrv.cli import app
from fedsrv.state import lineage
from fedsrv.state.decisions import SET_ASIDE, decide
from fedsrv.state.ledger import Ledger
from fedsrv.state.lineage import FILE, Origin, lineage_of
from fedsrv.state.record import Record
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedsrv.engine.test_open_run import arrays_in, opened, own
from tests.matrix.witness import watching

__all__ = ["own"]


def ledger_of(run: Path, records: list[dict[str, Any]], **tables: Any) -> None:
    """Write a run's database by hand; each client has ten rows and its own number."""
    ledger = Ledger(run / "run.db", strict=False, new=True)
    ledger.set_facts(experiment=json.dumps(tiny_experiment(**tables).to_dict()))
    for number, facts in enumerate(records):
        clients = {str(c): {"num_examples": 10 + c} for c in facts["cohort"]}
        row = {"interaction": number, "round": number, "task": 0, "clients": clients, **facts}
        ledger.append(cast(Record, row), None)
    ledger.close()


def test_an_upload_that_comes_late_is_of_the_task_that_it_was_trained_on(tmp_path):
    """Client 2 answers the order of interaction 0, which was of task 0, in interaction 1."""
    records = [
        {"cohort": [0, 1], "arrivals": [[1, 0], [0, 0]], "failed": {"3": "it died"}},
        {"cohort": [1, 2], "arrivals": [[2, 0], [1, 1]], "task": 1},
    ]
    ledger_of(tmp_path, records)
    found = lineage_of(tmp_path)
    assert found.at(0) == [Origin(0, 0, 1, 10, 0, 0), Origin(1, 0, 1, 11, 0, 0)]
    assert found.at(1)[1:] == [
        Origin(1, 0, 1, 11, 0, 0), Origin(1, 1, 1, 11, 1, 1), Origin(2, 0, 1, 12, 1, 1),
    ]  # fmt: skip
    assert found.versions[0].failed == ("3",)
    with pytest.raises(ArchiveError, match="there is no version 3: the run has 1 to 2"):
        found.at(2)


def test_who_trains_on_all_data_so_far_adds_all_tasks_so_far(tmp_path):
    ledger_of(tmp_path, [{"cohort": [0], "task": 2}], scenario={"training_data": "accumulated"})
    assert [(one.task, one.times) for one in lineage_of(tmp_path).at(0)] == [(0, 1), (1, 1), (2, 1)]


def test_a_method_that_trains_on_its_history_adds_the_rows_that_it_read(digits, tmp_path):
    """They are counted where a training has its examples: not those of its order's task alone."""
    experiment = tiny_experiment(method={"name": "feddrift"}, schedule={"rounds": 1})
    with watching(digits) as seen:
        run_in_process(experiment, digits, tmp_path / "run", facts=True)
    told = {
        version.interaction: {
            share.client: dict(zip(map(int, share.tasks), share.rows_of, strict=True))
            for share in version.shares
        }
        for version in lineage_of(tmp_path / "run").versions
    }
    assert told == {number: seen.counted.get(number, {}) for number in told}
    assert any(len(tasks) > 1 for tasks in told[max(told)].values())


def test_an_open_run_lists_what_counted_and_no_task_that_was_set_aside_before(own, tmp_path):
    """Task 1 of client 0 is set aside before it begins; what is undone is of no version."""
    run = tmp_path / "run"
    opened(own, run)
    for seed in (1, 2):
        add_task(own, 0, arrays_in(tmp_path / f"{seed}", [1, 2], seed))
    decide(run, SET_ASIDE, {"client": 0, "task": 1})
    opened(own, run, "close", facts=True)
    versions = lineage_of(run).versions
    assert [[(s.client, s.tasks) for s in v.shares] for v in versions] == [
        [(0, (0,)), (1, (0,))], [(0, (2,)), (1, (0,))],
    ]  # fmt: skip
    assert {(one.client, one.task): one.rows for one in lineage_of(run).at(1)}[0, 2] == 12
    shown = CliRunner().invoke(app, ["lineage", str(run), "--json"])
    assert json.loads(shown.stdout) == json.loads((run / FILE).read_text())
    ledger = Ledger(run / "run.db", strict=False, new=False)
    ledger.undo(0)
    assert len(lineage_of(run).versions) == 1, "also while the run has its database open"
    ledger.close()


def test_a_table_that_cannot_be_made_ends_no_finished_run(digits, tmp_path, monkeypatch, caplog):
    def damaged(run: Path) -> None:
        raise ArchiveError(f"{run} cannot be read as a run: 'clients'")

    monkeypatch.setattr(lineage, "lineage_of", damaged)
    summary = run_in_process(tiny_experiment(), digits, tmp_path / "run", facts=True)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert "lineage.json is not written: " in caplog.text
