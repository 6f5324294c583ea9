"""Aggregation weights of one client, learned on examples it cares about.

Tan and Liu (pFedGRP), arXiv 2410.01502v2, eq. 8, in the manner of FedLAW (Li et al., ICML 2023):

    minimise over w on the simplex   L(w) = mean CE(f(x; sum_j w_j theta_j), y)

The graph never passes through the n models. They are mixed without gradient, one backward pass
gives dL/d(mixed), and ``dL/dw_j = <dL/d(mixed), theta_j>`` is one product with the stacked models.

Shapes: n models, P parameters, F values of float buffers, m examples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.config.bounds import Count, NonNegative, PositiveCount, Share
from fedmodels.host.devices import device_of, to_device
from fedmodels.host.machine import cores
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import generator
from fedmodels.tensors.bundle import Weights
from fedmodels.training.optimizer import Adam
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import SharedSettings

Examples = tuple[Tensor, Tensor]
"""Inputs (m, …), and labels (m,) or probabilities (m, K)."""

SELF = 0.9
"""Weight of a client's own model where the search starts from it."""


class Mixer:
    """A net whose parameters and buffers are a weighted sum of models."""

    def __init__(self, net: SplitNet, models: Sequence[Weights]) -> None:
        """Stack the models; the net's own tensors become views of the mixture.

        Args:
            net: on the device to compute on; not to be used for anything else afterwards.
            models: the weights of each, all of the net's keys.
        """
        device = next(net.parameters()).device
        floats = [k for k, b in net.named_buffers() if b.is_floating_point()]
        self.models = _stack(models, [k for k, _ in net.named_parameters()], device)  # (n, P)
        self._buffers = _stack(models, floats, device)  # (n, F)
        self._take(net)

    def another(self) -> Mixer:
        """Return a mixer of the same models with a net of its own, for another thread."""
        out = copy.copy(self)
        out._take(copy.deepcopy(self.net))
        return out

    def _take(self, net: SplitNet) -> None:
        """Make a net's own tensors views of the mixture."""
        self.net, device = net, self.models.device
        self._mixture = torch.zeros(self.models.shape[1], device=device)  # (P,)
        self._gradient = torch.zeros_like(self._mixture)
        self._statistics = torch.zeros(self._buffers.shape[1], device=device)  # (F,)
        for parameter, at in _slices(list(net.parameters())):
            parameter.data = _unflatten(self._mixture[at], parameter)
            parameter.grad = _unflatten(self._gradient[at], parameter)
        floats = [b for b in net.buffers() if b.is_floating_point()]
        self._live = [(b, self._statistics[at].view_as(b)) for b, at in _slices(floats)]
        net.eval()  # batch normalisation by the mixed statistics

    def mix(self, w: Tensor) -> None:
        """Put ``sum_j w_j theta_j`` into the net."""
        with torch.no_grad():
            torch.mv(self.models.T, w, out=self._mixture)
            torch.mv(self._buffers.T, w, out=self._statistics)
            for buffer, value in self._live:
                buffer.copy_(value)

    def gradient(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return L(w) on a batch, (), and dL/dw (n,)."""
        self.mix(w)
        self._gradient.zero_()
        loss = cross_entropy(self.net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), self.models @ self._gradient

    @torch.no_grad()
    def loss(self, w: Tensor, examples: Examples, batch_size: int = 256) -> float:
        """Return L(w) on all examples."""
        self.mix(w)
        parts = zip(*(self.net.split(each, batch_size) for each in examples), strict=True)
        sums = [cross_entropy(self.net(x), y, reduction="sum") for x, y in parts]
        return float(sum(torch.stack(sums).tolist())) / len(examples[1])


@dataclass(frozen=True, kw_only=True)
class LearnedWeights(SharedSettings):
    """How the server looks for the aggregation weights of eq. 8."""

    w_init: Literal["uniform", "self"] = "uniform"
    """Weights that the search of eq. 8 begins with."""
    w_lr: NonNegative = 0.01
    """Learning rate of eq. 8: FedLAW's, as the paper gives none. docs/results/continual.md has runs
    with ten times that."""
    w_epochs: Count = 20
    """Epochs of eq. 8."""
    w_batch: PositiveCount = 64
    """Batch size of eq. 8."""
    w_entropy_floor: Share = 0.0
    """Lower bound of the entropy of a row of weights, as a share of log n, its maximum."""
    w_device: Literal["cpu", "auto"] = "cpu"
    """Where eq. 8 is minimised: on the coordinator's cores, or on its GPU where it has one."""

    @property
    def device(self) -> torch.device:
        """Return where the search computes."""
        return device_of(self.w_device)

    def found(
        self, run: RunFacts, models: Sequence[Weights], searches: Sequence[WeightSearch]
    ) -> list[BestWeights]:
        """Return the weights that each search finds, on a GPU one after the other."""
        threads = cores() if self.device.type == "cpu" else 1
        mixer = Mixer(run.make_net().to(self.device), models)
        return find_all(mixer, searches, self, threads)


@dataclass(frozen=True)
class WeightSearch:
    """One client's search."""

    examples: Examples | Callable[[int], Examples]
    """All, or a function that draws those of an epoch."""
    own: int
    """Position of the client's own model."""
    seed: int
    """Of the order of batches."""


@dataclass(frozen=True)
class BestWeights:
    """The aggregation weights of the least loss that the search saw."""

    w: Tensor  # (n,) float64
    loss: float
    """Mean over all examples."""
    uniform: float
    """The loss of uniform weights, which is never lower."""


def find_weights(
    mixer: Mixer,
    examples: Examples | Callable[[int], Examples],
    own: int,
    search: LearnedWeights,
    seed: int,
) -> BestWeights:
    """Return the weights with the lowest loss among uniform, initial, and those after each epoch.

    Args:
        mixer: the models.
        examples: all, or a function that draws those of an epoch; losses are compared on epoch 0's.
        own: position of the client's own model.
        search: how to look.
        seed: of the order of batches.
    """
    draw = examples if callable(examples) else None
    fixed = examples if not callable(examples) else examples(0)
    n, device = len(mixer.models), mixer.models.device
    uniform = torch.full((n,), 1 / n, dtype=torch.float64)
    if n == 1 or not len(fixed[1]):
        loss = mixer.loss(uniform.float().to(device), fixed) if len(fixed[1]) else math.nan
        return BestWeights(uniform, loss, loss)

    def judged(w: Tensor) -> tuple[float, Tensor]:
        w = with_entropy(w.detach().double().cpu(), search.w_entropy_floor)
        return mixer.loss(w.float().to(device), fixed), w

    best = judged(uniform)
    of_uniform = best[0]
    a = _start(uniform, own, search).to(device).requires_grad_()
    if search.w_init != "uniform":
        best = min(best, judged(a.softmax(0)), key=lambda found: found[0])
    optimizer = Adam([a], lr=search.w_lr, betas=(0.5, 0.999))  # FedLAW's betas
    order = generator(seed)
    for epoch in range(search.w_epochs):
        x, y = draw(epoch) if draw is not None else fixed
        shuffled = to_device(torch.randperm(len(y), generator=order), x.device)
        for index in torch.split(shuffled, search.w_batch):
            w = a.softmax(0)
            _, slope = mixer.gradient(w.detach().float(), x[index], y[index])
            optimizer.zero_grad(set_to_none=True)
            # Given a gradient, torch would import sympy.
            (w * slope.double()).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        best = min(best, judged(a.softmax(0)), key=lambda found: found[0])
    return BestWeights(best[1], best[0], of_uniform)


def find_all(
    mixer: Mixer, problems: Sequence[WeightSearch], search: LearnedWeights, threads: int
) -> list[BestWeights]:
    """Solve problems that share their models, as many at a time as there are threads.

    What is found does not depend on the number of threads.
    """
    threads = max(1, min(threads, len(problems)))
    mixers = [mixer, *(mixer.another() for _ in range(threads - 1))]
    intra_op = torch.get_num_threads()

    def solve(first: int) -> list[BestWeights]:
        torch.set_num_threads(intra_op)
        mine = problems[first::threads]
        return [find_weights(mixers[first], p.examples, p.own, search, p.seed) for p in mine]

    with ThreadPoolExecutor(threads) as pool:
        shares = list(pool.map(solve, range(threads)))
    return [shares[i % threads][i // threads] for i in range(len(problems))]


def _start(uniform: Tensor, own: int, search: LearnedWeights) -> Tensor:
    """Return the parameters of the initial weights, whose softmax they are."""
    w = uniform.clone()
    if search.w_init == "self":
        w.fill_((1 - SELF) / (len(w) - 1))
        w[own] = SELF
    return w.log() - w.log().mean()  # zeros where w is uniform


def entropy(w: Tensor) -> float:
    """Return the entropy of weights (n,) over log n: 1 for uniform ones, 0 for a single one."""
    if len(w) < 2:
        return 0.0
    p = w.double().clamp(min=0)
    return float(torch.special.entr(p).sum()) / math.log(len(w))


def with_entropy(w: Tensor, floor: float) -> Tensor:
    """Return the first weights (n,) on the way from ``w`` to uniform with this entropy."""
    if entropy(w) >= floor:
        return w
    uniform = torch.full_like(w, 1 / len(w))
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        enough = entropy(w + middle * (uniform - w)) >= floor
        low, high = (low, middle) if enough else (middle, high)
    return w + high * (uniform - w)


def _stack(models: Sequence[Weights], keys: Sequence[str], device: torch.device) -> Tensor:
    """Return tensors of each model side by side, (n, total)."""
    names = [key.replace(".", "/", 1) for key in keys]
    rows = [
        torch.cat([_flatten(m[name].detach().float()) for name in names])
        if names
        else torch.zeros(0)
        for m in models
    ]
    return torch.stack(rows).to(device)


def _flatten(tensor: Tensor) -> Tensor:
    """Return all values, those of a convolution with its channels last."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)


def _unflatten(flat: Tensor, like: Tensor) -> Tensor:
    """Return a view of flat values in a tensor's shape: the inverse of :func:`_flatten`."""
    if like.dim() != 4:
        return flat.view_as(like)
    out, into, height, width = like.shape
    return flat.view(out, height, width, into).permute(0, 3, 1, 2)


def _slices(tensors: Sequence[Tensor]) -> list[tuple[Tensor, slice]]:
    """Return where each tensor lies among all of them, flattened."""
    out, at = [], 0
    for tensor in tensors:
        out.append((tensor, slice(at, at + tensor.numel())))
        at += tensor.numel()
    return out
