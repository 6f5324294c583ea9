"""Every row of run.db, and every state, is the one that the run's history states."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import tarfile
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedtide
from fedmodels.errors import ArchiveError
from fedmodels.facts.position import Interaction
from fedmodels.tensors.archive import load_named, save_named
from fedmodels.tensors.bundle import Bundle, state_digest
from fedsrv.coordinator import write_facts
from fedsrv.state.chain import Head
from fedsrv.state.earlier_ledger import link_of, seal_of
from fedsrv.state.ledger import Ledger
from fedsrv.state.recovery import recover
from fedsrv.state.rows import KEYS, LATER, LINKED, TABLES
from fedsrv.state.store import Store
from fedsrv.state.verification import verified
from tests.conftest import tiny_experiment
from tests.fedsrv.state.test_store import committed, record, state

EXPERIMENT = tiny_experiment(server={"max_rollback": 9})


def written(run: Path) -> tuple[Path, Head]:
    """Write a run with rows in each table; return the head that others kept of it, too."""
    with closing(Store(run, EXPERIMENT, False)) as store:
        store.add_profiles({0: '{"client": 0}', 1: '{"client": 1}'})
        store.grow({"interaction": 0, "tasks": []})
        store.commit(record(0), state(0), '[["counts"]]')
        store.add_scores(record(0, metrics={"a_glo": 0.5}))
        committed(store, 1, 2, 3)
        store.start_over(1)
        store.decide("close", {"now": False})
        store.ledger.keep_standings({1: {"state": "away", "since": 5.0, "why": "stopped"}})
        store.set_aside({2: "an operator excluded it"})
        store.roll_back(1)
    return run, verified(run).head


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Head]:
    return written(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(whole: tuple[Path, Head], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


def edit(run: Path, sql: str, *values: Any) -> None:
    with closing(sqlite3.connect(run / "run.db", isolation_level=None)) as db:
        assert db.execute(sql, values).rowcount != 0


def told(run: Path, head: Head) -> list[str]:
    """Return what verify says of a database that a resume refuses as well."""
    try:
        wrong = verified(run, head).wrong
    except ArchiveError as error:
        wrong = [str(error)]
    if wrong:
        with pytest.raises(ArchiveError, match="is damaged"):
            Ledger(run / "run.db", strict=False, new=False)
    return wrong


def columns() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as db:
        for table, text in TABLES.items():
            db.execute(f"CREATE TABLE {table} ({text})")
        return [
            (table, name)
            for table in TABLES
            for _, name, *_ in db.execute(f"PRAGMA table_info({table})")
        ]


def test_a_run_that_nobody_edited_holds(run, whole):
    assert told(run, whole[1]) == []


@pytest.mark.parametrize(("table", "column"), columns())
def test_an_edit_of_each_column_of_each_table_is_told(run, whole, table, column):
    key = next(iter(KEYS.values())) if table not in KEYS else KEYS[table]
    key = "number" if table == "chain" else key
    with closing(sqlite3.connect(run / "run.db")) as db:
        rows = db.execute(f"SELECT {key}, {column} FROM {table} ORDER BY 1").fetchall()
    assert rows, "there is something to edit"
    for at, value in rows:
        other = value + 1000 if isinstance(value, int) else f"{value} "
        edit(run, f"UPDATE {table} SET {column} = ? WHERE {key} = ?", other, at)
        assert told(run, whole[1]), f"{column} of {at}"
        at = other if column == key else at
        edit(run, f"UPDATE {table} SET {column} = ? WHERE {key} = ?", value, at)
    assert told(run, whole[1]) == []


@pytest.mark.parametrize(("table", "column"), columns())
def test_a_value_of_any_kind_in_each_column_is_told_in_a_line(run, whole, table, column):
    """Also one that no reader of the file expects there."""
    for value in (None, b"x", "[" * 100_000, '{"rows": 5}', 0.5):
        with suppress(sqlite3.IntegrityError):  # the column takes no such value
            change = (
                f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT MIN(rowid) FROM {table})"
            )
            edit(run, change, value)
            assert told(run, whole[1]), value


@pytest.mark.parametrize("table", TABLES)
def test_a_row_that_is_gone_is_told(run, whole, table):
    edit(run, f"DELETE FROM {table} WHERE rowid = (SELECT MAX(rowid) FROM {table})")
    if table == "chain":  # a loss of power may take the newest statements: a kept head tells
        (line,) = verified(run, whole[1]).wrong
        assert "when the head was kept" in line
    else:
        assert told(run, whole[1])


FORGED = {
    "decision": "INSERT INTO decisions VALUES (1, '[]')",
    "standing": "INSERT INTO roster VALUES (2, '{}')",
    "growth": "INSERT INTO growths VALUES (1, '{}')",
    "client": "INSERT INTO clients VALUES (7, '{}')",
    "start": "INSERT INTO started_over VALUES (0, 3)",
    "fact": "INSERT INTO meta VALUES ('tasks', '[]')",
    "undone": "INSERT INTO undone VALUES (9, 1, '{}', '')",
    "type": "UPDATE interactions SET record = CAST(record AS BLOB)",
    "trigger": "CREATE TRIGGER t AFTER INSERT ON interactions BEGIN DELETE FROM clients; END",
    "table": "CREATE TABLE more (key TEXT)",
    "version": "PRAGMA user_version = 2",
}


def test_a_form_whose_rows_nothing_covers_is_taken_for_an_edit(run, whole):
    """The tables of the version before, with links that fit: that version stated no rows."""
    with closing(sqlite3.connect(run / "run.db", isolation_level=None)) as db:
        for name, columns in TABLES.items():
            if name in LATER:
                db.execute(f"DROP TABLE {name}")
            elif name in LINKED:
                db.execute(f"DROP TABLE {name}")
                db.execute(f"CREATE TABLE {name} ({columns}{LINKED[name]})")
        db.execute("PRAGMA user_version = 2")
    assert "it was converted to the format of an earlier version" in verified(run, whole[1]).wrong
    with pytest.raises(ArchiveError, match="it was converted to the format of an earlier version"):
        Ledger(run / "run.db", strict=False, new=False)


def test_a_run_of_the_version_before_gets_a_table_of_decisions(tmp_path):
    with closing(Store(tmp_path / "run", EXPERIMENT, False)) as store:
        committed(store, 0)
    run = store.path
    for sql in ("DROP TABLE decisions", "DROP TABLE roster", "PRAGMA user_version = 3"):
        edit(run, sql)
    before = verified(run)
    assert before.wrong == []
    with closing(Store(run, EXPERIMENT, True)) as store:
        store.decide("close", {"now": True})
    assert verified(run, before.head).wrong == []


def test_what_a_full_disk_did_not_take_of_the_roster_is_told_and_stored_later(
    tmp_path, monkeypatch, caplog
):
    away, back = ({"state": state, "since": 5.0} for state in ("away", "present"))

    def is_full(self: Ledger) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    with closing(Store(tmp_path / "run", EXPERIMENT, False)) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "stating", is_full)
            store.keep_standings({1: away})
            store.owner.run(lambda: None)
        assert "the list of present and missing clients is not stored" in caplog.text
        assert "disk is full" in caplog.text
        store.keep_standings({2: back})
        store.owner.run(lambda: None)
        assert store.ledger.standings() == {1: away, 2: back}


def test_what_was_decided_is_recovered_from_the_log(whole, run):
    with closing(Store(run, EXPERIMENT, True)) as store:
        forgets = [{"client": 1, "forget": True}, {"client": 2, "forget": False}]
        store.decide("retire", *forgets)
        store.evidence.audit.write()
    write_facts(run, EXPERIMENT)
    (run / "run.db").unlink()
    recover(run, lambda line: None)
    with closing(Store(run, EXPERIMENT, True)) as store:
        assert store.decided("retire") == forgets
        assert store.decided("close") == [{"now": False}]
    verified(run)


def test_decisions_that_are_gone_with_their_table_are_told(run, whole):
    """Also in the form of the version before, which had no such table."""
    edit(run, "DROP TABLE decisions")
    assert told(run, whole[1])
    edit(run, "DROP TABLE roster")
    edit(run, "PRAGMA user_version = 3")
    assert told(run, whole[1]) == ["decision 1 is gone", "how client 1 stands is gone"]


@pytest.mark.parametrize("what", FORGED)
def test_what_the_run_never_wrote_is_told(run, whole, what):
    edit(run, FORGED[what])
    assert told(run, whole[1])


def test_a_statement_tells_nothing_of_what_can_be_guessed(run):
    """Who knows the digests cannot check a guess at who started over: each has its own salt."""
    with closing(sqlite3.connect(run / "run.db")) as db:
        salts = [json.loads(text)["salt"] for (text,) in db.execute("SELECT statement FROM chain")]
    assert len({*salts}) == len(salts)
    assert {len(salt) for salt in salts} == {32}


def test_what_a_commit_hashes_does_not_grow_with_the_run(tmp_path, monkeypatch):
    """Neither with its length, nor with its clients and growths: only new rows are hashed."""
    hashed, real = [0], hashlib.sha256

    def counted(data: bytes = b"") -> Any:
        hashed[0] += len(data)
        return real(data)

    def bytes_of_a_commit(store: Store, number: int) -> int:
        before = hashed[0]
        committed(store, number)
        return hashed[0] - before

    with closing(Store(tmp_path / "run", EXPERIMENT, False)) as store:
        monkeypatch.setattr("fedsrv.state.chain.hashlib.sha256", counted)
        committed(store, *range(10))
        first = bytes_of_a_commit(store, 10)
        store.add_profiles(dict.fromkeys(range(1000), "{}"))
        for number in range(50):
            store.grow({"interaction": 11, "tasks": [number]})
        committed(store, *range(11, 98))
        assert abs(bytes_of_a_commit(store, 98) - first) < 64
        assert first < 2048


# --- states ---------------------------------------------------------------------------------------


def negated(path: Path) -> None:
    """Replace the tensors of a file by their negatives, with a checksum that fits."""
    named, header = load_named(path)
    changed = {
        name: Bundle(weights={k: -t.clone() for k, t in bundle.weights.items()})
        for name, bundle in named.items()
    }
    save_named(path, {**named, **changed}, header)


@pytest.mark.needs("operations")
def test_a_state_that_was_replaced_is_told_and_computed_again(run, whole):
    from fedplugins.operations.backup import backup

    path = run / "server" / "state-00000001.safetensors"
    negated(path)
    (line,) = verified(run, whole[1]).wrong
    assert line.startswith(f"{path} is not the state that the run wrote")
    with pytest.raises(ArchiveError, match=r"no whole copy .* is not the state that the run wrote"):
        backup(run, run.with_name("copy"))
    with closing(Store(run, EXPERIMENT, True)) as store:
        assert store.committed == 0, "what follows from it is computed again"
        assert not store.has_state(1)


def test_a_part_that_was_replaced_is_told(run, whole):
    (path,) = (run / "server").glob("part-clients-4-00000001*")
    _, header = load_named(path)
    save_named(path, {"": Bundle(scalars={"s": 9.0})}, header)
    assert verified(run, whole[1]).wrong == [f"{path} is not what the run wrote"]
    with closing(Store(run, EXPERIMENT, True)) as store:
        assert store.committed == 0


def test_a_kill_while_a_replay_commits_is_no_falsification(tmp_path, monkeypatch):
    """The state of an undone interaction is written anew, and names other files of parts."""
    clients = state(0).clients

    def commit(store: Store, *numbers: int) -> None:
        for number in numbers:
            store.commit(record(number), replace(state(number), clients=clients), None)

    def digests(store: Store) -> list[str]:
        return [state_digest(store.state(Interaction(n)).named()) for n in range(4)]

    def is_killed(*_: object) -> None:
        raise KeyboardInterrupt

    with closing(Store(tmp_path / "run", EXPERIMENT, False)) as store:
        commit(store, 0, 1, 2, 3)
        before = digests(store)
        store.roll_back(Interaction(0))
        monkeypatch.setattr(Ledger, "append", is_killed)
        with pytest.raises(KeyboardInterrupt):
            commit(store, 1)
        run = shutil.copytree(store.path, tmp_path / "killed")
    monkeypatch.undo()
    assert verified(run).wrong == []
    with closing(Store(run, EXPERIMENT, True)) as store:
        assert store.committed == 0
        commit(store, 1, 2, 3)
        assert digests(store) == before
    assert verified(run).wrong == []


CONFIG = {
    "data": {"name": "digits", "max_per_class": 8, "max_test_per_class": 2},
    "scenario": {"kind": "iid"},
    "net": {"name": "mlp", "hidden": [4]},
    "method": {"name": "fedavg"},
    "schedule": {"clients": 2, "rounds": 2},
    "evaluate": {"pictures": 0},
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ended") / "run"
    fedtide.run(CONFIG, out=out, backend="inprocess")
    return out


@pytest.mark.needs("operations")
def test_a_replaced_model_is_neither_exported_nor_copied(ended, tmp_path):
    from fedplugins.operations.backup import backup, restore

    run = Path(shutil.copytree(ended, tmp_path / "run"))
    fedtide.Run(run).global_model()
    backup(run, tmp_path / "copy")
    negated(run / "server" / "state-00000001.safetensors")
    with pytest.raises(ArchiveError, match="is not the state that the run wrote"):
        fedtide.Run(run).global_model()
    negated(tmp_path / "copy" / "server" / "state-00000001.safetensors")
    with pytest.raises(ArchiveError, match="is not the state that the run wrote"):
        restore(tmp_path / "copy", tmp_path / "again")


def test_the_newest_model_that_is_gone_is_told_and_no_older_one_exported(ended, tmp_path):
    run = Path(shutil.copytree(ended, tmp_path / "run"))
    path = run / "server" / "state-00000001.safetensors"
    path.unlink()
    assert verified(run).wrong == [f"{path} is missing"]
    with pytest.raises(ArchiveError, match=r"state-00000001\.safetensors is missing"):
        fedtide.Run(run).global_model()


def test_a_model_that_was_never_committed_is_not_exported(ended, tmp_path):
    """With a line of rounds.jsonl of its own, which no record of run.db is behind."""
    run = Path(shutil.copytree(ended, tmp_path / "run"))
    path = run / "server" / "state-00000002.safetensors"
    shutil.copy(run / "server" / "state-00000001.safetensors", path)
    negated(path)
    with (run / "rounds.jsonl").open("r+") as lines:
        lines.write([*lines][-1])
    with pytest.raises(ArchiveError, match=r"state-00000002\.safetensors was never committed"):
        fedtide.Run(run).global_model()


@pytest.mark.needs("operations")
def test_a_copy_of_an_ended_run_holds_all_files_that_the_run_states(ended, tmp_path):
    from fedplugins.operations.backup import backup, restore

    backup(ended, tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "run")
    assert verified(tmp_path / "copy").wrong == []
    assert verified(tmp_path / "run", verified(ended).head).wrong == []


@pytest.mark.needs("operations")
def test_a_file_that_is_about_to_be_written_is_waited_for_by_a_copy(tmp_path):
    """Its statement comes first."""
    from fedplugins.operations.backup import backup

    with closing(Store(tmp_path / "run", EXPERIMENT, False)) as store:
        committed(store, 0)
        store.expect("data.json", "{}\n")
        with pytest.raises(ArchiveError, match=r"data\.json is not what the run wrote"):
            backup(store.path, tmp_path / "copy")
        store.publish("data.json", "{}\n")
        backup(store.path, tmp_path / "copy")
    assert verified(tmp_path / "copy").wrong == []


@pytest.mark.parametrize("name", ["data.json", "lineage.json"])
def test_an_edited_file_beside_the_run_is_told(ended, tmp_path, name):
    run = Path(shutil.copytree(ended, tmp_path / "run"))
    assert verified(run).wrong == []
    (run / name).write_text((run / name).read_text().replace("0", "1", 1))
    (line,) = verified(run).wrong
    assert line.startswith(f"{name} is not what the run wrote")


# --- runs of the version before -------------------------------------------------------------------


STORED = Path(__file__).with_name("run_of_format_2.tar.gz")
"""Two runs that version 0.2 wrote, before statements covered every row: fedrep, and an open run."""


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with tarfile.open(STORED) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("name", ["old-closed", "old-open"])
def test_a_run_of_the_version_before_verifies_and_goes_on(stored, name):
    run = stored / name
    before = verified(run)
    assert before.wrong == []
    if name == "old-closed":
        fedtide.Run(run).extend(1, backend="inprocess")
        assert fedtide.Run(run).record.rounds == 3
    else:
        Ledger(run / "run.db", strict=False, new=False).close()
    after = verified(run, before.head)
    assert after.wrong == []
    assert after.head.number > before.head.number
    edit(run, "UPDATE clients SET client_json = client_json || ' ' WHERE id = 0")
    assert verified(run).wrong == ["the description of client 0 is not the one that was written"]


OLD = {
    "record": "UPDATE interactions SET record = record || ' ' WHERE interaction = 1",
    "gone": "DELETE FROM interactions WHERE interaction = 3",
    "fact": "UPDATE meta SET value = '9' WHERE key = 'watermark'",
    "growth": "UPDATE growths SET growth = growth || ' '",
}


@pytest.mark.parametrize("what", OLD)
def test_an_edit_of_such_a_run_is_told_as_that_version_told_it(stored, what):
    run = stored / ("old-open" if what == "growth" else "old-closed")
    edit(run, OLD[what])
    assert verified(run).wrong
    with pytest.raises(ArchiveError, match="is damaged"):
        Ledger(run / "run.db", strict=False, new=False)


def test_hashes_of_that_version():
    assert seal_of({"a": "1", "seal": "x"}) == seal_of({"a": "1"})
    assert link_of("run", 0, 1, "{}", "") != link_of("run", 1, 1, "{}", "")
