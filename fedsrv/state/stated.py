"""What a run's database tells of its run, and whether a state is the one that it states."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmodels.errors import ArchiveError
from fedsrv.state import rows
from fedsrv.state.chain import beginning_of, continued, digest_of, stated_states
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
    """Its statements."""
    links: list[bytes]
    """The link before the first one, and after each up to the first that was changed."""
    wrong: list[str]
    """What does not fit in the database, a line each."""

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
            (run_id,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            columns = "interaction, scored, record"
            records = db.execute(f"SELECT {columns} FROM interactions ORDER BY 1").fetchall()
            query = "SELECT number, statement, link FROM chain ORDER BY number"
            statements = db.execute(query).fetchall()
            said = [json.loads(text) for _, text, _ in statements]
            links, wrong = _links(str(run_id), statements)
            if version == rows.EARLIER:
                from fedsrv.state import earlier_ledger

                wrong += earlier_ledger.edited(db, str(run_id))
            else:
                wrong += rows.edited(db, said)
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise ArchiveError(f"{database} cannot be verified: {error}") from None
    return History(records, said, links, wrong)


def _links(run_id: str, statements: Rows) -> tuple[list[bytes], list[str]]:
    """Return the links of a chain as they have to be, and a line where one is not."""
    links = [beginning_of(run_id)]
    for number, text, link in statements:
        links.append(continued(links[-1], digest_of(text)))
        if (number, link) != (len(links) - 1, links[-1].hex()):
            line = f"statement {len(links) - 1} is not the one that was written"
            return links, [f"{line}, or one before it is missing"]
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
