"""Whether the rows of a sweep compare like with like, and a line that says in what they do not.

A sweep with the table ``differs`` is held to it: what its rows differ in beside their methods is
there with the reason, or the sweep is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.config_file import parse_experiment
from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.training.stepped import Stepped
from fedplugins.studies.plan import CONTRACT, PlannedRun, Sweep

DEFAULTS = "defaults"
FEW = 3
"""Different numbers of rows that the line gives; of more, the sweep's file has them."""


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
        values = {row: _value(key, sweep.methods[row], rows[row]) for row in rows}
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
    """Return in words what a row has of a part of the contract."""
    training, schedule = experiment.training, experiment.schedule
    if key == "weighting":
        return str(getattr(experiment.method, "weighting", "their own rule"))
    if key == "steps":
        own = make(experiment.method.name, **experiment.method.hyper_parameters())
        steps = own.steps_per_batch if isinstance(own, Stepped) else 1
        return f"{steps} a batch of {training.batch_size}"
    if key == "epochs":
        return f"{schedule.rounds} × {_length(experiment)}"
    numbers = [word for word in method.split()[1:] if _is_number(word.partition("=")[2])]
    return " ".join(numbers) or DEFAULTS


def _length(experiment: Experiment) -> str:
    """Say how long an interaction trains: by its method, or by the config.

    A method of one's own may ask more of its context than the config.
    """
    method: Any = make(experiment.method.name, **experiment.method.hyper_parameters())
    context = SimpleNamespace(run=SimpleNamespace(experiment=experiment), view="")
    try:
        return str(method.training_length(context))
    except AttributeError:
        return str(experiment.training.local_epochs)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
