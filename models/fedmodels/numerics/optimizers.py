"""torch's optimisers without its compiler, which takes two seconds and 79 MB to load."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=type[Optimizer])


def eager(kind: Kind) -> Kind:
    """Return a class of optimiser that makes the same steps and is never compiled.

    torch wraps these functions, and each wrapper imports ``torch._dynamo`` when it is first called.
    Hooks before a step are called; hooks after a step are not.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    plain: Callable[..., Any] = torch.no_grad()(inspect.unwrap(kind.step))

    def step(self: Optimizer) -> None:
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        plain(self)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it once more, to profile
    return cast(Kind, type(kind.__name__, (kind,), {**bare, "step": step}))


@cache
def kind_of(name: str) -> type[Optimizer]:
    """Return the class of ``torch.optim`` with this name in small letters, never compiled."""
    found = {each.lower(): each for each in dir(torch.optim)}
    return eager(cast(type[Optimizer], getattr(torch.optim, found[name])))


Adam = eager(torch.optim.Adam)
SGD = eager(torch.optim.SGD)


def descend(loss: Tensor, optimizer: Optimizer) -> Tensor:
    """Take one step down a loss; return it without a gradient."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()
