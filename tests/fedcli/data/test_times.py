"""Times of recordings: over midnight, back to an earlier time, and as unlike dates."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.data.own.table_files import read_table
from fedcli.data.own.times import times_of
from fedmodels.config.columns import Columns
from fedmodels.errors import DataError


def clock(seconds: float) -> str:
    within = int(seconds) % 86400
    return f"{within // 3600:02}:{within // 60 % 60:02}:{within % 60:02}"


def read(path: Path, times: list[Any], trials: str = "") -> tuple[list[float], dict[str, int]]:
    """Return the seconds of rows with these times, and what was done; one trial a letter."""
    rows = [f"{t};{s}\n" for t, s in zip(times, trials or "a" * len(times), strict=True)]
    (path / "a.csv").write_text("t;trial\n" + "".join(rows))
    table = read_table(path / "a.csv", Columns(time="t", session="trial"))
    apart = table.frame["trial"].to_numpy().astype(str)
    found = times_of(table, Columns(time="t"), (apart,))
    return found.seconds.tolist(), {name: count for name, count in found.done.items() if count}


def test_times_of_day_go_on_over_midnight(tmp_path):
    """Two and a half days from 20:00 on, a row each hour."""
    times = [20 * 3600 + 3600 * i for i in range(60)]
    found, done = read(tmp_path, [clock(t) for t in times])
    assert found == [3600.0 * i for i in range(60)]
    assert done == {"midnights": 3}
    newest_first, done = read(tmp_path, [clock(t) for t in reversed(times)])
    assert newest_first == found[::-1]
    assert done == {"midnights": 3}


def test_each_recording_has_midnights_of_its_own(tmp_path):
    """Rows of two recordings alternate, and one begins in the morning."""
    evening, morning = ([h * 3600 - 30 + 10 * i for i in range(6)] for h in (24, 6))
    mixed = [t for pair in zip(evening, morning, strict=True) for t in pair]
    found, done = read(tmp_path, [clock(t) for t in mixed], "ab" * 6)
    assert np.diff(found[::2]).tolist() == np.diff(found[1::2]).tolist() == [10.0] * 5
    assert done == {"midnights": 1}


def test_a_row_that_comes_late_stays_before_midnight(tmp_path):
    times = [86390 + i for i in range(20)]
    times[12], times[9] = times[9], times[12]  # 23:59:59 stands below 00:00:01
    found, _ = read(tmp_path, [clock(t) for t in times])
    assert found == [float(t - 86390) for t in times]


def test_a_recording_that_goes_back_is_asked_about(tmp_path):
    """Two working days: whether the second one follows the first is not known."""
    days = [9 * 3600 + 61 * i for i in range(400)] + [9 * 3600 + 61 * i + 7 for i in range(400)]
    line = "column 't' holds '09:00:07' in line 402 below '15:45:39' in line 401: write dates"
    with pytest.raises(DataError, match=f"{line} before the times, or, if it holds several"):
        read(tmp_path, [clock(t) for t in days])
    found, done = read(tmp_path, [clock(t) for t in days], "a" * 400 + "b" * 400)
    assert found[400] == 7.0, "recordings that are named apart"
    assert not done
    _, done = read(tmp_path, days)
    assert done == {"back": 1}, "of numbers, a note tells it"


def test_rows_in_no_order_are_those_of_one_day(tmp_path):
    order = np.random.default_rng(0).permutation(200)
    found, done = read(tmp_path, [clock(420 * int(i)) for i in order])
    assert found == [420.0 * int(i) for i in order]
    assert done == {"shuffled": 1}


def test_dates_may_be_written_in_several_ways(tmp_path):
    times = ["2026-05-31 23:59:58", "31.05.2026 23:59:59", "2026-06-01T00:00:00", "1.6.26 0:00:01"]
    assert read(tmp_path, times)[0] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("times", "line"),
    [
        (
            ["2026-05-31 12:00:00", "12:00:01"],
            "holds '12:00:01' in line 3, which is a time without a date, and there are dates, as "
            "'2026-05-31 12:00:00' in line 2",
        ),
        (
            ["31/05/2026 12:00", "05/31/2026 12:01"],
            "holds '31/05/2026 12:00' in line 2, which starts with the day, but others with the "
            "month, as '05/31/2026 12:01' in line 3",
        ),
        (
            ["2026-05-31 12:00:00", "2026-05-31 12:00:01+02:00"],
            "holds '2026-05-31 12:00:01+02:00' in line 3, which says how far it is from UTC, and "
            "others do not, as '2026-05-31 12:00:00' in line 2",
        ),
        (
            ["03/04/2026 12:00", "2026-04-03 12:01"],
            "holds '03/04/2026 12:00' in line 2, of which either number may be the day",
        ),
    ],
)
def test_times_that_contradict_each_other_are_named(tmp_path, times, line):
    with pytest.raises(DataError, match=re.escape(f"a.csv: column 't' {line}")):
        read(tmp_path, times)
