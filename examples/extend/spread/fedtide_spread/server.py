"""The half at the coordinator, and the panel of reports and of the live page."""

from collections.abc import Iterator, Mapping, Sequence

from fedmodels.console.charts import Chart, Spread
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.server_part import CurrentInteraction, ServerPart
from fedsrv.engine.summary import Figures
from fedsrv.state.record import Record
from fedsrv.state.run_record import RunRecord


class LossSpread(ServerPart):
    """Records the spread of each round, and tells the last one of a run."""

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put the spread of an interaction into its record."""
        losses = [row["loss"] for row in record["clients"].values() if "loss" in row]
        if losses:
            record["metrics"]["loss_spread"] = max(losses) - min(losses)

    def figures(self) -> Mapping[str, Figures]:
        """Return what computes the figure of the summary."""
        return {"last spread of losses": last}


def last(records: Sequence[Record]) -> dict[str, float]:
    """Return the spread of the last record that has one."""
    found = [r["metrics"]["loss_spread"] for r in records if "loss_spread" in r["metrics"]]
    return {"loss_spread_last": found[-1]} if found else {}


def panels(run: RunRecord) -> Iterator[Chart]:
    """Yield a line of the spread over the interactions of a run."""
    spreads = {
        at: Spread(metrics["loss_spread"])
        for at, row in enumerate(run.rows, 1)
        if isinstance(metrics := row.get("metrics"), dict) and "loss_spread" in metrics
    }
    if spreads:
        yield Chart("spread of losses", "lines", {"run": spreads}, "interaction", "loss_spread")
