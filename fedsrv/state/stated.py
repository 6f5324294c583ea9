"""What a run's database tells of its run, and whether a state is the one that it states."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmodels.errors import ArchiveError
from fedsrv.state import rows
from fedsrv.state.chain import beginning_of, continued, digest_of, read_statement, stated_states
from fedsrv.state.run_directory import state_numbers
from fedsrv.state.state_files import check_stated, state_path

Rows = list[tuple[Any, ...]]


def opened(database: Path) -> closing[sqlite3.Connection]:
    """Open a database to read it alone."""
    return closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True))


@dataclass(frozen=True)
class History:
    """What a database tells of its run, at one moment."""

    records: Rows
    said: list[dict[str, Any]]
    """Its statements, up to the first that was changed."""
    links: list[bytes]
    """The link before the first one, and after each of them."""
    is_chained: bool
    """Whether no statement was changed: else rows and files are not compared with them."""
    wrong: list[str]
    """What does not fit in the database, a line each."""
    untold: str = ""
    """Of which edits of an earlier version's rows nothing can tell."""

    @property
    def committed(self) -> int | None:
        """The last committed interaction; None before the first."""
        return int(self.records[-1][0]) if self.records else None


def read_history(database: Path) -> History:
    """Read a database, and compare its rows with its statements.

    Raises:
        ArchiveError: there is none that can be read.
    """
    if not database.is_file():
        raise ArchiveError(f"{database.parent} holds no run.db: it is no run directory")
    try:
        with opened(database) as db:
            db.execute("BEGIN")  # a run under way commits meanwhile
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if rows.tables_of(db):
                rows.check_format(database, version)
            (run_id,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
            columns = "interaction, scored, record"
            records = db.execute(f"SELECT {columns} FROM interactions ORDER BY 1").fetchall()
            query = "SELECT number, statement, link FROM chain ORDER BY number"
            statements = db.execute(query).fetchall()
            links, wrong = _links(str(run_id), statements)
            said = [read_statement(text) for _, text, _ in statements[: len(links) - 1]]
            is_chained = not wrong
            wrong += rows.remade(db, version)
            if is_chained and version == rows.EARLIER:
                from fedsrv.state import earlier_ledger

                wrong += earlier_ledger.edited(db, str(run_id))
            elif is_chained:
                wrong += rows.edited(db, said)
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise ArchiveError(f"{database} cannot be verified: {error}") from None
    return History(records, said, links, is_chained, wrong, _untold(version, said))


def _untold(version: int, said: list[dict[str, Any]]) -> str:
    """Return of which edits nothing can tell; an empty text where statements cover every row."""
    taken = [number for number, one in enumerate(said, 1) if "taken_over" in one]
    if version != rows.EARLIER and not taken:
        return ""
    from fedsrv.state.earlier_ledger import RECOMPUTED, UNSTATED

    when = f"before statement {taken[0]}" if taken else "before the run is resumed"
    return (
        f"written by an earlier version, whose statements cover interactions alone: {when}, an "
        f"edit of {' or '.join(UNSTATED)} does not show, and one of {', '.join(RECOMPUTED)} only "
        "if their hashes stayed as they were"
    )


def _links(run_id: str, statements: Rows) -> tuple[list[bytes], list[str]]:
    """Return the links of a chain as they have to be, and a line where one is not."""
    links = [beginning_of(run_id)]
    for number, text, link in statements:
        following = continued(links[-1], digest_of(text))
        if (number, link) != (len(links), following.hex()):
            line = f"statement {len(links)} is not the one that was written"
            return links, [f"{line}, or one before it is missing"]
        links.append(following)
    return links, []


def check_state(run: Path, number: int) -> None:
    """Compare a run's state after an interaction with its history, where that states it.

    Raises:
        ArchiveError: it is not the one that the run wrote, it was never committed, or the history
            was edited.
    """
    if (run / "run.db").is_file():
        _check_state(run, number, _whole_history(run))


def newest_state(run: Path) -> int:
    """Return the newest interaction that is committed, whose state is the one that is stated.

    Without a database, that is the one of the newest state.

    Raises:
        ArchiveError: nothing is committed, or as :func:`check_state`.
    """
    if not (run / "run.db").is_file():
        number = max(state_numbers(run / "server"), default=None)
    else:
        found = _whole_history(run)
        number = found.committed
        if number is not None:
            _check_state(run, number, found)
    if number is None:
        raise ArchiveError(f"{run} holds no committed state of a run")
    return number


def _whole_history(run: Path) -> History:
    found = read_history(run / "run.db")
    if found.wrong:
        raise ArchiveError(f"{run / 'run.db'}: {found.wrong[0]} (fedsrv verify {run})")
    return found


def _check_state(run: Path, number: int, found: History) -> None:
    path = state_path(run / "server", number)
    if found.committed is None or number > found.committed:
        raise ArchiveError(f"{path} was never committed (fedsrv verify {run})")
    if stated := stated_states(found.said).get(number):
        check_stated(path, stated)
