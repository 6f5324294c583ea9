"""FedALA — Zhang, Hua, Wang, Song, Xue, Ma, Guan, FedALA: Adaptive Local Aggregation for
Personalized Federated Learning, AAAI 2023. https://arxiv.org/abs/2212.01197
Equations 1 and 2 as on the authors' poster; facts from https://github.com/TsingZ0/FedALA.

    paper         here                            paper     here
    Theta^{t-1}   the payload                     W_i^p     private weights "ala/…"
    Theta_i^{t-1} private weights "own/…"         p, s      p, s (per cent)
    Theta-hat_i   the net before it trains        eta       eta

Deviations: docs/methods/fedala.md.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from fedmodels.config.bounds import Count, NonNegative
from fedmodels.host.devices import to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques.several_models import placed
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.roles import part_of, under
from fedmodels.training.contexts import ClientContext
from fedmodels.training.run import RunFacts

ALA, OWN = "ala", "own"
LAST, THRESHOLD = 10, 0.1
"""The first learning of W ends when so many losses have a standard deviation below this one."""
MOST_EPOCHS = 100
NEVER, TRAINED, LEARNT = 0.0, 1.0, 2.0
"""Of a client: it never trained; it did; it has learnt W."""


@register("fedala")
class FedAla(FedAvg):
    """Each client mixes the received model with its own, element by element, before it trains."""

    citation: ClassVar[str] = "Zhang et al., AAAI 2023"
    takes_targets: ClassVar[bool] = False
    views: ClassVar[tuple[str, ...]] = ("global", "after_local", "after_downlink")

    p: Count = 1
    """How many of the highest layers are mixed; 0 is all."""
    s: Annotated[int, Field(ge=1, le=100)] = 80
    """Per cent of the examples that W learns from."""
    eta: NonNegative = 1.0
    """Learning rate of W; 0 is FedAvg."""

    def _mixed(self, run: RunFacts) -> list[str]:
        """Return the names of the parameters of the p highest layers, from the lowest on."""
        layers: dict[str, list[str]] = {}
        for key in run.parameters:
            layers.setdefault(key.replace("/", ".", 1).rpartition(".")[0], []).append(key)
        return [key for layer in [*layers.values()][-self.p :] for key in layer]

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        own = {key: run.initial_weights[key] for key in self._mixed(run)}
        ones = {key: torch.ones_like(tensor) for key, tensor in own.items()}
        return Bundle({**under(OWN, own), **under(ALA, ones)}, scalars={"stage": NEVER})

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        weights = payload.weights
        if ctx.view != "global" and state.scalars.get("stage", NEVER) != NEVER:
            w = part_of(state.weights, ALA) if ctx.view else ctx.once(self._learnt, payload, state)
            weights = {**weights, **_between(part_of(state.weights, OWN), weights, w)}
        load_weights(ctx.net, weights)

    def _learnt(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Weights:
        """Return W, learnt on a part of the task's examples; ones before the first training."""
        w, stage = part_of(state.weights, ALA), state.scalars["stage"]
        x, y = ctx.stream.train(ctx.task)
        if stage == NEVER or not len(y):
            return w
        drawn = torch.randperm(len(y), generator=ctx.generator())
        drawn = to_device(drawn[: max(1, len(y) * self.s // 100)], y.device)
        load_weights(ctx.net, payload.weights)  # lower layers are overwritten
        ctx.net.eval()
        own, theirs, w = (placed(ctx, t) for t in (part_of(state.weights, OWN), payload.weights, w))
        batches, losses = torch.split(drawn, ctx.run.experiment.training.batch_size), list[float]()
        while not _is_learnt(losses, once=stage == LEARNT):
            for index in batches:
                w, loss = self._step(ctx, own, theirs, w, x[index], y[index])
            losses.append(float(loss))
        return {key.replace(".", "/", 1): t.cpu() for key, t in w.items()}

    @torch.enable_grad()
    def _step(
        self, ctx: ClientContext, own: Weights, theirs: Weights, w: Weights, x: Tensor, y: Tensor
    ) -> tuple[Weights, Tensor]:
        """Return W after a step on a batch, and the loss before it."""
        mixed = {k: t.requires_grad_() for k, t in _between(own, theirs, w).items()}
        loss = ctx.criterion(functional_call(ctx.net, mixed, (x,)), y)
        gradients = torch.autograd.grad(loss, [*mixed.values()])
        moved = {
            key: (w[key] - self.eta * gradient * (theirs[key] - own[key])).clamp(0, 1)  # eq. 1
            for key, gradient in zip(mixed, gradients, strict=True)
        }
        return moved, loss.detach()

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Weights:
        return ctx.once(self._learnt, payload, state)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Weights) -> Bundle:
        if not ctx.num_examples:
            return state
        own = weights_of(ctx.net, lambda key: f"{OWN}/{key}" in state.weights)
        stage = TRAINED if state.scalars["stage"] == NEVER else LEARNT
        return Bundle({**under(OWN, own), **under(ALA, refs)}, scalars={"stage": stage})


def _between(own: Weights, theirs: Weights, w: Weights) -> Weights:
    """Return ``Theta_i + (Theta - Theta_i) * W``, eq. 2, of the layers that W has."""
    return {key: torch.lerp(own[key], theirs[key], w[key]) for key in w}


def _is_learnt(losses: list[float], *, once: bool) -> bool:
    """Tell whether W needs no further epoch, by the last loss of each so far."""
    if once or len(losses) >= MOST_EPOCHS:
        return len(losses) > 0
    last = torch.tensor(losses[-LAST:], dtype=torch.float64)
    return len(losses) > LAST and float(last.std(correction=0)) < THRESHOLD
