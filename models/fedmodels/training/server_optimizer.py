"""The server's step along what the clients' mean would change.

Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2, with its symbols:

    Delta_t   mean - before      m_t, v_t   ``m/…``, ``v/…`` of the state
    eta       lr                 beta_1, beta_2, tau

FedAvgM is Hsu et al., 2019, section 4.3: m <- beta_1 m + Delta. Statistics of batch normalisation
are the clients' mean. There is no correction of the bias of m and v, as in the paper.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedmodels.config.training import ServerOptimizer
from fedmodels.errors import ConfigError
from fedmodels.numerics.algebra import padded
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.asked import asked, global_weights
from fedmodels.training.contexts import ServerContext, ServerState
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts


def stepped(
    method: Method, ctx: ServerContext, before: ServerState, after: ServerState
) -> ServerState:
    """Return the state after ``aggregate`` with a step of the server's optimiser."""
    settings = ctx.run.experiment.server_optimizer
    assert settings is not None, "the run has an optimiser"
    old, weights, kept = before.optimizer.weights, dict(after.common.weights), dict[str, Tensor]()
    for key in trained_keys(method, ctx.run, after.common):
        x = before.common.weights.get(key)
        if x is None:  # it has just begun to be shared
            continue
        m, v = old.get(f"m/{key}", torch.zeros_like(x)), old.get(f"v/{key}")
        if after.common.weights[key].data_ptr() == x.data_ptr():  # nobody trained it: it stays
            kept |= {k: old[k] for k in (f"m/{key}", f"v/{key}") if k in old}
            continue
        delta = after.common.weights[key] - x
        step, m, v = _step(settings, delta, m, v)
        weights[key] = x + settings.lr * step
        kept |= {f"m/{key}": m} if v is None else {f"m/{key}": m, f"v/{key}": v}
    common = replace(after.common, weights=weights)
    return replace(after, common=common, optimizer=Bundle(weights=kept))


def _step(
    settings: ServerOptimizer, delta: Tensor, m: Tensor, v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a step, and the moments that follow."""
    beta_1, beta_2, tau = settings.beta_1, settings.beta_2, settings.tau
    if settings.name == "fedavgm":
        m = beta_1 * m + delta
        return m, m, None
    m = beta_1 * m + (1 - beta_1) * delta
    square = delta.square()
    v = torch.full_like(m, tau**2) if v is None else v  # v_{-1}
    if settings.name == "fedadagrad":
        v = v + square
    elif settings.name == "fedyogi":
        v = v - (1 - beta_2) * square * (v - square).sign()
    else:
        v = beta_2 * v + (1 - beta_2) * square
    return m / (v.sqrt() + tau), m, v


def grown_moments(run: RunFacts, moments: Bundle, common: Bundle) -> Bundle:
    """Return moments in which classes that came begin as all did: m with 0, v with tau squared."""
    found = dict[str, Tensor]()
    for name, kept in moments.weights.items():
        kind, _, key = name.partition("/")
        settings = run.experiment.server_optimizer
        first = settings.tau**2 if settings is not None and kind == "v" else 0.0
        found[name] = padded(kept, common.weights[key].shape, first)
    return replace(moments, weights=found)


def trained_keys(method: Method, run: RunFacts, common: Bundle) -> list[str]:
    """Return the names of the global model's weights that are parameters: of one net or several."""
    known, names = frozenset(run.parameters), global_weights(method, common).keys()
    found = sorted(names & common.weights.keys())
    return [key for key in found if key in known or key.partition("/")[2] in known]


def check_server_optimizer(method: Method, run: RunFacts) -> None:
    """Check that the server has a mean of weights to step along.

    Raises:
        ConfigError: it sends none, or steps along it by the method's own optimiser.
    """
    if asked(method, "is_server_optimizer", {}, False):
        raise ConfigError(
            f"[server_optimizer] would step before the server of {method.name!r}, which is an "
            "optimiser itself: leave it out"
        )
    common, nothing = method.payload_spec(run)[0], torch.empty(0)
    keys = [key for key in (*common.required, *common.optional) if key.startswith("weights/")]
    shared = Bundle({key.removeprefix("weights/"): nothing for key in keys})
    if not trained_keys(method, run, shared):
        raise ConfigError(
            "[server_optimizer] needs a method whose server averages weights; the clients of "
            f"{run.experiment.method.name!r} share none: leave it out"
        )
