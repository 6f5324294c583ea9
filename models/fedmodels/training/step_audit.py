"""What a training step reads, writes and asks the processor for, operator by operator.

A CUDA graph repeats the operators of a step on the same memory, and no line of Python. A step that
waits for a value, calculates on the processor or reads memory that nobody keeps in its place would
come to other numbers in a graph, or to none. An audit of a real step finds that out beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Of operators of which the processor has to know a value, or how large the result is."""
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index)
"""Operators that choose by values where an index is a mask, and else do not."""


class StepAudit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which every operator of a step is looked at.

    Attributes:
        why: what stands against a graph of the step; empty if nothing does.
        read: the places of the memory that the step reads and has not made.
        written: the places of the memory that the step writes and has not made.
        calls: the operators with all but the values of their tensors, to compare two steps.
    """

    def __init__(self, device: torch.device) -> None:
        """Look at a step on a device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.why, self.calls = "", list[Any]()
        self.read, self.written = set[int](), set[int]()
        self._device, self._made = device, set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator, and note what it does."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
        if given or made:
            self._look(func, args, kwargs, [*given, *made])
            self._place(func, args, given, made)
            self.calls.append((func, tree_map(_told, (args, kwargs))))
        return found

    def _look(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        packet = func.overloadpacket
        name = str(packet).removeprefix("aten.")
        if kwargs.get("generator") is not None:
            self._stands(f"{name} draws from a generator of its own")
        if any(tensor.device.type != self._device.type for tensor in tensors):
            self._stands(f"{name} works on the processor")
        if packet in INDEXED:
            filled = packet is not aten.index and args[2].numel() == 1  # as masked_fill does it
            if not filled and any(i is not None and i.dtype == torch.bool for i in args[1]):
                self._stands(f"{name} chooses rows by a mask")
        elif any(tag in func.tags for tag in READS):
            self._stands(f"{name} waits for a value")

    def _stands(self, why: str) -> None:
        self.why = self.why or why

    def _place(self, func: Any, args: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """Tell new memory from that which was there before."""
        before = set(places(given))
        self.read |= before - self._made
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
                self.written |= set(places(tensors)) - self._made
        self._made |= set(places(made)) - before


def places(tensors: Iterable[Tensor]) -> list[int]:
    """Return where the memory of tensors begins: tensors of one block have one place."""
    return [t.untyped_storage().data_ptr() for t in tensors if t.numel()]


def _told(value: Any) -> Any:
    """Return what two calls with other tensors have in common."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else repr(value)
