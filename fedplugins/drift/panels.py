"""What a report and the live page show of drift."""

from __future__ import annotations

from collections.abc import Iterator

from fedmodels.console.charts import Chart
from fedmodels.numerics.data_drift import DRIFT_PARTS
from fedsrv.report.panels import cells_of
from fedsrv.report.quantities import by_client
from fedsrv.state.run_record import RunRecord, number, table


def of_drift(run: RunRecord) -> Iterator[Chart]:
    """Yield how far inputs and predictions of each client moved from those of earlier tasks."""
    for part in DRIFT_PARTS:
        text = f"how far {part}s moved from earlier tasks"
        names = run.client_names
        cells = by_client(run, f"{part}_drift")
        yield cells_of(text, cells, "interaction", "client", y_names=names)


def what_moved(run: RunRecord) -> list[str]:
    """Return a line for each alarm of drift, the newest first."""
    alarms = [
        (int(number(row.get("round"), index)) + 1, table(alarm))
        for index, row in enumerate(run.rows)
        if isinstance(several := row.get("drift"), list)
        for alarm in several
    ]
    return [
        f"round {at}, client {run.client_names.get(int(client), int(client))}, "
        f"task {int(task)}: {line}"
        for at, alarm in reversed(alarms)
        if (client := number(alarm.get("client"))) is not None
        and (task := number(alarm.get("task"))) is not None
        and isinstance(line := alarm.get("line"), str)
    ]
