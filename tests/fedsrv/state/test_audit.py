"""The audit log and the history of a run: whatever is edited, removed, moved or cut off shows."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fedsrv.cli
from fedmodels.console.rows import Verification
from fedmodels.errors import ArchiveError
from fedsrv.state import audit as module
from fedsrv.state.audit import AUDIT, Audit, Broken, Mark, read, warned
from fedsrv.state.chain import (
    MAX_PROVEN,
    Head,
    beginning_of,
    continued,
    digest_of,
    read_head,
    row_digest,
)
from fedsrv.state.store import Store
from fedsrv.state.verification import verified
from tests.conftest import tiny_experiment
from tests.fedsrv.state.test_store import committed, record, state


def told(path: Path, *kinds: str, since: Mark | None = None) -> Mark:
    """Go on with a log by lines of these kinds; return the last one."""
    with closing(Audit(path, since)) as log:
        for client, what in enumerate(kinds):
            log.tell(what, client=client)
        return log.write()


def kinds(path: Path) -> list[str]:
    return [entry.facts["what"] for entry in read(path)]


LIES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "removed": lambda lines: [*lines[:1], *lines[2:]],
    "first removed": lambda lines: lines[1:],
    "edited": lambda lines: [*lines[:1], lines[1].replace(b'"sent"', b'"left"'), *lines[2:]],
    "moved": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "twice": lambda lines: [lines[0], lines[0], *lines[1:]],
    "no line": lambda lines: [lines[0], b"{}\n", *lines[1:]],
    "end cut off": lambda lines: lines[:-1],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_line_that_is_changed_shows(tmp_path, lie):
    path = tmp_path / AUDIT
    told(path, "joined", "sent")
    last = told(path, "sent", "left")  # another process goes on with the chain
    assert [entry.mark.lines for entry in read(path)] == [1, 2, 3, 4]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(LIES[lie](lines)))
    if lie != "end cut off":
        with pytest.raises(Broken, match=r"line \d is not the one that was written, or one before"):
            list(read(path))
    with closing(Audit(path, last)) as log:
        (line,) = log.differences
    assert line.startswith(f"{path}: ")
    assert f"; fedsrv audit {tmp_path} says more" in line
    assert b'"what": "broken"' in path.read_bytes().splitlines()[-1]


def test_what_a_crash_cut_short_was_never_committed(tmp_path):
    path = tmp_path / AUDIT
    last = told(path, "joined", "sent")
    with path.open("ab") as file:
        file.write(b'{"n": 3, "what": "le')
    assert kinds(path) == ["joined", "sent"]
    with closing(Audit(path, last)) as log:
        assert log.differences == []
    told(path, "left", since=last)
    assert kinds(path) == ["joined", "sent", "left"]
    told(path, since=Mark(2, last.link))  # lines behind the last commit are right as well
    assert kinds(path) == ["joined", "sent", "left"]


def test_a_flood_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_AT_WILL", 3)
    with closing(Audit(tmp_path / AUDIT, None)) as log:
        for _ in range(10):
            log.tell("refused", line="x")
        log.tell("sent")
        log._until = 0.0
        log.tell("refused", line="a minute later")
    found = [entry.facts for entry in read(tmp_path / AUDIT)]
    assert [one["what"] for one in found] == ["refused"] * 3 + ["sent", "refused", "refused"]
    assert found[4]["more"] == 7


def test_a_report_shows_the_last_warnings_once(tmp_path):
    with closing(Audit(tmp_path / AUDIT, None)) as log:
        for number in range(12):
            log.tell("warned", line=f"certificate {number % 6} ends")
            log.tell("sent", client=0)
    assert warned(tmp_path / AUDIT) == [f"certificate {number} ends" for number in range(1, 6)]
    assert warned(tmp_path / "none") == []


# --- a run directory ------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three commits, the last of which was undone and done again."""
    with closing(Store(tmp_path / "run", tiny_experiment(), False)) as store:
        store.evidence.audit.tell("joined", client=0, by="fedtide:client:0", at="ipv4:127.0.0.1:9")
        store.commit(record(0, failed={"4": "its disk is full"}), state(0), "[]")
        store.add_scores(record(0, failed={"4": "its disk is full"}, metrics={"a_glo": 0.5}))
        committed(store, 1, 2)
        store.roll_back(0)
        store.go_to(1)
        committed(store, 2)
        store.set_aside({2: "an operator excluded it"})
        store.sync(2)
        assert store.evidence.chain.safe == store.evidence.chain.head
    return tmp_path / "run"


def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[object, list[str], str]:
    monkeypatch.setattr(sys, "argv", ["fedsrv", *map(str, words)])
    status: object = 0
    try:
        fedsrv.cli.main()
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err


def test_a_run_says_what_happened(run, monkeypatch, capsys):
    status, out, _ = typed(monkeypatch, capsys, "audit", run)
    assert status == 0
    assert [line.split()[2].strip(",") for line in out] == [
        "joined", "failed", "committed", "committed", "committed", "rolled", "committed", "set",
    ]  # fmt: skip
    assert out[0].endswith("joined client 0, by fedtide:client:0 from ipv4:127.0.0.1:9")
    assert out[1].endswith("failed client 4, reason its disk is full")
    _, out, _ = typed(monkeypatch, capsys, "audit", run, "--client", 2, "--json")
    assert [json.loads(line)["what"] for line in out] == ["set aside"]
    lines = (run / AUDIT).read_bytes().splitlines(keepends=True)
    (run / AUDIT).write_bytes(b"".join([*lines[:1], *lines[2:]]))
    status, out, err = typed(monkeypatch, capsys, "audit", run)
    assert (status, len(out)) == (1, 1)
    assert "audit.jsonl: line 2 is not the one that was written, or one before it is missing" in err
    (run / AUDIT).write_bytes(b"".join(lines[:3]))
    status, _, err = typed(monkeypatch, capsys, "audit", run)
    assert status == 1
    assert "it ends with line 3, and line 8 was there" in err
    with closing(Store(run, tiny_experiment(), True)) as store:
        assert "audit.jsonl: it ends with line 3" in store.evidence.differences[-1]
    assert any("says: it ends with line 3" in line for line in verified(run).wrong)


def rows(run: Path, sql: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(run / "run.db", isolation_level=None)) as db:
        return db.execute(sql, values).fetchall()


def changed(run: Path) -> None:
    """Change a score of the first record."""
    rows(run, "UPDATE interactions SET record = replace(record, '0.5', '0.9')")


def restated(run: Path) -> None:
    """Write the statements anew as well, so that everything fits again."""
    there = {str(n): row_digest(row) for n, *row in rows(run, "SELECT * FROM interactions")}
    link = beginning_of(rows(run, "SELECT value FROM meta WHERE key = 'run_id'")[0][0])
    for number, text in rows(run, "SELECT number, statement FROM chain ORDER BY 1"):
        facts = json.loads(text)
        stated = facts.get("rows", {}).get("interactions", {})
        stated |= {key: there[key] for key, digest in stated.items() if digest}
        text = json.dumps(facts, sort_keys=True)
        link = continued(link, digest_of(text))
        sql = "UPDATE chain SET statement = ?, link = ? WHERE number = ?"
        rows(run, sql, text, link.hex(), number)


def test_an_edited_history_is_noticed(run, monkeypatch, capsys):
    status, out, _ = typed(monkeypatch, capsys, "verify", run)
    assert status == 0
    kept = out[1].removeprefix("head: ")
    number = int(kept.partition(":")[0])
    assert out[0] == f"{run}: {number} statements and 8 lines of audit hold"
    assert typed(monkeypatch, capsys, "verify", run, "--head", kept)[0] == 0
    changed(run)
    assert verified(run).wrong == [
        "the record of interaction 1 is not the one that was written",
        "rounds.jsonl and run.db differ in interaction 1; --resume writes the lines anew",
    ]
    with pytest.raises(ArchiveError, match="the record of interaction 1 is not the one that was w"):
        Store(run, tiny_experiment(), True)
    restated(run)
    (line,) = verified(run).wrong
    assert line.startswith("rounds.jsonl and run.db differ in interaction 1")
    with closing(Store(run, tiny_experiment(), True)):
        pass  # everything fits
    assert verified(run).wrong == []
    status, out, _ = typed(monkeypatch, capsys, "verify", run, "--head", kept, "--json")
    told = Verification.model_validate_json("\n".join(out), strict=True)
    assert (status, told.holds, len(told.wrong)) == (1, False, 1)
    status, out, _ = typed(monkeypatch, capsys, "verify", run, "--json")
    told = Verification.model_validate_json("\n".join(out), strict=True)
    assert (status, told.holds, told.statements, told.lines) == (0, True, number, 8)
    status, _, err = typed(monkeypatch, capsys, "verify", run, "--head", kept)
    assert status == 1
    assert f"the history up to statement {number} is not the one that was kept" in err
    early = Head(2, b"\x00" * 32)
    assert verified(run, early).wrong == [
        "the history up to statement 2 is not the one that was kept"
    ]
    rows(run, "UPDATE chain SET link = ? WHERE number = 2", "00" * 32)
    assert "statement 2 is not the one that was written" in verified(run).wrong[0]
    with pytest.raises(ArchiveError, match="statement 2 of its history is not the one"):
        Store(run, tiny_experiment(), True)
    for wrong in ("x", "1:00", "-1:" + "00" * 32, "1"):
        with pytest.raises(ArchiveError, match=r"no head of a chain: it reads NUMBER:LINK"):
            read_head(wrong)


def test_a_record_that_is_gone_is_missed(run):
    rows(run, "DELETE FROM interactions WHERE interaction = 2")
    first, second = verified(run).wrong
    assert first == "the record of interaction 3 is gone"
    assert second.startswith("rounds.jsonl has 1 more lines than run.db has records: a loss of pow")


def test_others_are_told_what_is_safe_and_proved_what_follows(run):
    with closing(Store(run, tiny_experiment(), True)) as store:
        chain, before = store.evidence.chain, store.evidence.chain.head
        assert chain.safe == before
        committed(store, 3, 4)
        assert chain.since(before.number) == (before, b"")  # nothing is safe yet
        store.sync(4)
        head, digests = chain.since(before.number)
        assert (head, len(digests)) == (chain.head, 2 * 32)
        assert continued(before.link, digests) == head.link
        for lie in (0, -1, -(2**63), head.number + 1, 2**63 - 1):
            assert chain.since(lie) == (head, b"")
        assert MAX_PROVEN * 32 < 1 << 20


@pytest.mark.parametrize("most", [1, 2])
def test_a_long_proof_comes_in_parts(run, monkeypatch, most):
    monkeypatch.setattr("fedsrv.state.chain.MAX_PROVEN", most)
    with closing(Store(run, tiny_experiment(), True)) as store:
        at, digests = store.evidence.chain.since(1)
        link = at.link
        while at.number < store.evidence.chain.head.number:
            before = at
            at, digests = store.evidence.chain.since(before.number)
            assert at.number == min(before.number + most, store.evidence.chain.head.number)
            link = continued(link, digests)
            assert link == at.link
