"""The run that forgetting is measured against (``[evaluate] reference``): AFM of pFedGRP."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import DataError
from fedmodels.numerics.metrics import average_forgetting_measure
from fedsrv.engine.plan import Plan
from fedsrv.engine.schedule import Step, is_scored
from fedsrv.engine.server_part import ServerPart
from fedsrv.engine.summary import Figures
from fedsrv.state.record import Record


class Reference(ServerPart):
    """Compares the IAA of a run with that of its reference."""

    @classmethod
    def check(cls, experiment: Experiment, *, certified: bool) -> None:
        """Refuse a reference that is no run, or has no series; raise DataError."""
        iaa_series(Path(experiment.evaluate.reference or ""))

    def gathered(self, plan: Plan) -> None:
        """Refuse a reference that scored other rounds than this run will; raise DataError."""
        check_reference(self.experiment, plan.steps)

    def figures(self) -> Mapping[str, Figures]:
        """Return what computes AFM of a run that has ended."""
        return {"afm": partial(afm_of, experiment=self.experiment)}


def afm_of(records: Sequence[Record], experiment: Experiment) -> dict[str, float]:
    """Return AFM against the reference run, where there is one and this run has a series of IAA.

    Raises:
        DataError: the reference scored other rounds, or has gone.
    """
    run, named = _iaa_by_interaction(records), experiment.evaluate.reference
    if not named or not run:
        return {}
    other = iaa_series(Path(named))
    _check_same_rounds(run, other, Path(named))
    return {"afm": average_forgetting_measure(list(run.values()), list(other.values()))}


def check_reference(experiment: Experiment, steps: Sequence[Step]) -> None:
    """Check that the reference scored the rounds that this run will score; or raise DataError."""
    if not experiment.evaluate.reference:
        return
    reference = Path(experiment.evaluate.reference)
    every = experiment.evaluate.every  # a round has its IAA after its last task
    due = [s.interaction for s in steps if s.ends_round and is_scored(steps, s, every)]
    _check_same_rounds(due, iaa_series(reference), reference)


def _check_same_rounds(run: Collection[int], other: Mapping[int, float], reference: Path) -> None:
    if set(run) != other.keys():
        raise DataError(
            f"evaluate.reference: {reference} scored {len(other)} rounds, this run {len(run)}, and "
            "not after the same interactions; give both the same rounds and evaluate.every"
        )


def _iaa_by_interaction(records: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    scored = (record for record in records if "iaa" in record["metrics"])
    return {record["interaction"]: float(record["metrics"]["iaa"]) for record in scored}


def iaa_series(run: Path) -> dict[int, float]:
    """Return the IAA of a reference run by interaction; DataError if it has none."""
    path = run / "rounds.jsonl"
    try:
        series = _iaa_by_interaction(map(json.loads, path.read_text("utf-8").splitlines()))
    except OSError as error:
        raise DataError(
            f"evaluate.reference: {run} is no run directory ({error.strerror}); run the "
            "Centralized reference first"
        ) from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise DataError(
            f"evaluate.reference: {path} is damaged: a line of it is no record of a round"
        ) from None
    if not series:
        raise DataError(f"evaluate.reference: the run {run} has no IAA series")
    return series
