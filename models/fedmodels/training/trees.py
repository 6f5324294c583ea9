"""What a loss refers to, as a tree: mappings, sequences and dataclasses around tensors.

An *atom* is a tensor, or an object that nobody looks into, such as a net. Numbers, words and
``None`` belong to the form of a tree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor


@runtime_checkable
class Whole(Protocol):
    """An atom that consists of tensors, and can be copied: a net, for instance."""

    def everything(self) -> dict[str, Tensor]:
        """Return its tensors by name."""
        ...

    def copy(self) -> Self:
        """Return another one with equal tensors of its own."""
        ...


def atoms(tree: Any) -> Iterator[Any]:
    """Yield the atoms of a tree, in the order of :func:`mapped`."""
    branches = _branches(tree)
    if branches is None:
        yield tree
    else:
        for branch in branches:
            yield from atoms(branch)


def form(tree: Any, of: Callable[[Any], Any]) -> Any:
    """Return all of a tree but its atoms, of which ``of`` says what counts: a key of dicts."""
    branches = _branches(tree)
    if branches is None:
        return of(tree)
    names = tuple(tree) if isinstance(tree, Mapping) else ()
    value = tree if isinstance(tree, bool | int | float | str) else None
    return type(tree), names, value, tuple(form(branch, of) for branch in branches)


def mapped(tree: Any, of: Callable[[Any], Any]) -> Any:
    """Return a copy of a tree with ``of(atom)`` in place of each atom."""
    branches = _branches(tree)
    if branches is None:
        return of(tree)
    found = [mapped(branch, of) for branch in branches]
    if isinstance(tree, Mapping):
        return dict(zip(tree, found, strict=True))
    if is_dataclass(tree):
        other = copy.copy(tree)
        for each, branch in zip(fields(tree), found, strict=True):
            object.__setattr__(other, each.name, branch)
        return other
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*found)
    return type(tree)(found) if found else tree


def tensors_in(atom: Any) -> list[Tensor]:
    """Return the tensors of an atom; none of one that nobody can look into."""
    if isinstance(atom, Tensor):
        return [atom]
    return list(atom.everything().values()) if isinstance(atom, Whole) else []


def _branches(tree: Any) -> list[Any] | None:
    """Return what a tree consists of; None of an atom."""
    if isinstance(tree, Tensor | Whole | type):
        return None
    if isinstance(tree, Mapping):
        return list(tree.values())
    if is_dataclass(tree):
        return [getattr(tree, each.name) for each in fields(tree)]
    if isinstance(tree, tuple | list):
        return list(tree)
    if tree is None or isinstance(tree, bool | int | float | str):
        return []
    return None
