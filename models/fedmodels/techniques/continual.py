"""Masks of classes, for a head of all classes of a run, which come, go and come back.

Papers on class-incremental learning let the head grow: it has the classes of all tasks up to now.
Here every head has all K columns that the run knows, and masks say which of them exist. Clients'
tasks differ and recur, so there are several:

    now         held by some client of this interaction
    before      trained on by some client in an earlier interaction
    seen        either of them: the columns a grown head would have
    own         held by this client in this interaction
    own before  held by this client in an earlier one: its private state's histogram

The server knows ``now`` before a round, as clients announce the classes of all their tasks when
they join, and remembers ``before`` in its own state. Both travel as one histogram whose counts are
of clients, not of examples: ``round`` of this interaction, ``total`` of all up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.host.devices import to_device
from fedmodels.tensors.bundle import Bundle, ClientId, GeneratorState, Histogram, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training.contexts import ServerContext


@dataclass(frozen=True)
class ClassMasks:
    """The classes of this interaction and of earlier ones, whoever holds them."""

    now: Tensor  # (K,) bool
    before: Tensor  # (K,) bool

    @property
    def seen(self) -> Tensor:
        """Return the classes anybody has held up to now, (K,) bool."""
        return self.now | self.before

    @classmethod
    def of(cls, label_counts: Histogram, device: torch.device | str = "cpu") -> ClassMasks:
        """Read what the server sent."""
        now, total = label_counts.round.to(device), label_counts.total.to(device)
        return cls(now > 0, total > now)


def beside_training(
    ctx: ServerContext, weights: Weights, generators: Mapping[str, GeneratorState], own: Bundle
) -> Mapping[ClientId, Bundle]:
    """Return what orders to train bring to each client beside the common part; none for scores."""
    if ctx.scores:
        return {}
    told = add_clients(ctx, own.histogram, ctx.cohort)
    sent = Bundle(weights, generators=dict(generators), histogram=told)
    return dict.fromkeys(ctx.cohort, sent)


def add_clients(ctx: ServerContext, before: Histogram | None, clients: Iterable[int]) -> Histogram:
    """Return the masks with the classes that these clients hold now.

    Of a cohort they are what it gets before it trains, and of those that answered what the server
    keeps, and gives as ``before`` in the next interaction.
    """
    now = _clients_per_class(ctx, clients)
    return Histogram(now, now if before is None else before.total + now)


def _clients_per_class(ctx: ServerContext, clients: Iterable[int]) -> Tensor:
    """Return how many of these clients hold each class now, (K,) int32."""
    found = torch.zeros(ctx.run.problem.num_classes, dtype=torch.int32)
    for client in clients:
        found[list(ctx.labels.get(client, ()))] += 1
    return found


def masks_spec(num_classes: int) -> BundleSpec:
    """Return the spec of a part of a payload that carries the masks."""
    counts = torch.zeros(num_classes, dtype=torch.int32)
    return BundleSpec.of(Bundle(histogram=Histogram(counts, counts)))


def mask_of(y: Tensor, num_classes: int) -> Tensor:
    """Return which classes labels (n,) are of, (K,) bool."""
    return torch.bincount(y, minlength=num_classes) > 0


def labels_from(classes: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Draw labels (m,) uniformly from these classes (c,); m is ``count``."""
    return classes[to_device(torch.randint(len(classes), (count,), generator=draw), classes.device)]


def columns_of(mask: Tensor) -> Tensor:
    """Return the classes (c,) of a mask (K,), ascending; made once, as it waits for a GPU."""
    return mask.nonzero().flatten()


def cross_entropy_among(logits: Tensor, y: Tensor, classes: Tensor) -> Tensor:
    """Return the mean cross-entropy over the columns of these classes alone; of nothing it is 0.

    Columns are taken out, never set to minus infinity: what multiplies that by 0 is not a number.

    Args:
        logits: (B, K).
        y: labels (B,), each of one of the classes.
        classes: (c,), ascending.
    """
    if not len(y):
        return logits.sum() * 0.0
    return cross_entropy(logits[:, classes], torch.searchsorted(classes, y))
