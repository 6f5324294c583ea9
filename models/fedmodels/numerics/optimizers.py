"""torch's optimisers without its compiler, which takes two seconds and 79 MB to load."""

from __future__ import annotations

import inspect
from typing import TypeVar, cast

import torch
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=type[Optimizer])


def eager(kind: Kind) -> Kind:
    """Return a class of optimiser that makes the same steps and is never compiled.

    torch wraps these functions, and each wrapper imports ``torch._dynamo`` when it is first called.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    step.hooked = True  # else torch wraps it once more, to profile
    return cast(Kind, type(kind.__name__, (kind,), {**bare, "step": step}))


SGD, Adam, AdamW = eager(torch.optim.SGD), eager(torch.optim.Adam), eager(torch.optim.AdamW)
