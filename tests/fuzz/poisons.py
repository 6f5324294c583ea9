"""Uploads of the right form whose values would spoil a model: what a poisoned client sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedmodels.tensors.bundle import Bundle, Weights
from fedpb.v1 import coordinator_pb2 as rpc
from tests.liars import Answer, Lie

Poison = Callable[[Bundle], Bundle]


def _changed(weights: Weights, change: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Return weights with every floating-point tensor changed, as far as bounds let it pass."""
    return {
        name: change(name, tensor).clamp(-1e6, 1e6) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def scaled(factor: float) -> Poison:
    """Send the weights times a factor."""
    return lambda upload: replace(
        upload, weights=_changed(upload.weights, lambda _, tensor: factor * tensor)
    )


def flipped(upload: Bundle) -> Bundle:
    """Send the parameters with their signs turned."""
    turned = _changed(upload.weights, lambda n, t: t if n.endswith("running_var") else -t)
    return replace(upload, weights=turned)


def huge_prototypes(upload: Bundle) -> Bundle:
    """Send prototypes of 1e5."""
    rows = {
        level: replace(p, vectors=torch.full_like(p.vectors, 1e5))
        for level, p in upload.prototypes.items()
    }
    return replace(upload, prototypes=rows)


def wild_statistics(upload: Bundle) -> Bundle:
    """Send variances of batch normalisation that nothing has."""
    wild = {
        name: torch.full_like(t, 1e12) if name.endswith("running_var") else t
        for name, t in upload.weights.items()
    }
    return replace(upload, weights=wild)


def huge_generators(upload: Bundle) -> Bundle:
    """Send generators times ten thousand."""
    held = {
        key: replace(generator, tensors=_changed(generator.tensors, lambda _, t: 1e4 * t))
        for key, generator in upload.generators.items()
    }
    return replace(upload, generators=held)


def poisoned(poison: Poison) -> Lie:
    """Return a lie that changes the upload of each order to train, and is honest otherwise."""

    def lie(client: int, order: rpc.Order, answer: Answer) -> Answer:
        upload, report, failure = answer
        trains = order.kind == rpc.ORDER_KIND_TRAIN and not failure
        return (poison(upload) if trains else upload), report, failure

    return lie
