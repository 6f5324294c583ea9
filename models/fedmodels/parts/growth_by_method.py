"""What single methods keep by class or by client in a way that shapes do not tell.

Other tensors of a state grow by what their shapes say (``class_growth.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedmodels.numerics.algebra import padded
from fedmodels.techniques import levels
from fedmodels.techniques.collaboration import ROWS
from fedmodels.techniques.moments import grown_moments
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.roles import part_of, under
from fedmodels.training.asked import asked
from fedmodels.training.contexts import ServerState
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts

Tensors = Mapping[str, Tensor]
NEIGHBOURS = "neighbours"
"""What clients of PFedGraph are given of others."""
LABELLED = "fc.weight"
"""The layer of FedCIL's generators that has a column for each label."""


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


def _af_fcl(method: Any, run: RunFacts, state: Bundle) -> Tensors:
    net, flow, held = run.make_net(), method._flow(run), state.weights
    optimised = {"net": net, "head": net.head, "flow": flow}
    found = grown_moments(held, {k: [*part.parameters()] for k, part in optimised.items()})
    if "before" in held:
        found = {**found, "before": padded(held["before"], (run.problem.num_classes,))}
    return under("weights", found)


def _fedcil(method: Any, run: RunFacts, state: Bundle) -> Tensors:
    source, generator = method._fresh(run)
    critic = [*run.make_net().parameters(), *source.parameters()]
    optimised = {"critic": critic, "generator": [*generator.parameters()]}
    found = dict(under("weights", grown_moments(state.weights, optimised)))
    label, first = run.problem.num_classes - 1, generator.state_dict()[LABELLED]
    for key, tensor in state.by_key().items():
        if key.split("/")[1] in ("generator", "now", "last"):
            found[key] = tensor
        if found.get(key) is tensor and key.endswith(f"/{LABELLED}"):
            found[key] = tensor.clone()  # the coordinate of this label was noise up to now
            found[key][:, label] = first[:, label]
    return found


def _pfedgraph(method: Any, run: RunFacts, state: Bundle) -> Tensors:
    near = part_of(state.weights, NEIGHBOURS)  # they say nothing of the class
    kept = under(NEIGHBOURS, {key: padded(t, run.forms[key].shape) for key, t in near.items()})
    rows = {key: t for key, t in state.weights.items() if key == ROWS}  # of clients
    return under("weights", {**kept, **rows})


def _fedmlp(method: Any, run: RunFacts, state: Bundle) -> Tensors:
    return under("weights", levels.grown_levels(state.weights, run.problem.num_classes))


def _fedmlp_counts(method: Any, state: ServerState, clients: Collection[int]) -> ServerState:
    return replace(state, own=Bundle(levels.counts_of_others(state.own.weights, clients)))


GROWN = {"af-fcl": _af_fcl, "fedcil": _fedcil, "pfedgraph": _pfedgraph, "fedmlp": _fedmlp}
FORGOTTEN = {"fedmlp": _fedmlp_counts}
