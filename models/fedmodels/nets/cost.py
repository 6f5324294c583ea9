"""What a net costs to compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedmodels.nets.split import SplitNet

EXAMPLES = 2
"""Size of the batch that is counted: some nets cannot be called with one example."""


@torch.no_grad()
def multiply_adds(net: SplitNet, input_shape: tuple[int, ...]) -> int:
    """Return the multiply-adds of one example's forward pass: matrix products and convolutions."""
    from torch.utils.flop_counter import flop_registry  # loads triton, where that is installed

    training = net.training
    net.eval()
    with _Operations(flop_registry) as operations:
        net(torch.zeros(EXAMPLES, *input_shape))
    net.train(training)
    return int(operations.flops) // 2 // EXAMPLES


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block that counts the floating-point operations of what is calculated in it.

    torch's own ``FlopCounterMode`` counts by the same table, and loads torch's compiler for it, a
    second and more.
    """

    def __init__(self, costs: Mapping[Any, Callable[..., int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = costs
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: what tells the compiler to look away would load the compiler."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Calculate, and add what that takes."""
        kwargs = kwargs or {}
        out: Tensor = func(*args, **kwargs)
        count = self.costs.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out
