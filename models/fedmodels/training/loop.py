"""The stock loop: one client's local training.

Shapes: B batch, n training set, d features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedmodels.config.combinations import part_at
from fedmodels.config.training import Training
from fedmodels.errors import ConfigError, TrainingFailed
from fedmodels.host.devices import is_gpu, to_device
from fedmodels.nets.split import BATCH, SplitNet, embed
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import LocalResult, Method
from fedmodels.training.returned import check_asked, check_trained, check_weights
from fedmodels.training.stepped import Batch, Phase, Stepped
from fedmodels.training.steps import Steps, steps_of, tell_of_own_steps

if TYPE_CHECKING:
    from fedmodels.training.release import Release

BLOCK = 2**26
"""Bytes of inputs that a GPU lays out at once."""


def train_locally(
    method: Method, ctx: ClientContext, payload: Bundle, state: Bundle
) -> LocalResult:
    """Run one client's half of an interaction; the net in ``ctx`` is overwritten."""
    return ClientHalf(method, ctx, payload, state).train()


@dataclass
class ClientHalf:
    """One client's work in an interaction before and after its net is fitted."""

    method: Method
    ctx: ClientContext
    payload: Bundle
    state: Bundle
    refs: Any = field(init=False)
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)
    drawn: Tensor = field(init=False)
    """State of torch's generator after ``begin``, where others train before ``end``."""

    @cached_property
    def release(self) -> Release:
        """Return what the training follows from; private runs alone ask for it."""
        from fedmodels.training.release import release_of_training  # few runs need it

        return release_of_training(self.method, self.ctx, self.payload, self.state, self.beside())

    def beside(self) -> str:
        """Return what the training follows from beside what a half knows, as a worker says it."""
        return ""

    def train(self) -> LocalResult:
        """Begin, fit the net and end."""
        with seeded(self.ctx.seed("dropout")):  # dropout and other random layers draw from here
            self.begin()
            with explained(self):
                loss = self.method.fit(self.ctx, self.x, self.y, self.refs)
                if len(self.y):
                    tell_of_own_steps(self.method, self.ctx)
                return self.end(loss)

    def begin_apart(self) -> None:
        """Begin with random numbers of the client's own seed; others train before the end."""
        with seeded(self.ctx.seed("dropout")):
            self.begin()
            self.drawn = torch.get_rng_state()

    def end_apart(self, loss: float) -> LocalResult:
        """End with the random numbers that follow those of :meth:`begin_apart`."""
        with seeded(self.ctx.seed("dropout")):
            torch.set_rng_state(self.drawn)
            with explained(self):
                return self.end(loss)

    def begin(self) -> None:
        """Load the net, the references of the loss and the training data."""
        self.method.load(self.ctx, self.payload, self.state)
        self.refs = self.method.prepare(self.ctx, self.payload, self.state)
        self.x, self.y = self.method.training_data(self.ctx, self.refs)
        self.ctx.num_examples = len(self.y)
        for part in self.ctx.run.parts:
            part.begins(self)

    def end(self, loss: float) -> LocalResult:
        """Return the result of local training; ``loss`` is the last epoch's mean over examples.

        Raises:
            ConfigError: the method returns what nobody would keep or take, or has trained without
                what the config says of losses or steps.
            TrainingFailed: it diverged.
        """
        if len(self.y):
            check_asked(self.method, self.ctx)
            check_weights(self.ctx)
        state = self.method.after_local(self.ctx, self.state, self.refs)
        for part in self.ctx.run.parts:
            part.ends(self, state)
        upload = self.method.uplink(self.ctx, state, self.refs)
        check_trained(self.method, self.ctx, state, upload)
        return LocalResult(upload, state, loss, len(self.y))


@contextmanager
def explained(half: ClientHalf) -> Iterator[None]:
    """Add to the line of a training that diverges what was measured of it, and what helps."""
    try:
        yield
    except TrainingFailed as error:
        why = part_at("fedmodels.training.divergence:explanation")(half)
        raise TrainingFailed(f"{error}; {why}") from None


def mean_loss(batches: Sequence[tuple[Tensor, int]]) -> float:
    """Return the mean loss over the examples of batches, of which each has a mean loss and a size.

    NaN where there is no batch.
    """
    if not batches:
        return math.nan
    means, sizes = zip(*batches, strict=True)
    weights = torch.tensor(sizes, dtype=torch.float64)
    return float(torch.stack(means).cpu().double() @ weights / weights.sum())


@dataclass(eq=False)
class EpochLoop:
    """One client's way through its phases: its batches in order, and their losses."""

    method: Stepped
    ctx: ClientContext
    x: Tensor  # (n, …)
    y: Tensor  # (n,)
    refs: Any
    """The result of ``prepare``."""
    renewed: Callable[[int], tuple[Tensor, Tensor]] | None = None
    """Gives inputs and labels of an epoch at its beginning, for data that change between epochs,
    such as replay."""
    joined: Callable[[Batch], Batch] | None = None
    """Adds examples to a batch, for examples that are drawn anew for each batch."""
    stops: Callable[[int], bool] | None = None
    """Tells after so many epochs of a phase whether the rest of them is left out."""

    def __post_init__(self) -> None:
        """Start before the first phase."""
        ctx = self.ctx
        self._order = ctx.generator("order")
        augments = ctx.run.experiment.training.augment != "none"
        self._augment = ctx.generator("augment") if augments else self._order
        self._augmented = part_at("fedmodels.training.augmentation:augmented") if augments else None
        self._epoch, self._losses = -1, list[tuple[Tensor, int]]()
        self._steps: Steps | None = None
        self._lessons: Sequence[Tensor] | None = None
        self._is_same = self.renewed is None and self.joined is None
        if ctx.hidden is not None and not self._is_same:
            raise ConfigError(
                f"method {self.method.name!r} adds examples of its own, which nothing would hide"
            )

    def run(self, steps: int = 1) -> float:
        """Run every phase; return the last epoch's mean loss over examples.

        Args:
            steps: of the optimiser on each batch.
        """
        for phase in self.method.phases(self.ctx):
            self._steps = steps_of(self.method, self.ctx, phase, self.refs, steps)
            for batch, fixed in self.batches(phase):
                self.keep(batch, self._steps.take(batch, fixed))
            self._steps.settle()
        return self.end()

    def batches(self, phase: Phase) -> Iterator[tuple[Batch, Tensor | None]]:
        """Yield the batches of a phase that has begun.

        The second item is the batch's embeddings (B, d) if the phase cannot change them, else None.
        """
        net, training = self.ctx.net, self.ctx.run.experiment.training
        stays = self._is_same and self.ctx.hidden is None
        fixed = embed_once(net, self.x, training) if stays else None
        for epoch in range(phase.epochs):
            if self._steps is not None:
                self._steps.settle()
            if epoch and self.stops is not None and self.stops(epoch):
                return
            self._epoch, self._losses = self._epoch + 1, []
            self.ctx.epoch = self._epoch
            self.method.begin_epoch(self.ctx, phase, epoch, self.refs)
            if self.renewed is not None:
                self.x, self.y = self.renewed(self._epoch)
            if (taken := self._steps.drawn() if self._steps is not None else None) is None:
                taken = [*batches(len(self.y), net, training, self._order)]
                self.ctx.skipped = len(self.y) - sum(map(len, taken))
            for block in _blocks(taken, self.x):
                for batch, index in self._laid_out(block):
                    found = batch if self.joined is None else self.joined(batch)
                    yield self._taught(found), None if fixed is None else fixed[index]

    def _laid_out(self, taken: Sequence[Tensor]) -> Iterator[tuple[Batch, Tensor]]:
        """Yield the batches of index tensors, changed at random, and their positions."""
        training, sizes = self.ctx.run.experiment.training, [len(drawn) for drawn in taken]
        index = to_device(torch.cat([*taken]) if len(taken) > 1 else taken[0], self.x.device)
        x = self.x[index]
        if self._augmented is not None:
            x = self._augmented(x, sizes, training, self._augment)
        whole = x, self.y[index], index
        if len(taken) == 1:
            yield Batch(*whole, taken[0]), index
            return
        for x, y, own, drawn in zip(*(torch.split(t, sizes) for t in whole), taken, strict=True):
            yield Batch(x, y, own, drawn), own

    @torch.no_grad()
    def _taught(self, batch: Batch) -> Batch:
        """Add what teachers say of a batch; ask once for all examples if they stay as they are.

        Their inputs change with augmentation and between epochs, their answers with the batch where
        a net mixes examples.
        """
        ctx, augment = self.ctx, self.ctx.run.experiment.training.augment
        if augment != "none" or ctx.net.mixes_examples or not self._is_same:
            return with_lessons(batch, self._lessons_of(batch.x))
        if self._lessons is None:
            parts = [self._lessons_of(x) for x in torch.split(self.x, BATCH)]
            self._lessons = [torch.cat(each) for each in zip(*parts, strict=True)]
        return with_lessons(batch, [each[batch.index] for each in self._lessons])

    def _lessons_of(self, x: Tensor) -> Sequence[Tensor]:
        """Return what teachers say of inputs (B, …); of each by itself where none may meet."""
        if not self.ctx.net.alone or len(x) < 2:
            return self.method.taught(self.ctx, x, self.refs)
        parts = [self.method.taught(self.ctx, one, self.refs) for one in torch.split(x, 1)]
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    def end_step(self, batch: Batch, loss: Tensor) -> None:
        """Finish a step: call ``after_step``, keep the loss, report progress."""
        self.method.after_step(self.ctx, batch, self.refs)
        self.keep(batch, loss)

    def keep(self, batch: Batch, loss: Tensor) -> None:
        """Keep the loss of a step, report progress."""
        self._losses.append((loss, len(batch.y)))
        self.ctx.tick(self._epoch, len(self._losses) - 1, loss)

    def end(self) -> float:
        """Close, and return the last epoch's mean loss; TrainingFailed if it is not finite."""
        loss = self.close()
        if self._losses and not math.isfinite(loss):
            raise TrainingFailed(f"training diverged: its loss is {loss}")
        return loss

    def close(self) -> float:
        """Unfreeze all parameters, drop gradients; return the last epoch's mean loss."""
        for parameter in self.ctx.net.parameters_by_key().values():
            if not parameter.requires_grad:
                parameter.requires_grad_(True)
            parameter.grad = None
        return mean_loss(self._losses)


def with_lessons(batch: Batch, taught: Sequence[Tensor]) -> Batch:
    """Return a batch with what teachers say of it."""
    return replace(batch, taught=tuple(taught)) if taught else batch


def embed_once(net: SplitNet, x: Tensor, training: Training) -> Tensor | None:
    """Return the embeddings (n, d), computed once, if the phase cannot change them.

    None if it can: the base trains, the base is in training mode (running statistics move, dropout
    draws), inputs are augmented, or an example's embedding depends on its batch.
    """
    if net.base.training or training.augment != "none" or net.mixes_examples:
        return None
    if any(parameter.requires_grad for parameter in net.base.parameters()):
        return None
    return embed(net, x)


def batches(n: int, net: SplitNet, training: Training, order: torch.Generator) -> Iterator[Tensor]:
    """Yield the index tensors of one shuffled epoch; the last batch is kept.

    A batch of one is skipped when the net normalises over the batch, which needs two examples: its
    example takes part in other epochs, or, where the client has one example, in none.
    """
    smallest = 2 if net.normalises_batches else 1
    for index in torch.split(torch.randperm(n, generator=order), training.batch_size):
        if len(index) >= smallest:
            yield index


def _blocks(taken: Sequence[Tensor], x: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield the batches of an epoch that are laid out at once: on a GPU as many as have room."""
    each = math.prod(x.shape[1:]) * x.element_size() * max(map(len, taken), default=1)
    count = max(1, BLOCK // max(1, each)) if is_gpu(x.device) else 1
    for first in range(0, len(taken), count):
        yield taken[first : first + count]


def placed(indices: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Return the index tensors of an epoch on a device: one copy for all of them."""
    if device.type == "cpu" or not indices:
        return indices
    return torch.split(to_device(torch.cat([*indices]), device), [len(index) for index in indices])
