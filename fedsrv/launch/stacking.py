"""Which clients of a GPU could train as one step: what a launch then proposes.

It is not done unasked: stacked steps round otherwise, and the layout of hosts and crashes would
change the bits of a run (docs/decisions/099-hosts-by-gpus.md).
"""

from __future__ import annotations

import math
from pathlib import Path

from fedmodels.config.experiment import Experiment
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
    tables = experiment.to_dict()
    tables["training"] = {**tables.get("training", {}), "together": number}
    try:
        run = RunFacts(experiment_of(tables), description_of(data).problem)
        if sum(form.numel() for form in run.forms.values()) > SMALL:
            return 1
        table = run.experiment.method
        check_together(make(table.name, **table.hyper_parameters()), run)
    except FedtideError:
        return 1
    return number
