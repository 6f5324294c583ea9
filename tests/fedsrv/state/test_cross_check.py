"""run.db against rounds.jsonl: what one of them lacks is said by --resume and by report."""

import json
import sqlite3
from contextlib import closing

import pytest
from typer.testing import CliRunner

from fedsrv.cli import app
from fedsrv.state.store import Store
from fedsrv.state.verification import differences
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedsrv.state.test_store import committed, record, state

EXPERIMENT = tiny_experiment(server={"max_rollback": 9})


@pytest.fixture
def run(tmp_path):
    """A run of four commits by client 0, and beside it its database after two and three."""
    with closing(Store(tmp_path / "run", EXPERIMENT, False)) as store:
        store.add_profiles({0: "{}"})
        for number in range(4):
            committed(store, number)
            with closing(sqlite3.connect(tmp_path / f"after-{number}.db")) as copy:
                store.owner.run(lambda to: store.ledger.db.backup(to), copy)
    return tmp_path / "run"


def loses_power(path, after):
    """Put the database back to what was safe, as a loss of power does: whole transactions go."""
    for file in path.glob("run.db*"):
        file.unlink()
    (path.parent / f"after-{after}.db").rename(path / "run.db")


def edit(path, statement):
    with closing(sqlite3.connect(path / "run.db")) as db:
        db.execute(statement)
        db.commit()


def drop_line(path, *interactions):
    lines = (path / "rounds.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["interaction"] not in interactions]
    (path / "rounds.jsonl").write_text("".join(kept))


HARM = {
    "newest record": (
        lambda path: loses_power(path, 2),
        "run.db has no record of interaction 4, of which rounds.jsonl tells",
    ),
    "newest two": (
        lambda path: loses_power(path, 1),
        "run.db has no record of interactions 3 and 4, of which",
    ),
    "line": (lambda path: drop_line(path, 1), "rounds.jsonl has no line of interaction 2, of"),
    "edited line": (
        lambda path: (path / "rounds.jsonl").write_text(json.dumps(record(0, round=7)) + "\n"),
        "rounds.jsonl and run.db differ in interaction 1",
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_what_one_of_the_two_lacks_is_said_by_a_resume(run, harm):
    break_it, line = HARM[harm]
    break_it(run)
    with closing(Store(run, EXPERIMENT, True)) as store:
        assert any(line in said for said in store.evidence.differences), store.evidence.differences
        committed(store, *range(store.committed + 1, 4))
    assert differences(run) == []


def test_nothing_is_said_of_what_a_crash_or_a_run_under_way_leaves(run):
    drop_line(run, 3)  # killed between the record and its line
    assert differences(run) == []
    with closing(Store(run, EXPERIMENT, True)) as store:
        assert store.evidence.differences == []
        store.commit(record(4), state(4), '[["counts"]]')  # it waits for its scores
        assert differences(run) == []
        lines = (run / "rounds.jsonl").read_bytes()
        store.roll_back(1)
        (run / "rounds.jsonl").write_bytes(lines)  # killed in the middle of a roll-back
        assert differences(run) == []
    assert differences(run / "nowhere") == []


def test_many_are_counted(tmp_path):
    with closing(committed(Store(tmp_path / "run", EXPERIMENT, False), *range(12))):
        pass
    edit(tmp_path / "run", "DELETE FROM interactions WHERE interaction > 2")
    found = differences(tmp_path / "run")[0]
    assert "interactions 4, 5, 6, 7 and 5 more, of which rounds.jsonl tells" in found


def test_report_says_what_is_missing(digits, tmp_path):
    run = tmp_path / "run"
    run_in_process(tiny_experiment(schedule={"rounds": 1, "clients": 2}), digits, run)
    whole = CliRunner().invoke(app, ["report", str(run)])
    assert whole.exit_code == 0
    assert "rounds.jsonl" not in whole.stderr
    edit(run, "DELETE FROM interactions WHERE interaction = 1")
    edit(run, "DELETE FROM clients WHERE id = 1")
    found = CliRunner().invoke(app, ["report", str(run)])
    assert found.exit_code == 0
    assert "run.db has no record of interaction 2, of which rounds.jsonl tells" in found.stderr
    assert "run.db no longer describes client 1, who trained in this run" in found.stderr


def test_a_database_that_cannot_be_read_is_left_to_who_opens_it(run):
    (run / "run.db").write_bytes(b"garbage" * 1000)
    assert differences(run) == []
