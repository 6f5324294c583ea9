"""A net's kept copies: for whoever needs a second net of its shape for a while, again and again.

A teacher, a judge or a twin needs one once or twice for each client and round. Building it anew by
copying every module takes much longer than copying its tensors, which lie in one block.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedmodels.nets.split import SplitNet, load_weights

_KEPT: WeakKeyDictionary[SplitNet, dict[str, SplitNet]] = WeakKeyDictionary()
_OF_SPLIT_NETS = {"frozen", "own_names", "parts", "normalises_batches", "is_wide"} | {
    "_still", "_slots", "_parameter_slots", "_packed", "_places",
}  # fmt: skip
"""What any net finds out of its own modules."""
_OF_MODULES = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_HOOKS = {name for name in vars(nn.Module()) if "hooks" in name}
_CONSTANT = (
    bool, int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.memory_format,
)  # fmt: skip


def kept_copy(net: SplitNet, use: str) -> SplitNet:
    """Return a net like ``net.copy()``; for one net and use it is the same object each time.

    It is equal to the net as that is now, and nothing is left in it of what it was used for before.
    So it is for work that ends before the same net's copy is asked for again: one training. A net
    whose modules keep more than tensors, numbers and names is copied anew.
    """
    kept = _KEPT.setdefault(net, {})
    if use not in kept or not _follow(kept[use], net):
        kept[use] = net.copy()
    return kept[use]


def _follow(copy: SplitNet, net: SplitNet) -> bool:
    """Make a copy equal to the net that it was made of; False where only a new one would be."""
    if not all(map(_same_facts, net.parts, copy.parts)):
        return False
    _load(copy, net)
    for ours, theirs in zip(copy.parameters(), net.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
        ours.grad = None
    return True


def _same_facts(module: nn.Module, copied: nn.Module) -> bool:
    """Give a copied module the facts of another; False where one of them is no constant."""
    facts, copies = vars(module), vars(copied)
    skipped = _OF_MODULES | (_OF_SPLIT_NETS if isinstance(module, SplitNet) else set())
    if (facts.keys() ^ copies.keys()) - skipped:
        return False
    for name, value in facts.items():
        if name in _HOOKS:
            if value or copies[name]:
                return False
        elif name not in skipped:
            if not _is_constant(value):
                return False
            copies[name] = value
    return all(
        _copied(module._buffers[name], copied._buffers[name])
        for name in module._non_persistent_buffers_set
    )


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANT)


def _copied(buffer: Tensor | None, to: Tensor | None) -> bool:
    """Copy a buffer that is in no state dict; False where it has another shape."""
    if buffer is None or to is None:
        return buffer is to
    if buffer.shape != to.shape or buffer.dtype != to.dtype:
        return False
    to.copy_(buffer)
    return True


def _load(copy: SplitNet, net: SplitNet) -> None:
    packed, own = net.packed(), copy.packed()
    if packed is not None and own is not None and own.is_like(packed):
        own.block.copy_(packed.block)
    else:
        load_weights(copy, net.tensors())
