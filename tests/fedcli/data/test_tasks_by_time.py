"""Tasks by the calendar, by session and by the value of a column: which row is of which task."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from numpy.typing import NDArray

from fedcli.data.cuts.held_out import tasks_by_value
from fedcli.data.own.table_files import read_table
from fedcli.data.own.times import calendar, times_of
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition
from fedcli.data.store.growing import add_task
from fedcli.data.store.site import cut
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.experiment import Experiment
from fedmodels.config.scenario import Natural
from fedmodels.errors import ConfigError, DataError

COLUMNS = {"label": "y", "features": ["row"], "client": "person", "time": "t"}


def periods_of(tmp_path: Path, times: list[Any], period: Any, **keys: Any) -> list[str]:
    """Return the month, week or day of each time of a file."""
    pandas.DataFrame({"t": times, "y": "a"}).to_csv(tmp_path / "one.csv", index=False)
    columns = Columns(label="y", time="t", **keys)
    table = read_table(tmp_path / "one.csv", columns)
    times_found = times_of(table, columns, (np.zeros(len(times), dtype=np.str_),))
    return [*map(str, calendar(times_found, period, table, columns)[0])]


def test_a_month_a_week_and_a_day_are_those_that_a_row_writes(tmp_path):
    """At both ends of a year, over the change to summer time, and in whatever order rows stand."""
    year = ["2025-01-05", "2024-12-29T23:59", "2024-12-30", "2025-12-29", "2027-01-03"]
    assert periods_of(tmp_path, year, "week") == [
        "2025-W01", "2024-W52", "2025-W01", "2026-W01", "2026-W53"
    ]  # fmt: skip
    assert periods_of(tmp_path, ["31.12.2024 23:59", "01.01.2025 00:00"], "month") == [
        "2024-12", "2025-01"
    ]  # fmt: skip
    zoned = [
        "2025-01-31T23:30:00-05:00", "2025-02-01T00:30:00+02:00", "2025-01-31T23:30:00Z",
        "2025-03-30T00:30:00+01:00", "2025-03-30T23:30:00+02:00", "2025-02-01T04:30:00+00:00",
    ]  # fmt: skip
    assert periods_of(tmp_path, zoned, "month") == ["2025-01", "2025-02", "2025-01",
                                                    "2025-03", "2025-03", "2025-02"]  # fmt: skip
    assert periods_of(tmp_path, zoned, "day")[3:5] == ["2025-03-30", "2025-03-30"]
    seconds = [1735689599, 1735689600]  # the last second of 2024 in UTC, and the next one
    assert periods_of(tmp_path, seconds, "day") == ["2024-12-31", "2025-01-01"]
    millis = [s * 1000 for s in seconds]
    assert periods_of(tmp_path, millis, "month", time_unit="ms") == ["2024-12", "2025-01"]


def test_a_parquet_with_a_time_zone_has_the_days_of_its_clock(tmp_path):
    times = pandas.to_datetime(["2025-10-25T22:30Z", "2025-10-26T00:30Z", "2025-10-26T01:30Z"])
    frame = pandas.DataFrame({"t": times.tz_convert("Europe/Berlin"), "y": "a"})
    frame.to_parquet(tmp_path / "one.parquet")
    columns = Columns(label="y", time="t")
    table = read_table(tmp_path / "one.parquet", columns)
    found = times_of(table, columns, (np.zeros(3, dtype=np.str_),))
    days, points = calendar(found, "day", table, columns)
    assert days.tolist() == ["2025-10-26"] * 3  # 00:30, 02:30 and 02:30 again
    assert np.diff(points).tolist() == [2 * 3600 * 10**6, 3600 * 10**6]


@pytest.mark.parametrize(
    ("times", "line"),
    [
        (["12:00:00", "12:00:01"], "which says no date: .*needs dates; write them before"),
        ([0, 3600], "holds 0 in line 2, which is no time since 1970 that falls into 1980 to 2099"),
        ([1735689600000] * 2, "holds 1735689600000 .*say with time_unit in what the numbers count"),
    ],
)
def test_times_without_dates_have_no_calendar(tmp_path, times, line):
    with pytest.raises(DataError, match=line):
        periods_of(tmp_path, times, "day")


def test_a_month_with_few_rows_goes_with_its_neighbour():
    values = np.repeat(["jan", "feb", "mar", "apr"], [3, 1, 4, 2])
    owners = np.zeros(10, dtype=np.int64)
    tasks, named = tasks_by_value(owners, values, least=3)
    assert tasks.tolist() == [0] * 3 + [1] * 7  # february waits for march, april joins it
    assert named == {0: [("jan", 3), ("feb and mar and apr", 7)]}
    assert tasks_by_value(owners, values, least=1)[0].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
    wholes = np.array([0, 0, 1, 1, 1, 2, 2, 2, 3, 3])  # one that began in january goes on in march
    begun = tasks_by_value(owners, values, wholes, least=1)[0]
    assert begun.tolist() == [0] * 5 + [1] * 3 + [2] * 2
    other = tasks_by_value(np.array([0, 1, 1, 0]), np.array(["b", "a", "b", "a"]), least=1)
    assert other[0].tolist() == [0, 0, 1, 1]  # each counts its own


def recorded(root: Path, name: str, months: dict[str, list[int]], step: int = 1) -> None:
    """Write a file with twenty rows for each day of some months, the newest row first."""
    rows = [
        {"row": 100 * month + n, "y": "ab"[n % 2], "person": who, "phase": "late" if month > 2 else
         "early", "t": f"2025-{month:02d}-15T10:{n:02d}:00"}
        for who, some in months.items() for month in some for n in range(0, 20, step)
    ]  # fmt: skip
    root.mkdir(exist_ok=True)
    pandas.DataFrame(rows[::-1]).to_csv(root / name, index=False)


def dealt(tmp_path: Path, clients: int = 2, **keys: Any) -> list[ClientData]:
    """Deal out the files in ``data`` by natural clients, whose data say what a task is."""
    columns = COLUMNS | keys.pop("columns", {})
    data = Data.model_validate(
        {"name": "table", "root": str(tmp_path / "data"), "columns": columns, **keys}
    )
    out = run_partition(data, Natural(kind="natural"), clients, 0, tmp_path / "cut")
    return [ClientData(Path(out) / str(client)) for client in range(clients)]


def rows_in(data: ClientData, task: int, part: Any) -> NDArray[np.int64]:
    return np.sort(data.arrays(task, part)[0].ravel().astype(np.int64))


def test_each_month_of_each_client_is_a_task_with_a_test_part_of_its_end(tmp_path, caplog):
    """The files come in no order of time, and the clients have other months."""
    recorded(tmp_path / "data", "a.csv", {"ann": [3], "ben": [2]})
    recorded(tmp_path / "data", "b.csv", {"ann": [1], "ben": [4, 5]})
    ann, ben = dealt(tmp_path, tasks="month")
    for client, months in ((ann, (1, 3)), (ben, (2, 4, 5))):
        assert client.num_tasks == len(months)
        for task, month in enumerate(months):
            rows = [100 * month + n for n in range(20)]
            assert rows_in(client, task, "train").tolist() == rows[:16]
            assert rows_in(client, task, "test").tolist() == rows[16:]
        assert client.file.mean == pytest.approx([100 * months[0] + 7.5])
    told = "; ".join(caplog.messages)
    assert "2 tasks of ann, and their examples: 2025-01: 20; 2025-03: 20" in told
    assert "a client's first one is its task 0, whatever others have" in told


def test_a_task_may_be_a_session_or_what_a_column_says(tmp_path):
    """In the order in which they begin, whatever the files are called."""
    recorded(tmp_path / "data", "march.csv", {"ann": [3], "ben": [3]})
    recorded(tmp_path / "data", "older.csv", {"ann": [1, 2], "ben": [1, 2]})
    ann, _ = dealt(tmp_path / ".", tasks="session")
    assert [rows_in(ann, t, "train").min() for t in range(ann.num_tasks)] == [100, 300]
    (tmp_path / "cut").rename(tmp_path / "before")
    ann, _ = dealt(tmp_path, columns={"task": "phase"})
    assert [len(rows_in(ann, task, "train")) for task in range(ann.num_tasks)] == [32, 16]


def test_a_site_is_cut_into_its_own_months_and_a_later_source_is_one_task(tmp_path):
    """All persons of a site have its months; one of them came in the second."""
    recorded(tmp_path / "data", "a.csv", {"ann": [1, 2], "ben": [2]})
    data = {"name": "table", "tasks": "month", "columns": COLUMNS, "classes": ["a", "b"]}
    root = cut(tmp_path / "data", data, 0, 3, tmp_path / "cache")
    site = ClientData(root / "3")
    assert [rows_in(site, task, "train").tolist() for task in range(2)] == [
        [100 + n for n in range(16)], [200 + n for n in range(16) for _ in range(2)]
    ]  # fmt: skip
    recorded(tmp_path / "more", "a.csv", {"ann": [3, 4]})
    added = add_task(root, 3, tmp_path / "more", Data.model_validate(data))
    assert (added.task, added.examples) == (2, (32, 8))


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"data": {"name": "table", "tasks": "month"}}, r"\[data\] tasks = 'month' is for tables"),
        ({"data": {"name": "table", "tasks": "day", "columns": {"label": "y"}}},
         r"tasks = 'day' needs the column of dates: \[data.columns\] time"),
        ({"data": {"name": "table", "tasks": "day", "columns": {"time": "t", "task": "p"}}},
         r"does not go with \[data.columns\] task: leave one out"),
        ({"data": {"name": "table", "columns": {"task": "p", "split": "s"}}},
         r"split says what is for testing: leave out task"),
        ({"data": {"name": "table", "columns": {"task": "p"}}, "scenario": {"kind": "iid"}},
         r"\[data.columns\] task cuts the data of a natural client, or of a site: set"),
        ({"data": {"name": "table", "columns": {"task": "p"}},
          "scenario": {"kind": "natural", "tasks": 2}},
         r"\[data.columns\] task says what a task is: leave out tasks in \[scenario\]"),
    ],
)  # fmt: skip
def test_what_nothing_heeds_is_refused_in_a_line(tables, line):
    whole = {"net": {"name": "mlp"}, "method": {"name": "fedavg"}, **tables}
    with pytest.raises((ConfigError, ValueError), match=line):
        Experiment.model_validate(whole)


def test_the_data_say_how_many_tasks_there_are():
    tables = {"net": {"name": "mlp"}, "method": {"name": "fedavg"},
              "scenario": {"kind": "natural"},
              "data": {"name": "table", "columns": {"task": "p"}}}  # fmt: skip
    assert Experiment.model_validate(tables).most_tasks is None
    assert Experiment.model_validate({**tables, "data": {"name": "digits"}}).most_tasks == 1


def test_data_of_another_kind_have_no_months(tmp_path):
    data = Data(name="huggingface", columns=Columns(task="p"))
    with pytest.raises(ConfigError, match=r"\[data.columns\] task is for tables, and images with"):
        run_partition(data, Natural(kind="natural"), 2, 0, tmp_path / "cut")
