"""The times of a table's rows: numbers, dates, and times of day, which may go over midnight.

Months, weeks and days are those of the calendar as a row writes it: ``2025-01-31T23:30-05:00`` is
of January, wherever it is read.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.own.cells import parsed, said
from fedcli.data.own.table_files import TableRows
from fedmodels.config.columns import Columns
from fedmodels.config.data import Period
from fedmodels.errors import DataError

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds in each unit of time."""
DAY = 86400.0
"""Seconds of a day."""
LATE = 3600.0
"""A row may come so many seconds later than its time says; a recording that goes back further is
another one, or one of another day."""
SHUFFLED = 0.1
"""Share of steps back beyond which rows are in no order."""
_DATED = r"^\s*(\d{1,2})([./-])(\d{1,2})[./-](\d{4}|\d{2})[\sT,]*(.*)$"
"""A date that begins with the day or the month, and what stands behind it."""
_CLOCK = r"^\d{1,2}:\d{2}"
_ZONED = r":\d{2}(?:[.,]\d+)?\s*(?:[Zz]|UTC|[+-]\d{2}(?::?\d{2})?)$"
"""A time with its difference to UTC."""
_OFFSET = r"([+-])(\d{2}):?(\d{2})?$"
"""That difference."""
YEARS = 1980, 2100
"""Years from and before which numbers are taken for times since 1970."""
ALIKE = "write all times of a column alike"
NAMED_APART = (
    "if it holds several recordings, name the column that tells them apart in [data.columns] "
    "session"
)


@dataclass(frozen=True)
class Times:
    """The times of a table's rows."""

    seconds: NDArray[np.float64]
    """(n,) from the first one on."""
    done: Counter[str]
    """What was done to them, and how often."""
    kind: str
    """``dates``, ``numbers``, ``clock`` or ``spans``."""
    dates: Any = None
    """Points in time (n,) as UTC, of ``dates``: a pandas ``Series``."""
    ahead: Any = None
    """How far the clocks of the rows are ahead of UTC (n,), likewise."""


def times_of(table: TableRows, columns: Columns, apart: Sequence[NDArray[np.str_]]) -> Times:
    """Return the times of rows (n,).

    ``apart`` has values (n,) that rows of one recording share. Times of day go on beyond midnight,
    where rows stand in the order of their recordings.

    Raises:
        DataError: a cell holds no time; names the row. Or days and months cannot be told apart; or
            it is open whether a recording goes back to an earlier time, or on to the next day.
    """
    assert columns.time is not None
    column = table.frame[columns.time]
    done, dates, ahead = Counter[str](), None, None
    are_texts = column.dtype.kind in "mM" or columns.date_formats is not None
    numbers = None if are_texts else parsed(table, columns.time)[0]
    if numbers is not None and not np.isnan(numbers[column.notna()]).any():
        found = numbers * SECONDS[columns.time_unit or "s"]
        kind = "numbers"
    elif columns.time_unit is not None:
        raise DataError(
            f"{table.where}: column {columns.time!r} holds no numbers: leave out time_unit"
        )
    else:
        found, kind, dates, ahead = _of_texts(column, table, columns)
    wrong = np.flatnonzero(~np.isfinite(found))
    if len(wrong):
        known = columns.date_formats
        raise DataError(
            f"{_held(table, columns, int(wrong[0]))}, which is no time: "
            + (f"it matches no date_formats: {', '.join(known)}" if known else "write numbers, or "
            "texts such as 2026-05-31T12:00:00.5, 31.05.2026 12:00:00.5 or 12:00:00.5")
        )  # fmt: skip
    for rows in _recordings(apart):
        if kind == "clock":
            _count_days(found, rows, table, columns, done)
        elif kind == "numbers":
            steps = np.diff(found[rows])
            back = steps < -LATE
            done["back"] += int(back.sum()) if (steps < 0).mean() <= SHUFFLED else 0
    seconds = np.asarray(found - found.min(initial=np.inf), dtype=np.float64)
    return Times(seconds, done, kind, dates, ahead)


def unreadable_times(table: TableRows, columns: Columns) -> NDArray[np.bool_]:
    """Tell in which rows (n,) a cell holds no time, as far as those of the others tell it."""
    column = table.frame[columns.time]
    empty = np.asarray(column.isna(), dtype=bool)
    if column.dtype.kind in "mM":
        return empty
    found, filled = parsed(table, str(columns.time))
    if 2 * np.isfinite(found).sum() < filled.sum():
        try:
            found, *_ = _of_texts(column, table, columns)
        except DataError:  # of all rows: who reads them says it
            return empty
    return np.asarray(~np.isfinite(found), dtype=bool)


# --- the calendar ---------------------------------------------------------------------------------


def calendar(
    times: Times, period: Period, table: TableRows, columns: Columns
) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    """Return the month, week or day of each row (n,), and its point in time in microseconds.

    Weeks are those of ISO 8601: that of 30 December 2024 is ``2025-W01``. Numbers are seconds since
    1970, unless ``time_unit`` says another unit, and their calendar is that of UTC.

    Raises:
        DataError: the times have no dates.
    """
    pandas = importlib.import_module("pandas")
    dates = times.dates
    if times.kind == "numbers":
        since = parsed(table, str(columns.time))[0] * SECONDS[columns.time_unit or "s"]
        years = 1970 + since / (365.2425 * DAY)
        wrong = np.flatnonzero((years < YEARS[0]) | (years >= YEARS[1]))
        if len(wrong):
            raise DataError(
                f"{_held(table, columns, int(wrong[0]))}, which is no time since 1970 that falls "
                f"into {YEARS[0]} to {YEARS[1] - 1}: [data] tasks = '{period}' needs dates; write "
                "them, or say with time_unit in what the numbers count"
            )
        dates = pandas.Series(pandas.to_datetime((since * 1e6).round(), unit="us"))
    if dates is None:
        raise DataError(
            f"{_held(table, columns, 0)}, which says no date: [data] tasks = '{period}' needs "
            "dates; write them before the times"
        )
    local = dates if times.ahead is None else dates + times.ahead
    if period == "week":
        parts = local.dt.isocalendar()
        texts = parts["year"].astype(str) + "-W" + parts["week"].astype(str).str.zfill(2)
    else:
        texts = local.dt.strftime("%Y-%m" if period == "month" else "%Y-%m-%d")
    return texts.to_numpy().astype(np.str_), points_of(dates)


def points_of(dates: Any) -> NDArray[np.int64]:
    """Return points in time as microseconds since 1970 (n,)."""
    return np.asarray(dates.to_numpy().astype("datetime64[us]").astype(np.int64))


# --- times of day ---------------------------------------------------------------------------------


def _recordings(apart: Sequence[NDArray[np.str_]]) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each recording of two or more, as they stand in the file."""
    codes = np.zeros(len(apart[0]), dtype=np.int64)
    for names in apart:
        _, own = np.unique(names, return_inverse=True)
        _, codes = np.unique(codes * (int(own.max(initial=0)) + 1) + own, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        if len(rows) > 1:
            yield rows


def _count_days(
    times: NDArray[np.float64],
    rows: NDArray[np.int64],
    table: TableRows,
    columns: Columns,
    done: Counter[str],
) -> None:
    """Add a day to the times of day (n,) of a recording from each midnight on.

    Midnight has passed where a time is more than half a day before the one in the row above. Where
    most times fall from row to row, the file has its newest row first.

    Raises:
        DataError: a time is before the one above by more than ``LATE``, and by less than that.
    """
    steps = np.diff(times[rows])
    if (steps < 0).sum() > (steps > 0).sum():
        rows, steps = rows[::-1], -steps[::-1]
    passed = steps < -DAY / 2
    back = (steps < 0) & ~passed
    if back.mean() > SHUFFLED:
        done["shuffled"] += 1
        return
    far = np.flatnonzero(back & (steps < -LATE))
    if len(far):
        above, row = (int(rows[far[0] + k]) for k in (0, 1))
        raise DataError(
            f"{_held(table, columns, row)} below {said(_cell(table, columns, above))} in "
            f"{table.at(above)}: write dates before the times, or, {NAMED_APART}"
        )
    again = steps > DAY - LATE  # a row of the day before comes late
    days: NDArray[np.int64] = np.cumsum(passed) - np.cumsum(again)
    times[rows[1:]] += DAY * days
    done["midnights"] += int(days[-1])


# --- texts ----------------------------------------------------------------------------------------


def _of_texts(
    column: Any, table: TableRows, columns: Columns
) -> tuple[NDArray[np.float64], str, Any, Any]:
    """Return the seconds (n,) of times that are texts, NaN where a text is no time, and their kind.

    Also return the dates and differences to UTC of :class:`Times`, where there are some.

    Raises:
        DataError: some have a date or a difference to UTC that others lack; or days and months
            cannot be told apart.
    """
    pandas = importlib.import_module("pandas")
    if column.dtype.kind == "M":
        local = column.dt.tz_localize(None)
        stamps = local if column.dt.tz is None else column.dt.tz_convert(None)
        return _seconds(column - column.min()), "dates", stamps, local - stamps
    if column.dtype.kind == "m":
        return _seconds(column), "spans", None, None
    texts = column.astype(str).str.strip()
    if columns.date_formats is not None:
        stamps = _points(texts, columns.date_formats[0])
        for form in columns.date_formats[1:]:
            stamps = stamps.fillna(_points(texts, form))
        return _from_stamps(stamps, texts, table, columns)
    dated = texts.str.extract(_DATED)
    begins_with_year = texts.where(dated[0].isna(), "")
    stamps = _stamps(begins_with_year.str.replace(r",(\d+)", r".\1", regex=True))
    if dated[0].notna().any():
        stamps = _of_dates(stamps, dated, table, columns)
    is_clock = texts.str.contains(_CLOCK)
    if not stamps.notna().any():
        spans = _seconds(pandas.to_timedelta(texts.str.replace(",", "."), errors="coerce"))
        within_a_day = is_clock.all() and not (spans >= DAY).any()
        return spans, "clock" if within_a_day else "spans", None, None
    if is_clock.any():
        other = "is a time without a date, and there are dates"
        raise DataError(_unlike(is_clock, stamps.notna(), other, table, columns))
    return _from_stamps(stamps, texts, table, columns)


def _from_stamps(
    stamps: Any, texts: Any, table: TableRows, columns: Columns
) -> tuple[NDArray[np.float64], str, Any, Any]:
    """Return what :func:`_of_texts` does of dates (n,), of which some may be none."""
    if not stamps.notna().any():
        return np.full(len(stamps), np.nan), "dates", None, None
    zoned = texts.str.contains(_ZONED) & stamps.notna()
    if zoned.any() and not zoned[stamps.notna()].all():
        other = "says how far it is from UTC, and others do not"
        raise DataError(_unlike(zoned, ~zoned & stamps.notna(), other, table, columns))
    seconds = _seconds(stamps - stamps[stamps.notna()].iloc[0])
    ahead = _ahead(texts) if zoned.any() else None
    return seconds, "dates", stamps.dt.tz_localize(None), ahead


def _ahead(texts: Any) -> Any:
    """Return how far the clocks of times (n,) are ahead of UTC; none where a text says nothing."""
    pandas, parts = importlib.import_module("pandas"), texts.str.extract(_OFFSET)
    sign = parts[0].map({"+": 1, "-": -1}).fillna(0)
    minutes = parts[1].fillna("0").astype(int) * 60 + parts[2].fillna("0").astype(int)
    return pandas.to_timedelta(sign * minutes, unit="min")


def _of_dates(stamps: Any, dated: Any, table: TableRows, columns: Columns) -> Any:
    """Return points in time (n,), also of dates that begin with the day or the month.

    ``stamps`` (n,) has those of the other rows, ``dated`` the first number of a date, the mark, the
    second number, the year and the rest (n, 5).

    Raises:
        DataError: either may be the day, and it matters; or dates contradict each other.
    """
    first, second = (dated[k].fillna("0").astype(int) for k in (0, 2))
    day_first, points = columns.day_first, dated[1] == "."
    by_day, by_month = first.gt(12) | points, second.gt(12)
    if day_first is None and by_day.any() and by_month.any():
        other = "starts with the day, but others with the month"
        raise DataError(_unlike(by_day, by_month, other, table, columns))
    if day_first is None and (by_day.any() or by_month.any()):
        day_first = bool(by_day.any())
    of_day, of_month = (stamps.fillna(_dates(dated, *order)) for order in ((0, 2), (2, 0)))
    if day_first is None:
        spans = (_seconds(found - found.min()) for found in (of_day, of_month))
        if not np.array_equal(next(spans), next(spans), equal_nan=True):
            row = int((first != second).to_numpy().argmax())
            raise DataError(
                f"{_held(table, columns, row)}, of which either number may be the day: set "
                "[data.columns] day_first = true or false"
            )
    return of_month if day_first is False else of_day


def _dates(dated: Any, day: int, month: int) -> Any:
    """Return points in time (n,); none where there is no such date."""
    year = dated[3].where(dated[3].str.len() != 2, "20" + dated[3])
    clock = dated[4].str.replace(",", ".").where(dated[4] != "", "00:00")
    iso = year + "-" + dated[month].str.zfill(2) + "-" + dated[day].str.zfill(2) + " " + clock
    return _stamps(iso.fillna(""))


def _stamps(texts: Any) -> Any:
    """Return points in time; texts begin with the year, and may have a clock of twelve hours."""
    found = _points(texts, "ISO8601")
    left = found.isna() & texts.str.contains(r"\d\s*[AaPp]\.?[Mm]\.?$", regex=True, na=False)
    if left.any():
        clocks = texts[left].str.replace(".m.", "m").str.upper()
        for form in ("%Y-%m-%d %I:%M:%S.%f %p", "%Y-%m-%d %I:%M:%S %p", "%Y-%m-%d %I:%M %p"):
            found = found.fillna(_points(clocks, form))
    return found


def _points(texts: Any, form: str) -> Any:
    pandas = importlib.import_module("pandas")
    return pandas.to_datetime(texts, errors="coerce", format=form, utc=True).dt.as_unit("us")


def _seconds(spans: Any) -> NDArray[np.float64]:
    return np.asarray(spans.dt.total_seconds().to_numpy(dtype=np.float64, na_value=np.nan)).copy()


# --- lines ----------------------------------------------------------------------------------------


def _cell(table: TableRows, columns: Columns, row: int) -> Any:
    return table.frame[columns.time].iloc[row]


def _held(table: TableRows, columns: Columns, row: int) -> str:
    return (
        f"{table.where}: column {columns.time!r} holds {said(_cell(table, columns, row))} in "
        f"{table.at(row)}"
    )


def _unlike(these: Any, those: Any, what: str, table: TableRows, columns: Columns) -> str:
    """Return a line on the first of some rows that are unlike the first of others, each (n,)."""
    row, other = (int(found.to_numpy().argmax()) for found in (these, those))
    shown = said(_cell(table, columns, other))
    return f"{_held(table, columns, row)}, which {what}, as {shown} in {table.at(other)}: {ALIKE}"
