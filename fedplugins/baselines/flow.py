"""A conditional normalising flow: embeddings of a class, to and from a standard normal.

Affine couplings as in Dinh et al., Density Estimation using Real NVP, ICLR 2017, section 3.4
(https://arxiv.org/abs/1605.08803), whose conditioners also see the class. It is the flow of AF-FCL.

Embeddings h are (B, d), latent z (B, d), labels y (B,).

The order in which a coupling sees the coordinates is a buffer, ``order{k}``. Flows may be averaged
only if all of them have the same orders: who builds one takes the orders of somebody else's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.errors import ConfigError, PayloadError
from fedmodels.host.devices import to_device

COUPLINGS = 4
MIN_SCALE = 1e-3


class Block(nn.Module):
    """``x + linear(relu(linear(relu(x))))``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width)."""
        step: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + step


class Coupling(nn.Module):
    """Scale and shift the second half of the coordinates by what the first half and y say.

    Args:
        width: d.
        num_classes: K.
        hidden: width of the conditioner.
        blocks: residual blocks of the conditioner.
    """

    def __init__(self, width: int, num_classes: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.kept, self.num_classes = width // 2, num_classes
        last = nn.Linear(hidden, 2 * (width - self.kept))
        nn.init.zeros_(last.weight)  # every coupling begins as the same mild scaling
        nn.init.zeros_(last.bias)
        self.conditioner = nn.Sequential(
            nn.Linear(self.kept + num_classes, hidden),
            *(Block(hidden) for _ in range(blocks)),
            last,
        )

    def forward(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transformed coordinates (B, d) and the log-determinant (B,)."""
        kept, moved = h[:, : self.kept], h[:, self.kept :]
        scale, shift = self._affine(kept, y)
        return torch.cat([kept, moved * scale + shift], 1), scale.log().sum(1)

    def inverse(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the h (B, d) that :meth:`forward` maps to z."""
        kept, moved = z[:, : self.kept], z[:, self.kept :]
        scale, shift = self._affine(kept, y)
        return torch.cat([kept, (moved - shift) / scale], 1)

    def _affine(self, kept: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        labels = F.one_hot(y, self.num_classes).to(kept.dtype)
        raw, shift = self.conditioner(torch.cat([kept, labels], 1)).chunk(2, 1)
        return torch.sigmoid(raw + 2) + MIN_SCALE, shift


class Flow(nn.Module):
    """p(h | y), by four couplings; before each the coordinates are turned round or shuffled.

    Args:
        width: d, at least 2.
        num_classes: K.
        hidden: width of the conditioners.
        blocks: residual blocks of each.

    Raises:
        ConfigError: there is nothing to couple.
    """

    def __init__(self, width: int, num_classes: int, hidden: int = 512, blocks: int = 2) -> None:
        super().__init__()
        if width < 2:
            raise ConfigError(f"a flow needs embeddings of two coordinates or more, not {width}")
        self.width = width
        couplings = [Coupling(width, num_classes, hidden, blocks) for _ in range(COUPLINGS)]
        self.couplings = nn.ModuleList(couplings)
        for k in range(COUPLINGS):
            turned = torch.arange(width).flip(0)
            self.register_buffer(f"order{k}", torch.randperm(width) if k % 2 else turned)

    def _order(self, k: int) -> Tensor:
        order = getattr(self, f"order{k}")
        assert isinstance(order, Tensor)
        return order

    def forward(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (B, d) and the log-determinant (B,) of the map from h."""
        total = torch.zeros(len(h), dtype=h.dtype, device=h.device)
        for k, coupling in enumerate(self.couplings):
            h, log_det = coupling(h[:, self._order(k)], y)
            total = total + log_det
        return h, total

    def inverse(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the h (B, d) that :meth:`forward` maps to z."""
        for k, coupling in reversed(list(enumerate(self.couplings))):
            assert isinstance(coupling, Coupling)
            z = coupling.inverse(z, y)[:, self._order(k).argsort()]
        return z

    def log_density(self, h: Tensor, y: Tensor) -> Tensor:
        """Return log p(h | y) (B,)."""
        return self.log_density_of(*self(h, y))

    def log_density_of(self, z: Tensor, log_det: Tensor) -> Tensor:
        """Return log p(h | y) (B,) of what :meth:`forward` returned."""
        return log_det - 0.5 * (z.square().sum(1) + self.width * math.log(2 * math.pi))

    @torch.no_grad()
    def sample(self, y: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return drawn embeddings (B, d) of labels (B,), and the z (B, d) they come from.

        Args:
            y: labels.
            noise: a CPU generator, so that every device draws the same z.
        """
        z = to_device(torch.randn(len(y), self.width, generator=noise), y.device)
        return self.inverse(z, y), z


def is_order(key: str) -> bool:
    """Tell whether the last part of a tensor's name is that of an order."""
    return key.rpartition("/")[2].rpartition(".")[2].startswith("order")


def check_orders(tensors: Mapping[str, Tensor]) -> None:
    """Check that every order among a flow's tensors is a permutation.

    Raises:
        PayloadError: names the first one that is not.
    """
    for key, order in tensors.items():
        if is_order(key) and not torch.equal(order.cpu().sort().values, torch.arange(len(order))):
            raise PayloadError(f"tensor {key!r} is no permutation of 0…{len(order) - 1}")
