"""What the transformers share: attention, the feed-forward part, drop path, places of the ALP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.errors import ConfigError, suggestion
from fedmodels.nets.alp import ALP
from fedmodels.numerics.randomness import apart

PROTOTYPES = (2048, 1024, 512, 256, 128, 64)
"""Prototypes per block, from the input to the output (FedAli, section 5)."""


class Attention(nn.Module):
    """Multi-head self-attention over tokens (B, Z, d), written out.

    The fused kernels have no deterministic gradient on CUDA, and tokens are few here.
    """

    rows_are_independent: ClassVar[bool] = True

    def __init__(self, dim: int, heads: int, head_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.scale, self.dropout = heads, head_dim**-0.5, dropout
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token gathers from all tokens (B, Z, d)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, Z, 3, H, h)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, Z, h)
        weights = (q * self.scale @ k.transpose(-2, -1)).softmax(-1)
        weights = F.dropout(weights, self.dropout, self.training)
        gathered: Tensor = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return gathered


class FeedForward(nn.Module):
    """Two linear layers with an activation and dropout between them, token by token."""

    rows_are_independent: ClassVar[bool] = True

    def __init__(
        self, dim: int, hidden: int, activation: Callable[[Tensor], Tensor], dropout: float
    ) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.activation, self.dropout = activation, dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, Z, d)."""
        hidden = F.dropout(self.activation(self.fc1(x)), self.dropout, self.training)
        y: Tensor = self.fc2(hidden)
        return y


class DropPath(nn.Module):
    """Drop a residual branch for a whole sample with probability ``rate``, in training."""

    rows_are_independent: ClassVar[bool] = True

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch (B, …), scaled up where it is kept."""
        if not self.training or self.rate == 0:
            return x
        keep = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device) >= self.rate
        return x * keep / (1 - self.rate)


def check_rates(net: str, **rates: float) -> None:
    """Check that rates of dropout and drop path leave something.

    Raises:
        ConfigError: names the option that is not from 0 to below 1.
    """
    for option, rate in rates.items():
        if isinstance(rate, bool) or not 0 <= rate < 1:
            raise ConfigError(f"option {option}={rate!r} of net {net!r} must be from 0 to below 1")


def rising(rate: float, blocks: int) -> list[float]:
    """Return drop-path rates that grow linearly from 0 to ``rate``."""
    return torch.linspace(0, rate, blocks).tolist()


def alignments(
    net: str,
    dim: int,
    blocks: int,
    prototypes: Sequence[int] | None,
    switches: Mapping[str, object],
) -> list[nn.Module]:
    """Build the alignment layer of each block, after its first layer normalisation.

    The rest of the net draws the weights it would draw without.

    Args:
        net: the net's name, for messages.
        dim: d.
        blocks: how many layers.
        prototypes: prototypes per layer; ``None`` for a net without alignment, whose layers do
            nothing.
        switches: what :class:`ALP` takes by keyword.

    Raises:
        ConfigError: there are not as many prototype counts as blocks, or a switch is unknown.
    """
    if prototypes is None:
        if switches:
            raise ConfigError(
                f"net {net!r} has alignment switches but no alignment: set alp = true"
            )
        return [nn.Identity() for _ in range(blocks)]
    if len(prototypes) != blocks or min(prototypes) < 1:
        raise ConfigError(
            f"net {net!r} has {blocks} blocks; 'prototypes' gives {list(prototypes)} for them"
        )
    known = ALP.__init__.__kwdefaults__ or {}
    for switch in switches:
        if switch not in known:
            raise ConfigError(
                f"unknown alignment switch {switch!r} of net {net!r}.{suggestion(switch, known)}"
            )
    with apart("alignment"):
        return [ALP(dim, count, **switches) for count in prototypes]  # type: ignore[arg-type]
