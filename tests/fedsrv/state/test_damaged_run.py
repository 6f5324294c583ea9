"""A damaged run directory: it is noticed, said in one line, and nothing is deleted for it."""

import json
import logging
import shutil
import sqlite3
from contextlib import closing

import pytest
import tomli_w
from typer.testing import CliRunner

from fedmodels.console.rows import Recovered
from fedmodels.errors import ArchiveError, FedtideError, RunFailed
from fedsrv.cli import app
from fedsrv.coordinator import write_facts
from fedsrv.state.ledger import Ledger
from fedsrv.state.recovery import recover
from fedsrv.state.store import Store
from tests.conftest import tiny_experiment
from tests.fedsrv.engine.test_rollback import LOCAL, break_off
from tests.fedsrv.state.test_store import committed, digest, record, state
from tests.runs import ends_as

EXPERIMENT = tiny_experiment(server={"max_rollback": 1})


@pytest.fixture
def run(tmp_path):
    """A run of four commits whose first two states are pruned, given back as after a crash."""
    store = committed(Store(tmp_path / "run", EXPERIMENT, False), 0, 1, 2, 3)
    store.advance(3)
    store.close()
    return store.path


def opened(path, experiment=EXPERIMENT):
    with closing(Store(path, experiment, True)) as store:
        return store.run_id, store.committed


def kept(path):
    """Everything of a run that cannot be made again, by its bytes."""
    found = [*(path / "server").glob("*.safetensors"), path / "rounds.jsonl"]
    return {p.name: p.read_bytes() for p in found if p.exists()}


def edit(path, statement):
    with closing(sqlite3.connect(path / "run.db")) as db:
        db.execute(statement)
        db.commit()


def refused(path, match, experiment=EXPERIMENT):
    before = kept(path)
    with pytest.raises(FedtideError, match=match) as caught:
        opened(path, experiment)
    assert "\n" not in str(caught.value)
    assert kept(path) == before
    return str(caught.value)


HARM = {
    "garbage": lambda path: (path / "run.db").write_bytes(b"garbage" * 1000),
    "empty": lambda path: (path / "run.db").write_bytes(b""),
    "gone": lambda path: (path / "run.db").unlink(),
    "half": lambda path: (path / "run.db").write_bytes((path / "run.db").read_bytes()[:5000]),
    "no table": lambda path: edit(path, "DROP TABLE interactions"),
    "no meta": lambda path: edit(path, "DROP TABLE meta"),
    "no rows": lambda path: edit(path, "DELETE FROM interactions"),
    "few rows": lambda path: edit(path, "DELETE FROM interactions WHERE interaction > 0"),
    "no id": lambda path: edit(path, "DELETE FROM meta WHERE key = 'run_id'"),
}


@pytest.mark.parametrize("harm", ["empty", "gone"])
def test_no_database_is_made_in_place_of_one(run, harm):
    HARM[harm](run)
    refused(run, rf"run\.db is damaged \(it is {harm}\); nothing was changed")
    made = run / "run.db"
    assert (made.read_bytes() if made.exists() else None) == {"empty": b"", "gone": None}[harm]


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_database_is_no_new_run(run, harm):
    for more in ("run.db-wal", "run.db-shm"):
        assert not (run / more).exists()
    HARM[harm](run)
    assert "fedsrv recover" in refused(run, r"run\.db is damaged")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE interactions SET record = replace(record, '\"round\": 2', '\"round\": 1') "
        "WHERE interaction = 2",
        "UPDATE interactions SET scored = 0 WHERE interaction = 2",
        "UPDATE interactions SET counts = 'x' WHERE interaction = 2",
        "UPDATE interactions SET record = x'00' WHERE interaction = 2",
    ],
)
def test_an_edited_record_is_noticed(run, statement):
    edit(run, statement)
    refused(run, r"run\.db is damaged \(the record of interaction 3 is not")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE meta SET value = '2' WHERE key = 'watermark'",
        "UPDATE meta SET value = 'x' WHERE key = 'watermark'",
        "UPDATE meta SET value = replace(value, '\"seed\": 0', '\"seed\": 1') "
        "WHERE key = 'experiment'",
        "INSERT INTO meta VALUES ('tasks', '[[0, 1]]')",
        "DELETE FROM meta WHERE key = 'experiment'",
    ],
)
def test_an_edited_fact_of_the_run_is_noticed(run, statement):
    edit(run, statement)
    assert "fedsrv recover" in refused(run, "its row about the whole run")


@pytest.mark.parametrize("name", ["watermark", "highest", "experiment"])
@pytest.mark.parametrize("value", ["x", "{", "null", "[" * 100_000])
def test_a_fact_that_cannot_be_read_is_refused(run, name, value):
    with closing(Ledger(run / "run.db", strict=False, new=False)) as ledger:
        ledger.set_facts(**{name: value})
    refused(run, rf"run\.db is damaged \(its '{name}' cannot be read")


@pytest.mark.parametrize("value", ["[[0]]", "[0]", '[["x", 1]]', "[[null, 1]]", '"x"'])
def test_numbers_of_clients_that_cannot_be_read_are_refused(run, value):
    with closing(Ledger(run / "run.db", strict=False, new=False)) as ledger:
        ledger.set_facts(tasks=value)
    store = Store(run, EXPERIMENT, True)
    try:
        with pytest.raises(ArchiveError, match=r"run\.db is damaged \(its 'tasks' cannot be read"):
            store.fixed("tasks", {0: 1})
    finally:
        store.close()


def test_scores_that_came_later_are_part_of_the_chain(tmp_path):
    store = Store(tmp_path / "run", EXPERIMENT, False)
    store.commit(record(0), state(0), '[["counts"]]')
    store.add_scores(record(0, metrics={"a_glo": 0.5}))
    committed(store, 1)
    store.close()
    assert opened(tmp_path / "run")[1] == 1
    edit(tmp_path / "run", "UPDATE interactions SET record = replace(record, '0.5', '0.9')")
    refused(tmp_path / "run", "the record of interaction 1 is not")


def test_a_run_of_an_earlier_format_is_refused_with_a_way_on(run):
    edit(run, "PRAGMA user_version = 0")
    assert "fedsrv recover" in refused(run, "earlier version")
    edit(run, "PRAGMA user_version = 9")
    refused(run, "later version")


def test_a_database_that_is_in_use(run):
    with closing(sqlite3.connect(run / "run.db", isolation_level=None)) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        refused(run, r"run\.db cannot be used: database is locked")


# --- states ---------------------------------------------------------------------------------------


def test_a_damaged_state_that_is_computed_again_leaves_a_line(run, caplog):
    path = run / "server" / "state-00000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert opened(run)[1] == 2
    assert any("state-00000003" in r.message and "damaged" in r.message for r in caplog.records)
    assert any("computed again" in r.message for r in caplog.records)


def test_without_any_state_the_run_stops_unless_it_may_go_back_that_far(run):
    for path in (run / "server").glob("state-*"):
        path.write_bytes(b"")
    assert "max_rollback=4" in refused(run, "no state .* can be read")
    assert opened(run, tiny_experiment(server={"max_rollback": 4}))[1] == -1


def test_a_state_of_another_run_is_not_taken_up(run, tmp_path):
    """A file copied from elsewhere fits in name and form, but is not what was committed."""
    other = committed(Store(tmp_path / "other", EXPERIMENT, False), 0, 1, 2, 3)
    other.close()
    name = "server/state-00000003.safetensors"
    (run / name).write_bytes((other.path / name).read_bytes())
    assert opened(run)[1] == 2


# --- recovery -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken_off(digits, tmp_path_factory):
    """A run broken off in interaction 4 of 6, with its config."""
    run = tmp_path_factory.mktemp("broken-off") / "run"
    break_off(run, digits, at=4)
    write_facts(run, LOCAL)
    first = run / "server" / "state-00000000.safetensors"
    first.unlink(missing_ok=True)  # a busy machine may have died before it pruned the state
    return run


@pytest.fixture
def half_way(broken_off, tmp_path, digits, whole_run):
    """A copy of the run that was broken off, and the summary of the whole one."""
    run = shutil.copytree(broken_off, tmp_path / "run")
    return run, whole_run(LOCAL, digits).summary


@pytest.mark.parametrize("harm", ["garbage", "empty", "gone", "few rows", "old"])
def test_a_recovered_run_ends_as_the_whole_one(half_way, digits, harm):
    path, whole = half_way
    harm_it = {**HARM, "old": lambda run: edit(run, "PRAGMA user_version = 0")}[harm]
    harm_it(path)
    refused(path, "fedsrv recover", LOCAL)
    told = []
    assert recover(path, told.append) == 3
    assert "interactions 1 to 4 are recovered" in told[0]
    if harm != "gone":
        assert (path / "set-aside" / "run.db").exists()
    ends_as(whole, LOCAL, digits, path)


def test_what_an_open_run_began_with_is_recovered_and_who_had_started_over(tmp_path):
    """It was started with another rate, and its coordinator died before the next round."""
    open_run = {"order": "tasks_outer", "open": True, "rounds": 2}
    path, was, held = tmp_path / "run", tiny_experiment(schedule=open_run), []
    growth = {"interaction": 0, "classes": []}
    with closing(Store(path, was, False)) as store:
        store.grow(growth)
        store.commit(record(0, growths=[growth]), state(0), None)
        committed(store, 1)
        store.start_over(1)
        committed(store, 2)
        store.roll_back(0)
        committed(store, 1, 2)
    now = was.model_copy(update={"training": was.training.model_copy(update={"lr": 0.5})})
    for _ in range(2):
        with closing(Store(path, now, True)) as store:
            rates = store.began.training.lr, store.wished.training.lr
            held.append((*rates, store.ledger.started_over()))
            store.evidence.audit.write()
        write_facts(path, now)
        (path / "run.db").unlink()
        recover(path, lambda line: None)
    assert held == [(was.training.lr, 0.5, {1: 0})] * 2


@pytest.mark.parametrize(
    "damage",
    [
        "damaged",
        "[" * 100_000,
        "3",
        '{"interaction": 4, "cohort": [0]}',
        '{"interaction": 3, "cohort": ["x"]}',
        '{"interaction": 3}',
    ],
    ids=["text", "deep", "number", "gap", "cohort", "no cohort"],
)
def test_what_cannot_be_recovered_is_said_and_set_aside(half_way, digits, damage):
    """A line of rounds.jsonl is damaged: the state behind it has no record."""
    path, whole = half_way
    text = (path / "rounds.jsonl").read_text().splitlines()
    (path / "rounds.jsonl").write_text("\n".join([*text[:3], damage]) + "\n")
    (path / "run.db").unlink()
    state = path / "server" / "state-00000002.safetensors"
    told = []
    assert recover(path, told.append) == 2
    assert "state-00000003.safetensors" in "".join(told)
    assert (path / "set-aside" / "state-00000003.safetensors").exists()
    ends_as(whole, LOCAL, digits, path)
    (path / "run.db").write_bytes(b"")
    for state in (path / "server").glob("state-*"):
        state.write_bytes(b"")
    with pytest.raises(ArchiveError, match="no state that can be read"):
        recover(path, told.append)


def test_the_command_that_recovers(half_way):
    path, _ = half_way
    (path / "run.db").unlink()
    found = CliRunner().invoke(app, ["recover", str(path)])
    assert found.exit_code == 0
    assert f"continue with --resume --out {path}" in found.output
    (path / "run.db").unlink()
    told = Recovered.model_validate_json(
        CliRunner().invoke(app, ["recover", str(path), "--json"]).stdout, strict=True
    )
    assert told.interactions > 0
    assert told.notes


@pytest.mark.parametrize("crash", ["between commits", "in a commit", "in a roll-back"])
def test_a_whole_run_is_not_recovered(half_way, crash):
    path, _ = half_way
    if crash == "in a commit":  # the state is written before its record
        states = path / "server"
        shutil.copy(states / "state-00000003.safetensors", states / "state-00000004.safetensors")
    if crash == "in a roll-back":  # records are undone before they leave rounds.jsonl
        lines = (path / "rounds.jsonl").read_bytes()
        with closing(Store(path, LOCAL, True)) as store:
            store.roll_back(2)
        (path / "rounds.jsonl").write_bytes(lines)
    before = (path / "run.db").read_bytes()
    with pytest.raises(ArchiveError, match="is intact: nothing to recover"):
        recover(path, print)
    assert (path / "run.db").read_bytes() == before
    assert not (path / "set-aside").exists()


def test_a_run_without_records_is_neither_whole_nor_recovered(run):
    """What a resume refuses as damaged is not called whole."""
    HARM["no rows"](run)
    (run / "rounds.jsonl").write_text("damaged\n")
    (run / "config.toml").write_text(tomli_w.dumps(EXPERIMENT.to_dict()))
    refused(run, "the record of interaction 1 is gone.*fedsrv recover")
    with pytest.raises(ArchiveError, match="no state that can be read has its record"):
        recover(run, print)


def test_recovery_of_what_is_no_run(tmp_path):
    with pytest.raises(ArchiveError, match="is no run directory"):
        recover(tmp_path / "nowhere", print)
    with pytest.raises(ArchiveError, match=r"config\.toml is needed"):
        recover(tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_use_is_not_recovered(tmp_path):
    in_use = pytest.raises(RunFailed, match="in use")
    with closing(Store(tmp_path / "run", EXPERIMENT, False)), in_use:
        recover(tmp_path / "run", print)


# --- a full disk ----------------------------------------------------------------------------------


class Full:
    """A database whose disk is full."""

    def __init__(self, db):
        self.db = db

    def __getattr__(self, name):
        return getattr(self.db, name)

    def execute(self, statement, *rest):
        if statement.startswith(("INSERT", "UPDATE")):
            raise sqlite3.OperationalError("database or disk is full")
        return self.db.execute(statement, *rest)


@pytest.mark.parametrize("where", ["state", "row", "lines", "scores"])
def test_a_full_disk_is_one_line_and_the_run_can_be_resumed(run, monkeypatch, where):
    store = Store(run, EXPERIMENT, True)
    with monkeypatch.context() as full, closing(store):
        if where == "state":
            full.setattr("os.replace", no_space)
        elif where == "lines":
            full.setattr(Store, "_append", no_space)
        elif where == "row":
            full.setattr(store.ledger, "db", Full(store.ledger.db))
        else:
            store.commit(record(4), state(4), "[]")
            full.setattr(store.ledger, "db", Full(store.ledger.db))
        line = r"(?i)(no space left|disk is full).*free some space"
        with pytest.raises(RunFailed, match=line) as one:
            store.add_scores(record(4)) if where == "scores" else committed(store, 4)
    assert "\n" not in str(one.value)
    assert str(run) in str(one.value)
    last = 4 if where in ("lines", "scores") else 3
    with closing(Store(run, EXPERIMENT, True)) as again:
        assert again.committed == last
        assert digest(again.state(last)) == digest(state(last))
        if where == "lines":
            found = (run / "rounds.jsonl").read_text().splitlines()
            assert [json.loads(line)["interaction"] for line in found] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("new", [False, True], ids=["nothing", "another run"])
def test_a_run_whose_directory_was_renamed_writes_nothing_in_its_old_place(run, new):
    store = Store(run, EXPERIMENT, True)
    with closing(store):
        run.rename(run.with_name("moved"))
        if new:
            committed(Store(run, EXPERIMENT, False), 0, 1, 2).close()
        before = new and kept(run)
        with pytest.raises(RunFailed, match=r"run was renamed or deleted .*: put it back"):
            committed(store, 4)
        assert (new and kept(run)) == before
        assert run.exists() == new
    assert opened(run.with_name("moved"))[1] == 3


def no_space(*_):
    raise OSError(28, "No space left on device")
