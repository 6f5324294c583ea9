"""Whether a method can do without exact class counts, as ``[privacy] announce`` may ask."""

from __future__ import annotations

from fedmodels.asked import asked
from fedmodels.errors import ConfigError
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts

TELLS = dict.fromkeys(("af-fcl", "fedcil", "pfedgrp", "fedavg-replay", "pfedgraph-replay"), True)
"""Methods whose server half reads ``ctx.labels``, or whose clients report figures by class."""


def check_announcement(method: Method, run: RunFacts) -> None:
    """Check that a run hides what its ``[privacy] announce`` says.

    Raises:
        ConfigError: the method sends or reads class counts.
    """
    how = run.experiment.announced
    if how != "exact" and (why := _reason(method, run)):
        raise ConfigError(f'[privacy] announce = "{how}" cannot be kept: {why}')


def _reason(method: Method, run: RunFacts) -> str:
    """Return why the run tells or reads what ``announce`` hides; empty if it does not."""
    spec, how = method.upload_spec(run), run.experiment.announced
    known, none = {**spec.required, **spec.optional}, how == "none"
    for key, each in known.items():
        counts = key.startswith("histogram/") or key.endswith("/counts")
        labels = none and (key.endswith("/labels") or key.startswith("generators/"))
        if (counts or labels) and each.shape != (0,):
            return f"uploads of {method.name} hold {key}"
    if none and asked(method, "tells_classes", TELLS, False):
        return f"{method.name} has to tell which classes a client has"
    return ""
