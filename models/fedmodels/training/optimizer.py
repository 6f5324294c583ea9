"""The optimiser of local training: any of torch by its name, a schedule of its rate, and clipping.

The factor of the learning rate is a function of the round or of the epoch alone, so that a run that
goes on in the middle of a schedule comes to the same bits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedmodels.config.experiment import Experiment
from fedmodels.config.training import LrSchedule, Training
from fedmodels.errors import ConfigError
from fedmodels.numerics.optimizers import kind_of
from fedmodels.training.contexts import ClientContext

FUSED = ("sgd", "adam", "adamw")
IMPLEMENTATIONS = ("capturable", "differentiable", "foreach", "fused")
"""Arguments of torch's optimisers that choose how a step is computed, and not which step it is."""


def optimizer_of(
    groups: list[dict[str, Any]], ctx: ClientContext, lr: float | None = None
) -> torch.optim.Optimizer:
    """Return the run's optimiser over parameter groups; its state lives for one phase.

    The rate ``lr`` is that before the schedule; by default the run's.
    """
    training = ctx.run.experiment.training
    ctx.asked.add("optimizer")
    optimizer = _plain(groups, training, training.lr if lr is None else lr)
    if training.lr_schedule is not None:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    if training.lr_schedule is not None or training.clip_norm is not None:
        optimizer.register_step_pre_hook(lambda *step: _before_step(optimizer, ctx))
    return optimizer


def _plain(groups: list[dict[str, Any]], training: Training, lr: float) -> torch.optim.Optimizer:
    options: dict[str, Any] = dict(training.optimizer_options or {})
    if training.optimizer in FUSED:
        options["fused"] = True
    if training.optimizer == "sgd":
        options["momentum"] = training.momentum
    kind: Callable[..., torch.optim.Optimizer] = kind_of(training.optimizer)
    return kind(groups, lr=lr, **options)


def _before_step(optimizer: torch.optim.Optimizer, ctx: ClientContext) -> None:
    """Set the rate of a step, and clip its gradient."""
    training = ctx.run.experiment.training
    if training.lr_schedule is not None:
        factor = lr_factor(ctx)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
    if training.clip_norm is not None:
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], training.clip_norm
        )


def lr_of(ctx: ClientContext) -> float:
    """Return the learning rate of the present round and epoch."""
    return ctx.run.experiment.training.lr * lr_factor(ctx)


def lr_factor(ctx: ClientContext) -> float:
    """Return what the learning rate is multiplied by in the present round and epoch."""
    experiment = ctx.run.experiment
    course, schedule = experiment.training.lr_schedule, experiment.schedule
    if course is None:
        return 1.0
    if course.over == "epochs":
        return factor_at(course, ctx.epoch, experiment.training.local_epochs)
    if schedule.open:  # each client has its tasks at its own time
        return factor_at(course, ctx.round - ctx.at.began, schedule.rounds)
    anew = schedule.order != "rounds_outer"
    return factor_at(course, ctx.round % schedule.rounds if anew else ctx.round, schedule.rounds)


def factor_at(course: LrSchedule, t: int, length: int) -> float:
    """Return the factor of the learning rate in round or epoch ``t``, of ``length`` in all."""
    if t < course.warmup:
        return (t + 1) / course.warmup
    t -= course.warmup
    length = (course.length or length) - course.warmup
    share = min(1.0, t / length) if length > 0 else 1.0
    match course.kind:
        case "linear":
            return 1 + (course.final - 1) * share
        case "cosine":
            return course.final + (1 - course.final) * (1 + math.cos(math.pi * share)) / 2
        case "step":
            return float(course.gamma or 1) ** (t // (course.every or 1))
        case "exponential":
            return float(course.gamma or 1) ** t
    return 1.0


def check_training(experiment: Experiment) -> None:
    """Check that the run's optimiser takes its options.

    Raises:
        ConfigError: it does not; says why.
    """
    training = experiment.training
    parameters = inspect.signature(kind_of(training.optimizer)).parameters
    own = {"lr", "params", "weight_decay", *(["momentum"] * (training.optimizer == "sgd"))}
    for key in training.optimizer_options or {}:
        if key in own:
            raise ConfigError(f"[training] optimizer_options cannot hold {key!r}, which has a key")
        if key in IMPLEMENTATIONS:
            raise ConfigError(
                f"[training] optimizer_options: {key!r} says how torch computes a step, which "
                "fedtide chooses; leave it out"
            )
        if key not in parameters:
            known = ", ".join(sorted(set(parameters) - own - {*IMPLEMENTATIONS}))
            raise ConfigError(
                f"[training] optimizer_options: {training.optimizer!r} takes no {key!r}; it takes "
                f"{known}"
            )
    if training.weight_decay and "weight_decay" not in parameters:
        raise ConfigError(f"[training] weight_decay: {training.optimizer!r} has none; leave it out")
    try:
        _plain([{"params": [nn.Parameter(torch.zeros(1))]}], training, training.lr)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"[training] optimizer = {training.optimizer!r}: {error}") from None
