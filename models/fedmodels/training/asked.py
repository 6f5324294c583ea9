"""What a method says to a part of a run that the contract of all methods does not know.

The part keeps a table by method, which holds for classes that inherit from it as well. A class of
one's own says it by an attribute of that name. What a client keeps, and whether a run can hide what
``[privacy] announce`` says, is found out likewise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.numerics.randomness import started
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import root_of

HOOKS: Mapping[str, str] = {
    "global_weights": "serving.md",
    "local_view": "metrics.md",
    "reported": "metrics.md",
    "pictures": "metrics.md",
    "reads_singly": "robustness.md",
    "weighs_prototypes": "secure-aggregation.md",
    "tells_classes": "privacy.md",
    "takes_frozen": "nets.md",
    "takes_own_nets": "nets.md",
    "needs_server_data": "data.md",
    "learns_at_task_end": "streams.md",
    "grows_classes": "streams.md",
    "grown": "streams.md",
    "forgotten": "streams.md",
    "takes_targets": "data.md",
    "fits_for_scores": "differential-privacy.md",
    "looks_at_examples": "differential-privacy.md",
    "most_recalled": "differential-privacy.md",
    "is_server_optimizer": "configuration.md",
    "counts_all_clients": "api.md",
    "takes_means": "robustness.md",
}
"""Attributes that parts ask for, and the page under ``docs/`` of each."""


def asked(method: object, hook: str, table: Mapping[str, Any], default: Any) -> Any:
    """Return what a method, or its class, says to a part.

    Args:
        method: an instance or a class.
        hook: the attribute, one of :data:`HOOKS`.
        table: by name of a method, or of a class of its file; a function takes the method first.
        default: for every other method.
    """
    cls = method if isinstance(method, type) else type(method)
    for kind in cls.__mro__:
        if hook in vars(kind):
            return getattr(method, hook)
        if kind.__module__.startswith("fedmodels.methods"):
            for name in (kind.__name__, str(vars(kind).get("name"))):
                if name in table:
                    told = table[name]
                    return partial(told, method) if callable(told) else told
    return default


AHEAD: Mapping[str, Mapping[str, Sequence[str]]] = {
    "client": {"fedmlp": ["sklearn.cluster"]},
    "server": {name: ["sklearn.cluster"] for name in ("fedmlp", "fedali")},
}
"""What takes seconds to import and a half of a method needs in its rounds, by method's name."""


def load_ahead(name: str, half: str) -> None:
    """Import what a half of a method needs in its rounds: in a round others would wait for it."""
    for module in AHEAD[half].get(name, ()):
        import_module(module)


def reads_history(method: Method, experiment: Experiment) -> bool:
    """Tell whether a training may read the data of the tasks before its order's."""
    return experiment.accumulates or method.trains_on == "history"


def most_recalled(method: Method, experiment: Experiment) -> float:
    """Return how many examples of the tasks before its order's a training takes at most."""
    if not reads_history(method, experiment):
        return 0
    return float(asked(method, "most_recalled", {}, math.inf))


def keeps_state(method: Method, run: RunFacts) -> bool:
    """Tell whether clients keep a private state from one interaction to the next.

    They do where a method adds to it after local training, or begins with private weights.
    """
    adds = type(method).after_local is not root_of(method).after_local
    if adds:
        return True
    with started(0):
        return bool([*method.init_client(run, 0).by_key()])


def bare_views(method: Method, run: RunFacts) -> frozenset[str]:
    """Return the views of models that noise on uploads does not cover.

    Such a model was trained on the client's examples and never left it: after local training, with
    a private state, or where scoring trains it.
    """
    if fits_for_scores(method):
        return frozenset({"global", "after_local", "after_downlink"})
    return frozenset(
        {"after_local", "after_downlink"} if keeps_state(method, run) else {"after_local"}
    )


def reported(method: Method, run: RunFacts) -> frozenset[str]:
    """Return the names that clients may put into ``ctx.metrics``: of a function ``reported``."""
    found: frozenset[str] = asked(method, "reported", {}, lambda run: frozenset())(run)
    return found


def local_view(method: Method) -> str:
    """Return the view that ``a_loc`` is taken from; a method may name another as ``local_view``.

    ``global`` says that a client keeps no model of its own: there is no ``a_loc`` of what it holds,
    and ``a_sel`` is everyone's model on the data of the cohort.
    """
    last = "after_downlink" if "after_downlink" in method.views else "after_local"
    return str(asked(method, "local_view", {}, last))


def fits_for_scores(method: Method) -> bool:
    """Tell whether a client's own model has trained on the open task, whatever it is scored on."""
    return bool(asked(method, "fits_for_scores", {}, False))


def global_weights(method: Method, common: Bundle) -> Weights:
    """Return the global model's weights, of the common part of a payload or of the state."""
    found: Weights = asked(method, "global_weights", {}, lambda common: common.weights)(common)
    return found


TELLS = {"pfedgrp": True, "fedavg-replay": True}
"""Methods whose server half reads ``ctx.labels``, or whose clients tell something of each class."""


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


def needs_server_data(method: Method | type[Method]) -> bool:
    """Tell whether a server half trains on examples; a class of one's own says it by that name."""
    return bool(asked(method, "needs_server_data", {}, False))
