"""What a client keeps, reports and holds of its own: found out, or asked of a few methods."""

from __future__ import annotations

from fedmodels.asked import asked
from fedmodels.numerics.randomness import started
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import root_of


def keeps_state(method: Method, run: RunFacts) -> bool:
    """Tell whether clients keep a private state from one interaction to the next.

    They do where a method adds to it after local training, or begins with private weights.
    """
    adds = type(method).after_local is not root_of(method).after_local
    if adds:
        return True
    with started(0):
        return bool([*method.init_client(run, 0).by_key()])


def reported(method: Method, run: RunFacts) -> frozenset[str]:
    """Return the names that clients may put into ``ctx.metrics``: of a function ``reported``."""
    found: frozenset[str] = asked(method, "reported", {}, lambda run: frozenset())(run)
    return found


def local_view(method: Method) -> str:
    """Return the view that ``a_loc`` is taken from; a method may name another as ``local_view``.

    ``global`` says that a client has no model of its own to score: there is no ``a_loc``, and
    ``a_sel`` is everyone's model on the data of the cohort.
    """
    last = "after_downlink" if "after_downlink" in method.views else "after_local"
    return str(asked(method, "local_view", {}, last))


def global_weights(method: Method, common: Bundle) -> Weights:
    """Return the global model's weights, of the common part of a payload or of the state."""
    found: Weights = asked(method, "global_weights", {}, lambda common: common.weights)(common)
    return found
