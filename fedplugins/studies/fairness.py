"""Whether the rows of a sweep compare like with like, and a line that says in what they do not.

A sweep with the table ``differs`` is held to it: what its rows differ in beside their methods is
there with the reason, or the sweep is refused. What each row has is read from its config and from
the phases of its method, so the reasons name no numbers: epochs are those that a part of the net
trains for, and a row that trains on more than the data of its task says so beside its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.facts.config_file import parse_experiment
from fedmodels.methods import make
from fedmodels.methods.local import Local
from fedmodels.training.stepped import Phase, Stepped
from fedplugins.studies.plan import CONTRACT, PlannedRun, Sweep

DEFAULTS = "defaults"
FEW = 3
"""Different numbers of rows that the line gives; of more, the sweep's file has them."""
BEYOND_THE_TASK = {
    "history": ", of all tasks so far",
    "memory": ", and of what stands in for earlier tasks",
    "replay": ", and of replayed examples",
}
"""What clients train on beside the data of their task, by the method's ``trains_on``."""


def fairness(sweep: Sweep, runs: list[PlannedRun]) -> str:
    """Return in what rows differ, and why; empty where the sweep has no table ``differs``.

    Raises:
        ConfigError: they differ in something that the table does not have.
    """
    if sweep.differs is None:
        return ""
    found = dict(_found(sweep, {run.cell.row: parse_experiment(run.config) for run in runs}))
    for key in CONTRACT:
        if key in found and key not in sweep.differs:
            raise ConfigError(
                f"rows differ in {key}: {found[key]}. Make them equal, or say why they may in "
                f'[differs] {key} = "…"'
            )
    said = [f"in {key}: {found[key]} ({sweep.differs[key]})" for key in CONTRACT if key in found]
    equal = ", ".join(key for key in CONTRACT if key not in found) or "nothing"
    return " ".join(
        f"{part}." for part in [*(f"Rows differ {part}" for part in said), f"Equal: {equal}"]
    )


def _found(sweep: Sweep, rows: Mapping[str, Experiment]) -> Iterator[tuple[str, str]]:
    """Yield what rows differ in, and the rows of each value; those of the commonest are others."""
    for key in CONTRACT:
        found = {row: _value(key, sweep.methods[row], rows[row]) for row in rows}
        values = {row: value for row, value in found.items() if value}
        if len(set(values.values())) > 1:
            brief = key == "tuning" and len(set(values.values())) > FEW
            groups: dict[str, list[str]] = {}
            for row, value in values.items():
                word = "own numbers" if brief and value != DEFAULTS else value
                groups.setdefault(word, []).append(row)
            *few, (most, others) = sorted(groups.items(), key=lambda group: len(group[1]))
            named = [f"{value} with {' / '.join(of)}" for value, of in few]
            yield (
                key,
                "; ".join(
                    [*named, f"{most} with {others[0] if len(others) == 1 else 'the others'}"]
                ),
            )


def _value(key: str, method: str, experiment: Experiment) -> str:
    """Return in words what a row has of a part of the contract; "" where it has no such part."""
    training, schedule = experiment.training, experiment.schedule
    own = make(experiment.method.name, **experiment.method.hyper_parameters())
    if key == "weighting":
        shares = type(own).upload_spec is not Local.upload_spec
        return str(getattr(experiment.method, "weighting", "their own rule")) if shares else ""
    if key == "steps":
        steps = own.steps_per_batch if isinstance(own, Stepped) else 1
        more = "" if experiment.accumulates else BEYOND_THE_TASK.get(own.trains_on, "")
        return f"{steps} a batch of {training.batch_size}{more}"
    if key == "epochs":
        return f"{schedule.rounds} × {_length(own, experiment)}"
    numbers = [word for word in method.split()[1:] if _is_number(word.partition("=")[2])]
    return " ".join(numbers) or DEFAULTS


def _length(method: Any, experiment: Experiment) -> str:
    """Say how long an interaction trains: by its method, or by the config.

    A method of one's own may ask more of its context than the config.
    """
    context = SimpleNamespace(run=SimpleNamespace(experiment=experiment), view="")
    try:
        phases = method.phases(context)
        if type(method).training_length is Stepped.training_length and len(phases) > 1:
            parts = (f"{phase.epochs} of {_parts(phase)}" for phase in phases)
            return f"({', '.join(parts)})"
        return str(method.training_length(context))
    except AttributeError:
        return str(experiment.training.local_epochs)


def _parts(phase: Phase) -> str:
    """Return the parts of the net that train in a phase."""
    return " and ".join(prefix.strip("/") or "all" for prefix in phase.trains)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
