"""What people read of a run is bound to its history; a crash between two files is no lie."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import fedtide
from fedmodels.errors import ArchiveError
from fedmodels.numerics.metric_names import DEFINITIONS
from fedsrv.report.tables import report_command
from fedsrv.state.ledger import Ledger
from fedsrv.state.recovery import recover
from fedsrv.state.run_record import read_run
from fedsrv.state.store import Store
from fedsrv.state.verification import falsified, verified
from tests.conftest import tiny_experiment
from tests.fedsrv.state.test_store import record, state

CONFIG = {
    "data": {"name": "digits", "max_per_class": 8, "max_test_per_class": 2},
    "scenario": {"kind": "iid"},
    "net": {"name": "mlp", "hidden": [4]},
    "method": {"name": "fedavg"},
    "schedule": {"clients": 2, "rounds": 2},
    "evaluate": {"pictures": 0},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    fedtide.run(CONFIG, out=run, backend="inprocess")
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_a_run_as_it_was_written_holds(run):
    assert verified(run).wrong == []


LIES = {
    "config": ("config.toml", lambda p: edit(p, "seed = 0", "seed = 1"), "config.toml is not what"),
    "config gone": ("config.toml", Path.unlink, "config.toml is gone"),
    "summary": ("summary.json", lambda p: edit(p, '"a_glo": 0.', '"a_glo": 0.999'), "summary.json"),
    "record": ("rounds.jsonl", lambda p: edit(p, '"a_glo": 0.', '"a_glo": 0.999'), "interaction 1"),
    "last removed": (
        "rounds.jsonl",
        lambda p: p.write_text(p.read_text().splitlines(keepends=True)[0]),
        "lacks the lines of interaction 2",
    ),
    "all removed": ("rounds.jsonl", Path.unlink, "lacks the lines of interactions 1 and 2"),
    "one twice": (
        "rounds.jsonl",
        lambda p: p.write_text(p.read_text() + p.read_text().splitlines(keepends=True)[1]),
        "1 more lines",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_was_falsified_is_told_by_verify_and_report(run, lie, capsys):
    name, change, line = LIES[lie]
    change(run / name)
    assert any(line in found for found in verified(run).wrong)
    report_command([run], None)
    assert name in capsys.readouterr().err


def begun(place: Path) -> Store:
    return Store(place / "run", tiny_experiment(), resume=(place / "run").exists())


def test_a_kill_between_a_statement_and_its_file_is_no_lie(tmp_path):
    store = begun(tmp_path)
    run = store.path
    store.expect("config.toml", "one")
    assert falsified(run) == [], "killed before the file was written"
    store.publish("config.toml", "one")
    assert falsified(run) == []
    store.expect("config.toml", "two")  # as of a run that goes on for more rounds
    assert falsified(run) == [], "killed before the new file was written"
    (run / "config.toml").write_text("three")
    assert len(falsified(run)) == 1
    store.publish("config.toml", "two")
    store.commit(record(0), state(0), None)
    assert falsified(run) == []
    (run / "config.toml").write_text("one")
    assert len(falsified(run)) == 1, "an older one counts no more"
    store.close()


def test_a_kill_between_a_record_and_its_line_is_no_lie(tmp_path, monkeypatch):
    store = begun(tmp_path)
    store.commit(record(0), state(0), None)
    with monkeypatch.context() as kill:
        kill.setattr(store, "_append", lambda record: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.commit(record(1), state(1), None)
    assert verified(store.path).wrong == []
    with (store.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 1')  # a line that was cut short
    assert verified(store.path).wrong == []
    store.close()
    store = begun(tmp_path)
    with monkeypatch.context() as kill:
        kill.setattr(store, "rewrite_lines", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.roll_back(0)
    assert verified(store.path).wrong == [], "undone, and the lines are still there"
    store.close()
    again = begun(tmp_path)
    assert again.committed == 0
    again.close()
    assert verified(again.path).wrong == []


def test_a_run_without_rounds_holds(tmp_path):
    begun(tmp_path).close()
    assert verified(tmp_path / "run").wrong == []


def test_a_growth_that_a_resume_would_refuse_does_not_hold(run):
    with closing(sqlite3.connect(run / "run.db")) as db:
        db.execute("INSERT INTO growths VALUES (0, '{}')")
        db.commit()
    line = "growth 1 was never written by the run"
    assert verified(run).wrong == [line]
    with pytest.raises(ArchiveError, match=line):
        Ledger(run / "run.db", strict=True, new=False)
    with closing(sqlite3.connect(run / "run.db")) as db:
        db.execute("DROP TABLE growths")
        db.commit()
    with pytest.raises(ArchiveError, match="cannot be verified: no such table: growths"):
        verified(run)


def test_a_history_that_is_gone_is_told_in_a_line(run):
    with closing(sqlite3.connect(run / "run.db")) as db:
        db.execute("DROP TABLE chain")
        db.commit()
    with pytest.raises(ArchiveError, match="cannot be verified: no such table: chain"):
        verified(run)
    with pytest.raises(ArchiveError, match=rf"no table 'chain'.*fedsrv recover {run}"):
        Ledger(run / "run.db", strict=True, new=False)
    recover(run, print)
    assert verified(run).wrong == []
    (run / "summary.json").unlink()
    report_command([run], None)  # there is nothing to compare with


def test_a_report_says_where_metrics_changed_their_meaning(run, capsys):
    first, second = map(json.loads, (run / "rounds.jsonl").read_text().splitlines())
    assert first["definitions"] == second["definitions"] == DEFINITIONS
    assert read_run(run).summary["definitions"] == DEFINITIONS
    assert read_run(run).changes_of_definitions() == []
    del first["definitions"]
    (run / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, second)))
    report_command([run], None)
    said = " ".join(capsys.readouterr().err.split())
    assert "metrics changed their meaning from round 2 on: they are of definitions without" in said
