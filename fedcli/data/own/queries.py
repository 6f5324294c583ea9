"""Queries ``*.sql``: one SELECT over the files beside it, by DuckDB, or over a data base there.

    -- nightly.sql                                   site.toml
    SELECT * FROM 'lab/*.parquet' WHERE ward = 'A'   mark = "id"

A query reads what lies in its own directory, and writes nothing. Of a site with a ``mark``, rows
beyond the last one alone are asked for, so a file of years costs what is new in it.
"""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from threading import Event, Timer
from typing import Any

from fedcli.data.folders import OF_TEXT, ending, files_below
from fedcli.data.own.books import Part, frame_of
from fedcli.data.own.marks import value_of
from fedcli.data.own.table_files import Since
from fedmodels.config.columns import Columns
from fedmodels.config.recipe import Recipe
from fedmodels.errors import DataError
from fedmodels.host.files import check_inside, open_regular
from fedmodels.host.machine import free_bytes
from fedmodels.times import QUERY_S

MAX_BYTES = 1 << 20
"""Limit of a query."""
SQLITE = b"SQLite format 3\0"
"""How the files of SQLite begin."""
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION,
         sqlite3.SQLITE_RECURSIVE}  # fmt: skip
"""What a query does that writes nothing."""
DAY = timedelta(days=1)
ONE = "it must be one SELECT, which reads and writes nothing"


@contextmanager
def opened(path: Path, columns: Columns, recipe: Recipe, since: Since) -> Iterator[list[Part]]:
    """Yield what a query gives, as one table.

    Raises:
        DataError: it is more than one SELECT, or wrong; or there is no such data base.
    """
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} has more than {MAX_BYTES} bytes")
    with open_regular(path) as file:
        query = file.read().decode("utf-8-sig").strip().rstrip(";")
    base = None if recipe.database is None else path.parent / recipe.database
    if base is not None:
        check_inside(base, path.parent)
        if not base.is_file():
            raise DataError(f"{base}, the database of the site mapping, does not exist")
    if base is not None and _begins(base) == SQLITE:
        names, frame = _of_sqlite(path, base, query, recipe, since)
    else:
        names, frame = _of_duckdb(path, base, query, recipe, since)

    yield [Part("", names, lambda: (frame, None))]


def _begins(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(len(SQLITE))


def _beyond(query: str, mark: str | None, since: Since, *, of_sqlite: bool = False) -> str:
    """Return a query for what is new, and little more: who reads the rows looks at each mark."""
    if mark is None or since is None:
        return query
    name, rule = mark.replace('"', '""'), '"{0}" > ?'
    if of_sqlite:  # numbers may stand in a column of texts, and dates as no date of SQLite's
        rule = '"{0}" > CAST(? AS NUMERIC)'
        if isinstance(since, str):
            rule = 'ifnull(datetime("{0}") >= datetime(?), 1)'
    rule = rule.format(name)
    return f"SELECT * FROM ({query}\n) AS found WHERE {rule}"


def _of_sqlite(
    path: Path, base: Path, query: str, recipe: Recipe, since: Since
) -> tuple[list[str], Any]:
    uri = f"{base.resolve().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db, _in_time(path, db):
            db.set_authorizer(
                lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY
            )
            values = [] if since is None or recipe.mark is None else [since]
            found = db.execute(_beyond(query, recipe.mark, since, of_sqlite=True), values)
            names = [column[0] for column in found.description or ()]
            rows = found.fetchall()
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise DataError(f"{path}: {error}; {ONE}") from None
    return names, frame_of(names, rows)


def _of_duckdb(
    path: Path, base: Path | None, query: str, recipe: Recipe, since: Since
) -> tuple[list[str], Any]:
    duckdb = importlib.import_module("duckdb")
    here = path.parent.resolve()
    kept_small = {"threads": 1, "autoinstall_known_extensions": False,
                  "autoload_known_extensions": False}  # fmt: skip
    try:
        found = duckdb.extract_statements(query)
        if [one.type for one in found] != [duckdb.StatementType.SELECT]:
            raise DataError(f"{path}: {ONE}")
        with closing(duckdb.connect(
            ":memory:" if base is None else str(base), base is not None, kept_small
        )) as db, _in_time(path, db):  # fmt: skip
            db.execute(f"SET memory_limit = '{max(free_bytes() // 2, 1 << 27)} B'")
            db.execute(f"SET allowed_directories = [{_text(f'{here}/')}]")
            for name, place in _named_in(query, here).items():
                read = "read_parquet" if place.endswith(".parquet") else "read_csv"
                quoted = name.replace('"', '""')
                db.execute(f'CREATE TEMP VIEW "{quoted}" AS FROM {read}({_text(place)})')
            db.execute("SET enable_external_access = false")
            db.execute("SET lock_configuration = true")
            asked = _beyond(query, recipe.mark, since)
            values = [] if asked == query else [_value(since)]
            try:
                relation = db.execute(asked, values)
            except duckdb.BinderException:  # a mark that is a text: who reads the rows looks at it
                relation = db.execute(query)
            names = [column[0] for column in relation.description]
            return names, relation.df()
    except duckdb.Error as error:
        raise DataError(f"{path}: {str(error).splitlines()[0]}") from None


@contextmanager
def _in_time(path: Path, db: Any) -> Iterator[None]:
    """Interrupt a data base that takes too long; raise DataError then."""
    over = Event()

    def stop() -> None:
        over.set()
        db.interrupt()

    timer = Timer(QUERY_S, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception:
        if not over.is_set():
            raise
        raise DataError(
            f"{path} took more than {QUERY_S} s and was stopped: select less, or write its "
            "result to a parquet file and pass that"
        ) from None
    finally:
        timer.cancel()


def _value(since: Since) -> Any:
    """Return a mark as DuckDB compares it: a date is one, less a day for what it makes of zones."""
    found = value_of(since)
    return found - DAY if isinstance(found, datetime) else since


def _text(value: str) -> str:
    """Return a text as SQL has it."""
    return "'" + value.replace("'", "''") + "'"


def _named_in(query: str, here: Path) -> dict[str, str]:
    """Return the files that a query names, and ``*.parquet`` and the like, with their places."""
    found = dict[str, str]()
    for file in files_below(here):
        if ending(file) in (*OF_TEXT, ".parquet"):
            own = file.relative_to(here)
            for name in (own.as_posix(), (own.parent / f"*{ending(file)}").as_posix()):
                if name in query:
                    found[name] = str(here / name)
    return found
