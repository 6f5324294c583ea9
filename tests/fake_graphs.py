"""Graphs of steps on the processor: operators of a step are kept, and called on the same memory.

As on a GPU, no line of Python runs when a step is repeated. A value that Python read, a tensor that
was made anew, a branch or a row chosen by data stay as they were when the step was recorded. And as
there, a recording changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """The operators of a step, and the memory that it changed, as that was before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, writes = kwargs or {}, False
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes = True
                self._keep(tensors(given))
        found = func(*args, **kwargs)
        shared = {place(tensor) for tensor in tensors((args, kwargs))}
        fresh = [tensor for tensor in tensors(found) if place(tensor) not in shared]
        self._made |= {place(tensor) for tensor in fresh}
        if writes or fresh:  # else it is a view, which sees what it shares
            self.calls.append((func, args, kwargs, tensors(found) if fresh else []))
        return found

    def _keep(self, written: list[Tensor]) -> None:
        for tensor in written:
            at = place(tensor)
            if tensor.numel() and at not in self._made and at not in self.before:
                with torch._C._DisableTorchDispatch():
                    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    self.before[at] = whole, whole.clone()

    @torch.no_grad()
    def undo(self) -> None:
        """Put memory back as it was before the step."""
        for whole, before in self.before.values():
            whole.copy_(before)

    @torch.no_grad()
    def play(self) -> None:
        """Call the operators again; results lie where they lay."""
        for func, args, kwargs, results in self.calls:
            found = tensors(func(*args, **kwargs))
            for old, new in zip(results, found, strict=bool(results)) if results else ():
                if place(old) != place(new):
                    old.detach().copy_(new.detach())


class TapeRecorder:
    """Stands for what records steps on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.records, self.replays = 0, 0

    def aside(self, step: Callable[[], None]) -> None:
        step()

    def recorded(self, step: Callable[[], object]) -> Callable[[], None]:
        drawn = torch.get_rng_state()
        tape = Tape()
        try:
            with tape:
                step()
        finally:
            torch.set_rng_state(drawn)
            tape.undo()
        self.records += 1

        def replay() -> None:
            self.replays += 1
            tape.play()

        return replay


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
