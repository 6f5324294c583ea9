"""Who edits run.db and its history alike is told: by the file's form, by rules, by a kept head."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedmodels.console.rows import Verification
from fedmodels.errors import ArchiveError
from fedsrv.cli import app
from fedsrv.state.chain import Head, beginning_of, continued, digest_of, row_digest
from fedsrv.state.earlier_ledger import RECOMPUTED, UNSTATED, link_of, seal_of
from fedsrv.state.ledger import Ledger
from fedsrv.state.rows import KEYS, TABLES
from fedsrv.state.store import Store
from fedsrv.state.verification import falsified, verified
from tests.fedsrv.state.test_every_row import EXPERIMENT, STORED, told, written
from tests.fedsrv.state.test_store import committed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Head]:
    return written(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(whole: tuple[Path, Head], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


@contextmanager
def edited(run: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(run / "run.db", isolation_level=None)) as db:
        yield db


# --- the file's form ------------------------------------------------------------------------------

UNDONE = "ALTER TABLE undone RENAME COLUMN"
STRICTER = "'decision TEXT NOT NULL', 'decision TEXT NOT NULL ON CONFLICT IGNORE'"
FORMS = {
    "a trigger with a name like SQLite's": [
        'CREATE TRIGGER "sqliteXautoindex" AFTER INSERT ON growths BEGIN DELETE FROM clients; END'
    ],
    "a view with a name like SQLite's": ['CREATE VIEW "sqlite-autoindex" AS SELECT 1'],
    "columns exchanged": [
        f"{UNDONE} record TO x", f"{UNDONE} counts TO record", f"{UNDONE} x TO counts"
    ],
    "a column more": ["ALTER TABLE chain ADD COLUMN more TEXT DEFAULT 'x'"],
    "a column less": ["ALTER TABLE chain RENAME COLUMN statement TO x"],
    "rows that are not taken": [
        "PRAGMA writable_schema = ON", f"UPDATE sqlite_master SET sql = replace(sql, {STRICTER})"
    ],
    "a later version": ["PRAGMA user_version = 5"],
    "the version before": ["PRAGMA user_version = 3"],
    "none": ["PRAGMA user_version = 0"],
}  # fmt: skip


@pytest.mark.parametrize("what", FORMS)
def test_another_form_of_the_file_is_told_and_not_taken_up(run, whole, what):
    with edited(run) as db:
        for sql in FORMS[what]:
            db.execute(sql)
    with pytest.raises(ArchiveError):
        Ledger(run / "run.db", strict=False, new=False)
    with suppress(ArchiveError):
        assert verified(run, whole[1]).wrong


def test_a_damaged_index_is_told_as_a_resume_tells_it(run, whole):
    """Rows are read without it, and the run's id by it."""
    with edited(run) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE type = 'index'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
        db.execute("PRAGMA journal_mode = DELETE")
    with (run / "run.db").open("r+b") as file:
        file.seek((page - 1) * size)
        content = file.read(size)
        file.seek((page - 1) * size)
        file.write(content.replace(b"watermark", b"watermarx"))
    assert told(run, whole[1])


def test_tables_are_those_that_statements_cover_and_the_statements(run):
    with edited(run) as db:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        there = {name for (name,) in db.execute(query)}
    assert there == {*TABLES} == {*KEYS, "chain"}


# --- statements that somebody adds ----------------------------------------------------------------


def add(db: sqlite3.Connection, statement: object) -> None:
    """Continue the chain with a statement, as whoever can write the file can."""
    query = "SELECT number, link FROM chain ORDER BY number DESC LIMIT 1"
    ((number, link),) = db.execute(query)
    text = json.dumps(statement)
    link = continued(bytes.fromhex(link), digest_of(text)).hex()
    db.execute("INSERT INTO chain VALUES (?, ?, ?)", (number + 1, text, link))


def digest_in(db: sqlite3.Connection, table: str, key: object) -> str | None:
    found = db.execute(f"SELECT * FROM {table} WHERE {KEYS[table]} = ?", (key,)).fetchone()
    return None if found is None else row_digest(found[1:])


RECORD = "UPDATE interactions SET record = replace(record, '0.5', '0.9') WHERE interaction = 0"
FORGED: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "a record": (RECORD, "interactions", 0, {}),
    "a record, as one that was scored": (RECORD, "interactions", 0, {"scored": 0}),
    "a record, as one that was committed": (RECORD, "interactions", 0, {"committed": 0}),
    "a record, as one that counts again": (RECORD, "interactions", 0, {"done_again": [0]}),
    "no record": ("DELETE FROM interactions WHERE interaction = 1", "interactions", 1, {}),
    "one more record": (
        "INSERT INTO interactions SELECT 2, scored, record, counts FROM interactions "
        "WHERE interaction = 1", "interactions", 2, {},
    ),
    "a growth": ("UPDATE growths SET growth = '{}'", "growths", 0, {"grown": 0}),
    "no growth": ("DELETE FROM growths", "growths", 0, {}),
    "a decision": ("UPDATE decisions SET decision = '[]'", "decisions", 0, {"decided": "close"}),
    "nothing undone": ("DELETE FROM undone WHERE interaction = 2", "undone", 2, {}),
    "what was undone": (
        "UPDATE undone SET record = '{}' WHERE interaction = 2", "undone", 2, {"undone_after": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_a_statement_of_what_a_run_never_does_is_told(run, whole, what):
    """All that is left fits together, and with the head that was kept."""
    sql, table, key, says = FORGED[what]
    with edited(run) as db:
        assert db.execute(sql).rowcount
        add(db, {**says, "rows": {table: {str(key): digest_in(db, table, key)}}})
    number = whole[1].number + 1
    assert any(line.startswith(f"statement {number} changes") for line in told(run, whole[1]))


def test_a_record_that_is_undone_and_done_again_is_the_same(run, whole):
    """Each of the two statements alone is one that a run makes."""
    with edited(run) as db:
        before = digest_in(db, "interactions", 1)
        db.execute("UPDATE interactions SET record = '{}' WHERE interaction = 1")
        forged = digest_in(db, "interactions", 1)
        add(db, {"undone_after": 0, "rows": {"interactions": {"1": None}, "undone": {"1": before}}})
        add(db, {"done_again": [1], "rows": {"interactions": {"1": forged}, "undone": {"1": None}}})
    wrong = told(run, whole[1])
    assert wrong[0].startswith(f"statement {whole[1].number + 2} changes the record of interact")


@pytest.mark.parametrize(
    "statement",
    [
        [],
        5,
        {"rows": 5},
        {"rows": {"interactions": {"x": None}}},
        {"rows": {"more": {"x": "y"}}},
        {"audit": 3},
        {"lines": {"privacy.jsonl": "x"}},
        {"committed": "0", "state": "x"},
    ],
    ids=str,
)
def test_a_statement_that_cannot_be_read_is_told_in_a_line(run, whole, statement):
    with edited(run) as db:
        add(db, statement)
    assert told(run, whole[1])


def test_a_record_is_not_replaced_below_a_later_one(run, whole):
    """It is undone, and another committed, and the one after it stays."""
    with edited(run) as db:
        before = digest_in(db, "interactions", 0)
        db.execute(RECORD)
        forged = digest_in(db, "interactions", 0)
        add(
            db, {"undone_after": -1, "rows": {"interactions": {"0": None}, "undone": {"0": before}}}
        )
        add(db, {"committed": 0, "rows": {"interactions": {"0": forged}, "undone": {"0": None}}})
    wrong = told(run, whole[1])
    assert wrong[0].startswith(f"statement {whole[1].number + 2} changes the record of interact")


def test_what_was_stated_anew_since_a_head_is_named(run, whole):
    """A run changes such rows as well: who kept the head judges it."""
    with edited(run) as db:
        db.execute("UPDATE clients SET client_json = '{}' WHERE id = 0")
        db.execute("UPDATE started_over SET after = 0 WHERE client = 1")
        rows = {table: {str(at): digest_in(db, table, at)} for table, at in CHANGED}
        add(db, {"rows": rows})
    found = verified(run, whole[1])
    assert (found.wrong, verified(run).notes) == ([], [])
    assert found.notes == [
        "stated anew since that head, besides new rows: "
        "the description of client 0, after which interaction client 1 started over"
    ]
    kept = f"{whole[1].number}:{whole[1].link.hex()}"
    shown = CliRunner().invoke(app, ["verify", str(run), "--head", kept])
    assert (shown.exit_code, shown.stdout.count("the description of client 0")) == (0, 1)
    shown = CliRunner().invoke(app, ["verify", str(run), "--head", kept, "--json"])
    assert Verification.model_validate_json(shown.stdout).notes == found.notes


CHANGED = (("clients", 0), ("started_over", 1))


def test_what_follows_honestly_holds_by_an_early_head(run, whole):
    with closing(Store(run, EXPERIMENT, True)) as store:
        store.roll_back(0)
        store.go_to(3)
        store.roll_back(2)
        committed(store, 3, 4)
        store.grow({"interaction": 5, "tasks": []})
        store.decide("close", {"now": True})
        store.take_back(1)
        committed(store, 2)
    found = verified(run, whole[1])
    assert found.wrong == []
    assert "the record of interaction 2" in found.notes[0]


# --- statements that somebody rewrites ------------------------------------------------------------

OTHER = {
    "meta": "UPDATE meta SET value = value || ' ' WHERE key = 'aside_why'",
    "clients": "UPDATE clients SET client_json = '{}' WHERE id = 0",
    "started_over": "UPDATE started_over SET after = 0",
    "interactions": "UPDATE interactions SET record = record || ' ' WHERE interaction = 0",
    "undone": "UPDATE undone SET record = record || ' ' WHERE interaction = 3",
    "growths": "UPDATE growths SET growth = growth || ' '",
    "decisions": "UPDATE decisions SET decision = decision || ' '",
    "roster": "UPDATE roster SET standing = standing || ' '",
}


@pytest.mark.parametrize("table", KEYS)
def test_an_edit_with_all_hashes_computed_anew_is_told_by_a_kept_head(run, whole, table):
    """Each statement of the row is as if the run had written it so."""
    with edited(run) as db:
        query = f"SELECT * FROM {table}"
        before = {str(key): row_digest(values) for key, *values in db.execute(query)}
        assert db.execute(OTHER[table]).rowcount
        after = {str(key): row_digest(values) for key, *values in db.execute(query)}
        (run_id,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
        link = beginning_of(run_id)
        for number, text in db.execute("SELECT number, statement FROM chain").fetchall():
            for key, digest in before.items():
                text = text.replace(digest, after[key])
            link = continued(link, digest_of(text))
            change = "UPDATE chain SET statement = ?, link = ? WHERE number = ?"
            db.execute(change, (text, link.hex(), number))
    without = [line for line in verified(run).wrong if "rounds.jsonl" not in line]
    assert without == [], "nothing in the directory tells"
    line = f"the history up to statement {whole[1].number} is not the one that was kept"
    assert line in verified(run, whole[1]).wrong


def test_a_broken_chain_is_told_once_and_by_a_report(run, whole):
    with edited(run) as db:
        db.execute("UPDATE chain SET statement = '{}' WHERE number = 4")
    line = "statement 4 is not the one that was written, or one before it is missing"
    assert verified(run, whole[1]).wrong == [line]
    assert falsified(run) == [f"run.db: {line}"]


# --- runs of an earlier version -------------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(STORED) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path / "old-open"


def forge(run: Path, table: str) -> None:
    """Edit a row as an expert of that version: with its hashes."""
    with edited(run) as db:
        run_id = dict(db.execute("SELECT * FROM meta"))["run_id"]
        if table == "clients":
            db.execute("UPDATE clients SET client_json = client_json || ' '")
        elif table == "started_over":
            db.execute("INSERT INTO started_over VALUES (0, 0)")
        elif table == "undone":
            values = (9, 1, "{}", "")
            link = link_of("x", *values)
            db.execute("INSERT INTO undone VALUES (?, ?, ?, ?, ?, 'x')", (*values, link))
        elif table == "growths":
            db.execute("DELETE FROM growths")
            db.execute("INSERT INTO growths VALUES (0, '{}', ?)", (link_of(run_id, 0, "{}"),))
        else:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('more', '1')")
            seal = seal_of(dict(db.execute("SELECT * FROM meta")))
            db.execute("INSERT OR REPLACE INTO meta VALUES ('seal', ?)", (seal,))


@pytest.mark.parametrize("table", [*UNSTATED, *RECOMPUTED])
def test_verify_names_the_tables_of_an_earlier_version_that_it_cannot_judge(earlier, table):
    head = verified(earlier).head
    forge(earlier, table)
    found = verified(earlier, head)
    assert found.wrong == [], "nothing tells"
    (note,) = found.notes
    assert note.startswith("written by an earlier version")
    assert table in note
    assert "before the run is resumed" in note


def test_what_was_stated_late_stays_named(earlier):
    before = verified(earlier).head
    with edited(earlier) as db:
        names = {
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE sql NOT NULL")
        }
    assert names == {*UNSTATED, *RECOMPUTED, "interactions", "chain"}
    Ledger(earlier / "run.db", strict=False, new=False).close()
    (note,) = verified(earlier, before).notes
    assert f"before statement {before.number + 1}, an edit of clients" in note
    forge(earlier, "started_over")
    assert told(earlier, before) == [
        "after which interaction client 0 started over was never written by the run"
    ]
