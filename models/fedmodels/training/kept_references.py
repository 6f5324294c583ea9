"""What a loss refers to, in memory that stays: what a graph of a step reads and writes.

References are made anew for each training. A graph has copies of the tensors that its step touches;
the rest of the references it cannot see.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fedmodels.training.contexts import ClientContext
from fedmodels.training.step_audit import places
from fedmodels.training.trees import atoms, mapped, tensors_in


class NotCaptured(Exception):
    """A step that no graph can repeat, and why."""


class Copies:
    """Copies of references that graphs read and write, in memory that stays."""

    def __init__(self, device: torch.device) -> None:
        """Begin with nothing."""
        self._device = device
        self._own: dict[int, Any] = {}
        """By the number of an atom in its tree."""
        self._written = set[int]()

    def make(self, tree: Any, net: set[int], touched: set[int], written: set[int]) -> None:
        """Copy the atoms of a tree that steps touch; what lies in the net stays there.

        Atoms are told by their numbers, the net by the places of its memory.
        """
        for number, atom in enumerate(atoms(tree)):
            if number in touched and number not in self._own:
                inside = net & {*places(tensors_in(atom))}
                self._own[number] = atom if inside else _copied(atom)
        self._written |= written

    def tree(self, like: Any) -> Any:
        """Return a tree of the copies; what no step touches cannot be read in it."""
        numbers = count()
        return mapped(like, lambda atom: self._held(next(numbers), atom))

    def _held(self, number: int, atom: Any) -> Any:
        return self._own[number] if number in self._own else _absent(atom, self._device)

    def follow(self, ctx: ClientContext) -> None:
        """Set the rates of this epoch."""
        follow(self._own.values(), ctx)

    def take(self, tree: Any) -> None:
        """Copy what a tree holds."""
        self._copy(tree, self._own.keys(), back=False)

    def give(self, tree: Any) -> None:
        """Copy to a tree what steps wrote."""
        self._copy(tree, self._written, back=True)

    @torch.no_grad()
    def _copy(self, tree: Any, wanted: Any, *, back: bool) -> None:
        given, own = list[Tensor](), list[Tensor]()
        for number, atom in enumerate(atoms(tree)):
            if number in wanted and atom is not self._own[number]:
                given += tensors_in(atom)
                own += tensors_in(self._own[number])
        if given:
            torch._foreach_copy_(*((given, own) if back else (own, given)))


def follow(found: Iterable[Any], ctx: ClientContext) -> None:
    """Let nets that train beside the client's have the rate of this epoch before its steps."""
    for atom in found:
        if hasattr(atom, "follow"):
            atom.follow(ctx)


class _Absent:
    """What stands for an object that a graph cannot refer to."""

    def __init__(self, kind: str) -> None:
        object.__setattr__(self, "kind", kind)

    def __getattribute__(self, name: str) -> Any:
        raise NotCaptured(f"its loss refers to a {object.__getattribute__(self, 'kind')}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotCaptured(f"its loss refers to a {object.__getattribute__(self, 'kind')}")


def facts(device: torch.device, net: set[int], atom: Any) -> Any:
    """Return what a graph takes for granted of an atom of references."""
    own = tensors_in(atom)
    if _is_elsewhere(atom, device):
        return "elsewhere"
    told = [(t.shape, t.stride(), t.dtype, t.device.type, t.requires_grad) for t in own]
    return type(atom), tuple(told), bool(net & {*places(own)}), switches(atom)


def switches(atom: Any) -> Any:
    """Return the numbers and words that the modules of a net hold, such as ``training``."""
    parts = atom.modules() if isinstance(atom, torch.nn.Module) else ()
    simple = (bool, int, float, str)
    return tuple(
        (name, value) for part in parts for name, value in vars(part).items()
        if isinstance(value, simple)
    )  # fmt: skip


def _copied(atom: Any) -> Any:
    if isinstance(atom, Tensor):
        return atom.detach().clone().requires_grad_(atom.requires_grad)
    return atom.copy()


def _absent(atom: Any, device: torch.device) -> Any:
    if isinstance(atom, Tensor) and not _is_elsewhere(atom, device):
        return torch.empty(atom.shape, dtype=atom.dtype, device="meta")
    return _Absent(type(atom).__name__)


def _is_elsewhere(atom: Any, device: torch.device) -> bool:
    return isinstance(atom, Tensor) and atom.device.type != device.type
