"""What single methods keep by class or by client in a way that shapes do not tell.

Other tensors of a state grow by what their shapes say (``class_growth.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedmodels.techniques import levels
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.roles import under
from fedmodels.training.asked import asked
from fedmodels.training.contexts import ServerState
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts

Tensors = Mapping[str, Tensor]


def grown(method: Method, run: RunFacts, state: Bundle) -> Tensors:
    """Return tensors of a state with room for one class more, by the flat keys of a bundle.

    Only the tensors whose shapes do not tell how they grow. A method of one's own has them in a
    function ``grown(run, state)``.

    Args:
        method: the run's.
        run: the facts with that class.
        state: a client's, or a part of the server's.
    """
    found: Tensors = asked(method, "grown", GROWN, lambda run, state: {})(run, state)
    return found


def forgotten(method: Method, state: ServerState, clients: Collection[int]) -> ServerState:
    """Return a state without what it holds of these clients alone; they left an open run.

    A method of one's own that keeps more than ``state.clients`` of them has a function
    ``forgotten(state, clients)``, which is given a state without those parts.
    """
    kept = {c: part for c, part in state.clients.items() if c not in clients}
    state = replace(state, clients=kept)
    found: ServerState = asked(method, "forgotten", FORGOTTEN, lambda state, clients: state)(
        state, clients
    )
    return found


def _fedmlp(method: Any, run: RunFacts, state: Bundle) -> Tensors:
    return under("weights", levels.grown_levels(state.weights, run.problem.num_classes))


def _fedmlp_counts(method: Any, state: ServerState, clients: Collection[int]) -> ServerState:
    return replace(state, own=Bundle(levels.counts_of_others(state.own.weights, clients)))


GROWN = {"fedmlp": _fedmlp}
FORGOTTEN = {"fedmlp": _fedmlp_counts}
