"""What a net costs to compute."""

from __future__ import annotations

import torch

from fedmodels.nets.split import SplitNet


@torch.no_grad()
def multiply_adds(net: SplitNet, input_shape: tuple[int, ...]) -> int:
    """Return the multiply-adds of one example's forward pass: matrix products and convolutions.

    Args:
        net: any net; its buffers are left as they are.
        input_shape: of one example.
    """
    from torch.utils.flop_counter import FlopCounterMode  # loads triton, where that is installed

    training = net.training
    net.eval()
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, *input_shape))
    net.train(training)
    return int(counter.get_total_flops()) // 2
