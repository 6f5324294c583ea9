"""``fedsrv doctor RUN``: what this release would change for a run, without a change of it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

import fedtide
from fedsrv import cli


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "run"
    small = {"schedule.rounds": 1, "data.max_per_class": 10, "schedule.clients": 2}
    fedtide.run("quickstart", {**small, "method.name": "fedavg"}, backend="inprocess", out=place)
    return place


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """Return a directory of a run that a test may change."""
    for name in ("run.db", "env.json", "config.toml"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    return tmp_path


def told(run: Path, capsys) -> tuple[int, dict[str, str], str]:
    """Return the exit status of the doctor, what it says of a run, and its last word."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", str(run), "--json"])
    out = capsys.readouterr()
    found = json.loads(out.out)["the run"] if out.out else {}
    assert str(run) not in json.dumps(found)
    return int(ended.value.code or 0), found, out.err


def changed(run: Path, key: str, table: str, **values: object) -> None:
    """Change what the database says of a run."""
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        (text,) = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        facts = json.loads(text)
        (facts[table] if table else facts).update(values)
        db.execute("UPDATE meta SET value = ? WHERE key = ?", (json.dumps(facts), key))


def test_nothing_changes_for_a_run_of_this_release(run, capsys):
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    code, found, err = told(run, capsys)
    assert (code, err) == (0, "")
    assert (found["torch"], found["digest"]) == (torch.__version__, "stays")
    assert found["defaults"] == "as they were"
    assert found["database"].endswith("the release that wrote it can continue, too")
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_another_torch_may_round_differently_and_another_release_may_not(run, capsys):
    env = json.loads((run / "env.json").read_text())
    (run / "env.json").write_text(json.dumps({**env, "fedtide": "0.1.0"}))
    _, found, _ = told(run, capsys)
    assert found["fedtide"].startswith("0.1.0 becomes ")
    assert found["digest"] == "stays, unless CHANGELOG.md names the run's method"
    (run / "env.json").write_text(json.dumps({**env, "torch": "1.0"}))
    _, found, _ = told(run, capsys)
    assert found["torch"] == f"1.0 becomes {torch.__version__}"
    assert found["digest"] == "may differ: another torch may round differently"


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_damaged_list_of_versions_stops_nothing(run, capsys, text):
    (run / "env.json").write_text(text)
    code, found, _ = told(run, capsys)
    assert code == 0
    assert found["torch"].startswith("unknown becomes ")


def test_a_default_that_is_another_now_is_named_and_kept(run, capsys):
    changed(run, "experiment", "evaluate", batch_size=61)
    changed(run, "defaults", "", **{"evaluate.batch_size": 61})
    code, found, err = told(run, capsys)
    assert (code, err) == (0, "")
    assert found["defaults"] == "others now; the run keeps evaluate.batch_size = 61"


@pytest.mark.parametrize(
    ("form", "code", "words"),
    [(2, 0, "format 2 becomes 4 with --resume"), (99, 1, "format 99, of a later release")],
)
def test_a_database_of_another_release(run, capsys, form, code, words):
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute(f"PRAGMA user_version = {form}")
    ended, found, err = told(run, capsys)
    assert ended == code
    assert found["database"].startswith(words)
    assert bool(err) == bool(code)


def test_a_key_that_is_gone_is_named_in_one_line(run, capsys):
    changed(run, "experiment", "schedule", forgotten_key=3)
    code, found, err = told(run, capsys)
    assert code == 1
    assert found["database"]
    assert "cannot continue the run" in err
    assert "forgotten_key" in err
    assert err.count("\n") == 1


def test_what_is_no_run_gets_one_line(tmp_path, capsys):
    code, found, err = told(tmp_path, capsys)
    assert (code, found) == (2, {})
    assert err.count("\n") == 1
    (tmp_path / "run.db").write_bytes(b"not a database" * 100)
    code, found, err = told(tmp_path, capsys)
    assert (code, found) == (1, {})
    assert "cannot be read" in err
    assert err.count("\n") == 1


def test_what_is_no_run_gets_a_line_that_says_so(tmp_path, capsys):
    code, found, err = told(tmp_path / "none", capsys)
    assert (code, found) == (2, {})
    assert err == f"error: {tmp_path / 'none'} is not a run directory: there is no run.db\n"
