"""A method's functions beside local training, called with random numbers of the run's seed.

Torch's default generators are seeded anew for each call, so that a function that draws from them
comes to the same bits in every run, and after a crash.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache

from fedmodels.config.combinations import part_at
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.facts.position import Interaction
from fedmodels.numerics.metric_names import is_written_by_runs
from fedmodels.numerics.randomness import derive_seed, started
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.asked import asked
from fedmodels.training.contexts import Metrics, ServerContext, ServerState
from fedmodels.training.method import Method, Payload
from fedmodels.training.returned import check_finished, check_sent
from fedmodels.training.run import RunFacts

log = logging.getLogger(__name__)
SINGLY = {
    "pfedgrp": "each client's model is mixed from the models of others",
    "fedali": "k-means clusters the prototypes of every client",
    "MeanPrototypes": "",
}
WHOLE = dict.fromkeys(("fedali", "pfedgrp", "fedavg-replay"), False)
"""Methods that train nets whole: they send or generate what stands for all of a net."""


def learns_at_task_end(method: Method) -> bool:
    """Tell whether the last round of a task is another one: its half reads ``ctx.ends_task``."""
    return bool(asked(method, "learns_at_task_end", {}, False))


def takes_frozen(method: Method | type[Method]) -> bool:
    """Tell whether parts of the net may be frozen: they are no weights, and stay as they are."""
    return bool(asked(method, "takes_frozen", WHOLE, True))


def check_frozen(method: Method, run: RunFacts) -> None:
    """Check that a method takes a frozen part of the net; raise ConfigError."""
    if run.frozen_weights and not takes_frozen(method):
        raise ConfigError(
            f"method {method.name!r} trains the whole net, and a part of [net] "
            f"{run.experiment.net.name!r} is frozen here: leave out frozen and adapters, or take a "
            "method that takes them, such as fedavg"
        )


def init_server(method: Method, run: RunFacts) -> ServerState:
    """Return the state before the first interaction; ConfigError if a frozen part is trained."""
    check_frozen(method, run)
    with _seeded_for(run, "init_server", Interaction(0)):
        return method.init_server(run)


def broadcast(method: Method, ctx: ServerContext, state: ServerState) -> Payload:
    """Return the payload of an interaction; ConfigError if clients would refuse it."""
    with _seeded_for(ctx.run, "evaluation" if ctx.scores else "broadcast", ctx.interaction):
        common, personal = method.broadcast(ctx, state)
    check_sent(method, ctx.run, common, personal)
    return common, personal


def evaluation(method: Method, ctx: ServerContext, state: ServerState) -> Payload:
    """Return what clients need to score their models: a payload for everybody."""
    everybody = range(ctx.run.experiment.schedule.clients)
    return broadcast(method, replace(ctx, cohort=everybody, scores=True), state)


def reduce(
    method: Method, ctx: ServerContext, state: ServerState, uploads: Uploads
) -> tuple[ServerState, Metrics]:
    """Aggregate and finish.

    Raises:
        ConfigError: ``finish`` returns no state and metrics, or reports what the run writes itself;
            or the run has another rule than the mean, and the method took no mean.
    """
    ctx = replace(ctx, before=state)
    with _seeded_for(ctx.run, "reduce", ctx.interaction):
        reduced = method.aggregate(ctx, state, uploads)
        if ctx.run.experiment.server_optimizer is not None and reduced is not state:
            stepped = part_at("fedmodels.training.server_optimizer:stepped")
            reduced = stepped(method, ctx, state, reduced)
        found = method.finish(ctx, reduced, uploads)
    if uploads.is_ruled and not uploads.was_asked:
        raise not_by_rule(method)
    after, metrics = check_finished(method, found)
    if reduced.optimizer is not after.optimizer:  # methods make states without it
        after = replace(after, optimizer=reduced.optimizer)
    for name, value in metrics.items():
        if is_written_by_runs(name):
            raise ConfigError(
                f"finish of {type(method).__name__} reports {name!r}, which every run writes "
                "itself: give it another name"
            )
        if isinstance(value, float) and not math.isfinite(value):
            _warn_once(
                f"note: finish of {type(method).__name__} reports {name!r} as {value}; records "
                "leave out what is not finite"
            )
    return after, metrics


def takes_means(method: Method) -> bool:
    """Tell whether a server half takes means, which another rule can stand for.

    Of a method of one's own the first round shows it: :func:`reduce` refuses the rule then.
    """
    return bool(asked(method, "takes_means", {"centralized": False, "local": False}, True))


def ruled(experiment: Experiment, method: Method) -> Experiment:
    """Return an experiment with a rule in place of the mean; ConfigError if the method has none."""
    if not takes_means(method):
        raise not_by_rule(method)
    return experiment


def not_by_rule(method: Method) -> ConfigError:
    """Return the refusal of another rule than the mean, where a method takes no mean."""
    return ConfigError(
        f"[server] reduce is for methods that take the mean of their uploads; {method.name} takes "
        "none, so no rule can take its place: leave it out"
    )


def as_uploads(method: Method, sent: Mapping[int, Bundle]) -> Uploads:
    """Return uploads as ``aggregate`` and ``finish`` get them, where the rule is the mean."""
    return Uploads(sent, method.count, method.reduction)


def init_client(method: Method, run: RunFacts, client: int) -> Bundle:
    """Return the private state of a client before its first order."""
    with _seeded_for(run, f"init_client/{client}", Interaction(0)):
        return method.init_client(run, client)


def reads_singly(method: Method) -> str:
    """Return what a server half makes of single uploads, beside means; empty if nothing.

    ``[server] reduce`` has no effect on that. A method of one's own says it by that name.
    """
    return str(asked(method, "reads_singly", SINGLY, ""))


@cache
def _warn_once(line: str) -> None:
    log.warning("%s", line)


def _seeded_for(run: RunFacts, hook: str, interaction: Interaction) -> AbstractContextManager[None]:
    # Server halves train with threads that build nets: they must not wait for this one.
    return started(derive_seed(run.experiment.seed, hook, interaction, "method"))
