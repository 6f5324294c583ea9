"""The optimiser of local training: any of torch by its name, a schedule of its rate, and clipping.

The factor of the learning rate is a function of the round or of the epoch alone, so that a run that
goes on in the middle of a schedule comes to the same bits.

torch's optimisers stand here without its compiler, which takes two seconds and 79 MB to load.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedmodels.config.experiment import Experiment
from fedmodels.config.training import LrSchedule, Training
from fedmodels.errors import ConfigError
from fedmodels.host.devices import is_gpu
from fedmodels.training.contexts import ClientContext

FUSED = ("sgd", "adam", "adamw")
IMPLEMENTATIONS = ("capturable", "differentiable", "foreach", "fused")
"""Arguments of torch's optimisers that choose how a step is computed, and not which step it is."""


def optimizer_of(
    groups: list[dict[str, Any]], ctx: ClientContext, lr: float | None = None
) -> torch.optim.Optimizer:
    """Return the run's optimiser over parameter groups; its state lives for one phase.

    The rate ``lr`` is that before the schedule; by default the run's. On a GPU the rate is a tensor
    and the state is there before the first step, so that no step differs from the next one.
    """
    training = ctx.run.experiment.training
    ctx.asked.add("optimizer")
    optimizer = _plain(groups, training, training.lr if lr is None else lr)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    if is_gpu(ctx.device) and training.optimizer in FUSED:
        _put_on_device(optimizer)
    follow(optimizer, ctx)
    if training.lr_schedule is not None or training.clip_norm is not None:
        optimizer.register_step_pre_hook(lambda *step: _before_step(optimizer, training))
    return optimizer


def _plain(groups: list[dict[str, Any]], training: Training, lr: float) -> torch.optim.Optimizer:
    options: dict[str, Any] = dict(training.optimizer_options or {})
    if training.optimizer in FUSED:
        options["fused"] = True
    if training.optimizer == "sgd":
        options["momentum"] = training.momentum
    kind: Callable[..., torch.optim.Optimizer] = kind_of(training.optimizer)
    return kind(groups, lr=lr, **options)


def _put_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Make the rates tensors, and the state that the first step would make."""
    vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group["lr"] = torch.full((), group["initial_lr"], device=device)
        if "capturable" in group:
            group["capturable"] = True
        for parameter in group["params"] if _begins_at_zero(group) else ():
            like = {"step": torch.zeros((), device=device)}
            optimizer.state[parameter] = {
                key: torch.zeros_like(like.get(key, parameter)) for key in _state_of(group)
            }


def _state_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the state that a fused step keeps of each parameter."""
    if "betas" in group:
        most = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("step", "exp_avg", "exp_avg_sq", *most)
    return ("momentum_buffer",) if group["momentum"] else ()


def _begins_at_zero(group: Mapping[str, Any]) -> bool:
    """Tell whether the first step is that from a state of zeros: not with dampened momentum."""
    return not group.get("dampening")


def is_ready(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether all steps are alike: no rate is a number, no state is made by the first one."""
    groups = optimizer.param_groups
    return all(isinstance(g["lr"], Tensor) and _begins_at_zero(g) for g in groups)


def restart(optimizer: torch.optim.Optimizer, ctx: ClientContext) -> None:
    """Let an optimiser whose state lies ready begin anew, for another training."""
    states = [t for state in optimizer.state.values() for t in state.values()]
    if states:
        torch._foreach_zero_(states)
    ctx.asked.add("optimizer")
    follow(optimizer, ctx)


def tensors_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the rates and the state of an optimiser whose state lies ready."""
    groups = enumerate(optimizer.param_groups)
    rates = {f"lr/{n}": g["lr"] for n, g in groups if isinstance(g["lr"], Tensor)}
    states = enumerate(optimizer.state.values())
    return rates | {f"{key}/{n}": t for n, state in states for key, t in state.items()}


def follow(optimizer: torch.optim.Optimizer, ctx: ClientContext) -> None:
    """Let an optimiser take its rate from the round and the epoch of a context."""
    vars(optimizer)["where"] = weakref.ref(ctx)


def set_rates(optimizer: torch.optim.Optimizer) -> None:
    """Set the rates of the present round and epoch, where they are not set yet."""
    ctx = vars(optimizer)["where"]()
    factor = 1.0 if ctx is None else lr_factor(ctx)
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * factor
        if not isinstance(group["lr"], Tensor):
            group["lr"] = rate
        elif group.get("rate", group["initial_lr"]) != rate:
            group["lr"].fill_(rate)
            group["rate"] = rate


def _before_step(optimizer: torch.optim.Optimizer, training: Training) -> None:
    """Set the rate of a step, and clip its gradient."""
    if training.lr_schedule is not None:
        set_rates(optimizer)
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
    return factor_at(course, schedule.visit(ctx.round, ctx.at.began), schedule.rounds)


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
    """Check that the run's optimiser takes its options; ConfigError says why it does not."""
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


Kind = TypeVar("Kind", bound=type[Optimizer])


def eager(kind: Kind) -> Kind:
    """Return a class of optimiser that makes the same steps and is never compiled.

    torch wraps these functions, and each wrapper imports ``torch._dynamo`` when it is first called.
    Hooks before a step are called; hooks after a step are not.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    plain: Callable[..., Any] = torch.no_grad()(inspect.unwrap(kind.step))

    def step(self: Optimizer) -> None:
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        plain(self)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it once more, to profile
    return cast(Kind, type(kind.__name__, (kind,), {**bare, "step": step}))


@cache
def kind_of(name: str) -> type[Optimizer]:
    """Return the class of ``torch.optim`` with this name in small letters, never compiled."""
    found = {each.lower(): each for each in dir(torch.optim)}
    return eager(cast(type[Optimizer], getattr(torch.optim, found[name])))


Adam = eager(torch.optim.Adam)
SGD = eager(torch.optim.SGD)


def descend(loss: Tensor, optimizer: Optimizer) -> Tensor:
    """Take one step down a loss; return it without a gradient."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()
