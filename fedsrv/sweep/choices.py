"""Which setting of each row of a sweep is the best, on validation parts alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import fmean

from fedmodels.errors import ConfigError
from fedmodels.resolution import parse_experiment
from fedsrv.sweep.plan import PlannedRun


def check_chooses(runs: Sequence[PlannedRun]) -> None:
    """Check that every run of a sweep keeps a part for validation.

    Raises:
        ConfigError: one does not.
    """
    for run in runs:
        data = parse_experiment(run.config).data
        if data is None or data.validation_share is None:
            raise ConfigError(
                f"{run.cell.title} has no validation part to choose by: give [data] "
                "validation_share"
            )


def choices(runs: Sequence[PlannedRun]) -> Iterator[str]:
    """Yield a line for each row: its best setting by the mean over seeds of validation scores.

    Args:
        runs: the finished ones.
    """
    for row in dict.fromkeys(run.cell.row for run in runs):
        mine = [run for run in runs if run.cell.row == row]
        settings = list(dict.fromkeys(run.cell.setting for run in mine))
        means = {each: _mean([r for r in mine if r.cell.setting == each]) for each in settings}
        known = {each: mean for each, mean in means.items() if mean is not None}
        if known:
            best = max(known, key=lambda each: known[each])  # of equal ones the first
            by = parse_experiment(mine[0].config).chosen_by
            yield (
                f"{row}: {best or 'its only setting'} is the best of {len(settings)} on "
                f"validation parts ({by} = {known[best]:.4f})"
            )


def _mean(runs: Sequence[PlannedRun]) -> float | None:
    """Return the mean over runs of the validation score of each one's best round."""
    found = []
    for run in runs:
        by = parse_experiment(run.config).chosen_by
        metrics = json.loads((run.directory / "summary.json").read_text("utf-8"))["metrics"]
        found.append(metrics.get(f"chosen_{by}"))
    scores = [score for score in found if score is not None]
    return fmean(scores) if scores and len(scores) == len(found) else None
