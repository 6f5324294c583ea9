"""Which methods train on examples of the server's own."""

from __future__ import annotations

from fedmodels.config.experiment import Experiment
from fedmodels.methods import method_class
from fedmodels.training.asked import asked
from fedmodels.training.method import Method


def needs_server_data(method: Method | type[Method]) -> bool:
    """Tell whether a server half trains on examples; a class of one's own says it by that name."""
    return bool(asked(method, "needs_server_data", {"fedic": True}, False))


def trains_at_server(experiment: Experiment) -> bool:
    """Tell whether the server half of an experiment's method trains on examples."""
    return needs_server_data(method_class(experiment.method.name))
