"""Nets whose rows are independent: what an example comes to depends on no other of its batch.

It is known by construction, as no trial shows it: a net may look at its batch for some contents
alone. Every module of a net has to be one of torch's that are listed here, or of a class that says
``rows_are_independent`` in its own body: then rows are the first dimension of all that it computes,
and none sees another one.
"""

from __future__ import annotations

from torch import nn

from fedmodels.nets.split import SplitNet

MARK, OWN_ROWS = "rows_are_independent", "one_for_each_row"
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, nn.PReLU)
POINTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.LogSigmoid, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
)  # fmt: skip
POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.ZeroPad1d, nn.ZeroPad2d, nn.Upsample, nn.PixelShuffle,
)  # fmt: skip
KNOWN = frozenset((*CONTAINERS, *LAYERS, *POINTWISE, *POOLS))


def rows_are_independent(net: SplitNet) -> bool:
    """Tell whether no example of a batch feels another one, by what the net is made of."""
    return not net.mixes_examples and all(map(_keeps_rows_apart, net.parts))


def row_parameters(net: SplitNet) -> frozenset[str]:
    """Return the keys of parameters (1, …) that are broadcast over the rows, as classes say."""
    own = {
        id(getattr(part, name)) for part in net.parts for name in vars(type(part)).get(OWN_ROWS, ())
    }
    return frozenset(key for key, p in net.parameters_by_key().items() if id(p) in own)


def _keeps_rows_apart(part: nn.Module) -> bool:
    """Tell whether a module keeps rows apart; its parts are looked at by themselves."""
    kind = type(part)
    is_changed = "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks
    if is_changed or part._backward_hooks or part._backward_pre_hooks:
        return False
    if isinstance(part, nn.Flatten | nn.Unflatten):
        first = part.start_dim if isinstance(part, nn.Flatten) else part.dim
        return kind in (nn.Flatten, nn.Unflatten) and isinstance(first, int) and first > 0
    return kind in KNOWN or (MARK in vars(kind) and bool(getattr(part, MARK)))
