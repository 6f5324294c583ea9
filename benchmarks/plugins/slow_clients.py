"""FedAvg whose first clients take long for every order, as slow machines or links do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedmodels.methods.fedavg import FedAvg
from fedmodels.training.contexts import ClientContext


@dataclass(frozen=True, kw_only=True)
class SlowClients(FedAvg):
    """Clients wait before they train; the bits are FedAvg's."""

    citation: ClassVar[str] = "benchmarks"

    slow: int = 2
    """How many clients are slow: those with the lowest ids."""
    slow_s: float = 4.0
    """Seconds that a slow client waits."""
    quick_s: float = 0.2
    """Seconds that any other client waits."""

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Any) -> float:
        assert isinstance(ctx.client, int)
        time.sleep(self.slow_s if ctx.client < self.slow else self.quick_s)
        return super().fit(ctx, x, y, refs)
