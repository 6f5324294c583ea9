"""Per-FedAvg — Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning with Theoretical
Guarantees: A Model-Agnostic Meta-Learning Approach, NeurIPS 2020, Algorithm 1.
https://arxiv.org/abs/2002.07948

    paper        here                       paper        here
    w_k          state.common.weights       D'           the batches of the stock loop
    w_{k+1,t}^i  ctx.net                    D, D''       batches drawn beside them
    alpha        alpha                      tau          batches of training.local_epochs
    beta         training.lr                FO, HF       approximation

Deviations: the run's optimiser steps along the meta-gradient (docs/methods/per-fedavg.md).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from fedmodels.config.bounds import Count, NonNegative, Positive
from fedmodels.host.devices import to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
from fedmodels.numerics.weight_terms import tilt
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.criterion import fitting
from fedmodels.training.loop import EpochLoop
from fedmodels.training.optimizer import descend
from fedmodels.training.steps import begin_phase

Named = dict[str, Tensor]
"""Parameters by the names that modules have."""


@register("per-fedavg")
class PerFedAvg(FedAvg):
    """Everybody's model is one that a step on a client's own data makes the client's."""

    citation: ClassVar[str] = "Fallah et al., NeurIPS 2020"
    takes_targets: ClassVar[bool] = False
    fits_for_scores: ClassVar[bool] = True
    looks_at_examples: ClassVar[str] = "takes gradients of them beside its steps"
    views: ClassVar[tuple[str, ...]] = ("global", "after_downlink")

    weighting: Literal["examples", "uniform"] = "uniform"
    alpha: NonNegative = 0.01
    """Learning rate of the step that makes the model a client's own; 0 is FedAvg."""
    approximation: Literal["fo", "hf"] = "hf"
    """Of the Hessian's term: ``fo`` leaves it out, ``hf`` takes a difference of gradients."""
    delta: Positive = 1e-3
    """How far that difference goes to either side, as a part of the gradient."""
    personal_steps: Count = 1
    """Steps behind a personal score; with 0 it is everybody's model."""

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, payload.weights)
        if ctx.view != "after_downlink":
            return
        x, y = ctx.stream.train(ctx.task)
        ctx.net.train()
        draws, size = ctx.generator(), ctx.run.experiment.training.batch_size
        least = 2 if ctx.net.normalises_batches else 1
        with fitting(ctx, y):
            for _ in range(self.personal_steps if len(y) >= least else 0):
                moved = self._moved(ctx, *_drawn(x, y, size, draws))
                with torch.no_grad():
                    for name, w in _live(ctx).items():
                        w.copy_(moved[name])

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: None) -> float:
        loop, draws = EpochLoop(self, ctx, x, y, refs), ctx.generator()
        for phase in self.phases(ctx):
            optimizer = begin_phase([ctx.net], phase, ctx)
            for batch, _ in loop.batches(phase):
                others = [_drawn(x, y, len(batch.y), draws) for _ in range(2)]  # D, D''
                own = self._moved(ctx, *others[0])  # w~
                given = {name: w.requires_grad_() for name, w in own.items()}
                loss = ctx.criterion(functional_call(ctx.net, given, (batch.x,)), batch.y)
                found = self._step(ctx, optimizer, loss, _gradients(loss, given), *others[1])
                loop.end_step(batch, found)
        return loop.end()

    def _step(
        self,
        ctx: ClientContext,
        optimizer: torch.optim.Optimizer,
        loss: Tensor,
        gradient: Named,
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Step along ``(I - alpha H) gradient``, H of a batch D''; return the loss at w~."""
        if self.approximation == "hf" and self.alpha:
            live = _live(ctx)
            up, down = (
                self._gradient(
                    ctx, {k: w.detach() + sign * gradient[k] for k, w in live.items()}, x, y
                )
                for sign in (self.delta, -self.delta)
            )
            gradient = {
                k: g - self.alpha * (up[k] - down[k]) / (2 * self.delta)
                for k, g in gradient.items()
            }
        descend(tilt(_live(ctx).values(), gradient.values()), optimizer)
        return loss.detach()

    def _moved(self, ctx: ClientContext, x: Tensor, y: Tensor) -> Named:
        """Return ``w - alpha grad f(w, D)``."""
        live = {name: w.detach() for name, w in _live(ctx).items()}
        gradient = self._gradient(ctx, live, x, y)
        return {name: w - self.alpha * gradient[name] for name, w in live.items()}

    @torch.enable_grad()
    def _gradient(self, ctx: ClientContext, at: Named, x: Tensor, y: Tensor) -> Named:
        """Return the gradient of a batch at some weights; statistics of the net stay."""
        given = {name: w.detach().requires_grad_() for name, w in at.items()}
        kept = {name: each.clone() for name, each in ctx.net.named_buffers()}
        loss = ctx.criterion(functional_call(ctx.net, {**given, **kept}, (x,)), y)
        return _gradients(loss, given)


def _gradients(loss: Tensor, given: Named) -> Named:
    """Return the gradient of a loss; it is 0 for a parameter that the loss does not look at."""
    found = torch.autograd.grad(loss, [*given.values()], materialize_grads=True)
    return dict(zip(given, found, strict=True))


def _live(ctx: ClientContext) -> Named:
    """Return the parameters that train."""
    return {key.replace("/", ".", 1): w for key, w in ctx.net.parameters_by_key().items()}


def _drawn(x: Tensor, y: Tensor, size: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a batch of different examples."""
    index = to_device(torch.randperm(len(y), generator=draws)[:size], y.device)
    return x[index], y[index]
