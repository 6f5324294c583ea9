"""The steps of a phase of local training, one operator after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedmodels.config.combinations import part_at
from fedmodels.errors import ConfigError
from fedmodels.nets.split import SplitNet
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Method
from fedmodels.training.optimizer import descend, optimizer_of
from fedmodels.training.returned import check_loss
from fedmodels.training.stepped import Batch, Output, Phase, Stepped

RECORDERS = {"cuda": "fedmodels.training.step_graphs:CudaRecorder"}
"""What records steps, by the type of a device; imported for a device that has one."""
STEPS = "steps"
"""What a training has asked for that took the stock loop's steps."""


@dataclass(frozen=True)
class Step:
    """What all steps of a phase have in common."""

    method: Stepped
    net: SplitNet
    optimizer: torch.optim.Optimizer
    repeats: int
    """Steps of the optimiser on each batch."""

    def take(self, ctx: ClientContext, batch: Batch, fixed: Tensor | None, refs: Any) -> Tensor:
        """Step down the loss of a batch; return its last value, without a gradient.

        ``fixed`` has the embeddings (B, d) if the phase cannot change them.
        """
        for _ in range(self.repeats):
            features = self.net.features(batch.x) if fixed is None else fixed
            loss = self.method.loss(ctx, batch, Output(features, self.net.head(features)), refs)
            check_loss(self.method, loss)
            done = descend(loss, self.optimizer)
        self.method.after_step(ctx, batch, refs)
        return done


class Steps:
    """The steps of one phase of a client's training."""

    def __init__(
        self, method: Stepped, ctx: ClientContext, phase: Phase, refs: Any, repeats: int
    ) -> None:
        """Begin a phase: freeze weights, set modes, make an optimiser."""
        self.ctx, self.refs = ctx, refs
        self.step = Step(method, ctx.net, self._begun(phase), repeats)

    def _begun(self, phase: Phase) -> torch.optim.Optimizer:
        return begin_phase([self.ctx.net], phase, self.ctx)

    def take(self, batch: Batch, fixed: Tensor | None) -> Tensor:
        """Take a step; return the loss of its batch. See :class:`Step`."""
        return self.step.take(self.ctx, batch, fixed, self.refs)

    def drawn(self) -> Sequence[Tensor] | None:
        """Return the batches of an epoch by index; None for those of the stock loop."""
        return None

    def settle(self) -> None:
        """Give references what steps changed in them: others read them, or change them, now."""


def steps_of(
    method: Stepped, ctx: ClientContext, phase: Phase, refs: Any, repeats: int = 1
) -> Steps:
    """Begin a phase of a client's training; return its steps, captured where that is possible."""
    if ctx.hidden is not None:
        hiding: Steps = ctx.hidden.stepping(method, ctx, phase, refs)
        return hiding
    ctx.asked.add(STEPS)
    kind = part_at("fedmodels.training.captured:CapturedSteps") if _captures(ctx) else Steps
    found: Steps = kind(method, ctx, phase, refs, repeats)
    return found


def tell_of_own_steps(method: Method, ctx: ClientContext) -> None:
    """Say once that a training is not captured whose steps were not those of the stock loop."""
    if STEPS in ctx.asked or not _captures(ctx):
        return
    why = "its method has a loop of its own"
    if ctx.hidden is not None:
        why = "gradients are bounded example by example"
    part_at("fedmodels.training.step_graphs:graphs_on")(ctx.device).tell(method.name, why)


def _captures(ctx: ClientContext) -> bool:
    return ctx.run.experiment.training.capture == "auto" and ctx.device.type in RECORDERS


def begin_phase(
    nets: Sequence[SplitNet], phase: Phase, ctx: ClientContext
) -> torch.optim.Optimizer:
    """Freeze weights outside the phase, set modes, return a fresh optimiser for the others.

    The nets have one shape; one optimiser steps all of them that have gradients.
    """
    return optimizer_of(groups_of(nets, phase, ctx), ctx, phase.lr)


def groups_of(nets: Sequence[SplitNet], phase: Phase, ctx: ClientContext) -> list[dict[str, Any]]:
    """Freeze weights outside the phase and set modes; return the optimiser's groups of the others.

    Raises:
        ConfigError: there are none.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for net in nets:
        for key, parameter in net.parameters_by_key().items():
            trains = key.startswith(phase.trains)
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)
            if trains:
                decay = ctx.run.experiment.training.weight_decay
                for prefix, value in phase.weight_decay.items():
                    decay = value if key.startswith(prefix) else decay
                groups.setdefault(decay, []).append(parameter)
        _set_modes(net, phase)
    if not groups:
        raise ConfigError(f"a phase trains {list(phase.trains)}, and the net has no such weights")
    return [{"params": ps, "weight_decay": decay} for decay, ps in groups.items()]


def _set_modes(net: SplitNet, phase: Phase) -> None:
    if not all(part.training for part in net.parts):  # looking is faster than setting
        net.train()
    if phase.bn_of_frozen == "eval":
        for role, module in (("base/", net.base), ("head/", net.head)):
            if not any(role.startswith(p) or p.startswith(role) for p in phase.trains):
                module.eval()
