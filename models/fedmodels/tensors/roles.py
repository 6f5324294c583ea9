"""Several nets in one set of weights, each under a role: ``flow/…`` beside ``base/…``, ``head/…``.

Weights of every role travel alike, and are averaged and checked alike. ``FedAvg.aggregate`` takes
the mean of all weights in the uploads, and the maximum of integer buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedmodels.tensors.bundle import Weights


def under(role: str, weights: Mapping[str, Tensor]) -> Weights:
    """Return weights with ``role/`` before each name."""
    return {f"{role}/{name}": tensor for name, tensor in weights.items()}


def part_of(weights: Mapping[str, Tensor], role: str) -> Weights:
    """Return the weights of one role without its name."""
    prefix = f"{role}/"
    return {k.removeprefix(prefix): t for k, t in weights.items() if k.startswith(prefix)}


def of_role(weights: Mapping[str, Tensor], role: str) -> Weights:
    """Return the weights of one role under their names."""
    return {name: tensor for name, tensor in weights.items() if name.startswith(f"{role}/")}


def without(weights: Mapping[str, Tensor], *roles: str) -> Weights:
    """Return the weights of all other roles; the same object if these roles have no weights."""
    prefixes = tuple(f"{role}/" for role in roles)
    kept = {k: t for k, t in weights.items() if not k.startswith(prefixes)}
    return weights if len(kept) == len(weights) else kept


def filled_like(weights: Mapping[str, Tensor], keys: Iterable[str], value: float = 0.0) -> Weights:
    """Return a tensor of ``value`` in the shape, dtype and device of each weight of ``keys``.

    On the meta device, ``torch.zeros_like`` and its kin import sympy, which takes half a second.
    """
    found = {key: weights[key] for key in keys}
    return {k: torch.full(t.shape, value, dtype=t.dtype, device=t.device) for k, t in found.items()}


def tensors_of(net: nn.Module) -> Weights:
    """Return copies of a net's parameters and buffers on the CPU, by the name of its state dict."""
    plain = torch.contiguous_format
    state = net.state_dict().items()
    return {k: t.detach().to("cpu", copy=True, memory_format=plain) for k, t in state}
