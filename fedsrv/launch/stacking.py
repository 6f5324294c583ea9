"""Which clients of a GPU could train as one step: what a launch proposes, or does if asked to.

It is not done unasked: stacked steps round otherwise, and the layout of hosts and crashes would
change the bits of a run (docs/decisions/099-hosts-and-gpus.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from fedmodels.config.experiment import Experiment
from fedmodels.config_file import parse_experiment
from fedmodels.errors import FedtideError
from fedmodels.methods import make
from fedmodels.resolution import experiment_of
from fedmodels.training.run import RunFacts
from fedmodels.training.stack_trial import check_together
from fedsrv.launch.given_data import description_of

AT_LEAST, AT_MOST = 5, 32
"""Clients of a step."""
SMALL = 1_000_000
"""Elements of a net whose steps are calls more than arithmetic; ``resnet20`` has 272 thousand."""


def could_train_together(experiment: Experiment, data: Path, cohort: int, gpus: int) -> int:
    """Return how many clients could make one step on each GPU; 1 where that is of no use.

    The rule: five or more clients a GPU train in a round, the net has at most a million elements,
    and the trial before a run takes net and method for ones that can.

    Args:
        experiment: the run's.
        data: the partition.
        cohort: how many clients train in a round.
        gpus: over how many GPUs they are spread.
    """
    number = min(AT_MOST, math.ceil(cohort / max(1, gpus)))
    if not gpus or number < AT_LEAST or experiment.training.together > 1:
        return 1
    try:
        run = RunFacts(trained_together(experiment, number), description_of(data).problem)
        if sum(form.numel() for form in run.forms.values()) > SMALL:
            return 1
        table = run.experiment.method
        check_together(make(table.name, **table.hyper_parameters()), run)
    except FedtideError:
        return 1
    return number


def proposed(
    experiment: Experiment,
    data: Path,
    cohort: int,
    gpus: int,
    say: Callable[[str], None],
    *,
    wanted: bool,
) -> Experiment:
    """Return an experiment whose clients train as one step on each GPU, if that is ``wanted``.

    Where it is of no use, or nobody wants it, the experiment stays. ``say`` is told which.
    """
    number = could_train_together(experiment, data, cohort, gpus)
    if number > 1 and wanted:
        say(
            f"clients train together, {number} as one step on a GPU ([training] together): "
            "the last bits depend on who is in a step, which a crash may change"
        )
        return trained_together(experiment, number)
    if number > 1:
        say(
            "note: clients train in turn, and the run's bits are those of any layout; "
            f"--together makes one step of {number} on a GPU, and a crash may then change the "
            "last bits"
        )
    elif wanted and experiment.training.together == 1:
        say(
            "clients train in turn: a step of several is for a GPU that has five of a round "
            "or more, for a small net whose method can"
        )
    return experiment


def trained_together(experiment: Experiment, number: int) -> Experiment:
    """Return an experiment in which so many clients make one step.

    Raises:
        ConfigError: something of it goes with clients in turn alone.
    """
    tables = experiment.to_dict()
    tables["training"] = {**tables.get("training", {}), "together": number}
    return experiment_of(tables)


def as_it_began(experiment: Experiment, run: Path) -> Experiment:
    """Return an experiment with as many clients a step as its run has begun with."""
    try:
        before = parse_experiment((run / "config.toml").read_text("utf-8"), str(run))
    except (OSError, UnicodeDecodeError, FedtideError):
        return experiment  # whoever resumes the run looks again
    return trained_together(experiment, before.training.together)
