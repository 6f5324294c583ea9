"""A method that returns what it got: all that is left of a round is the framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedmodels.method import ClientContext
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg


@register("noop")
@dataclass(frozen=True, kw_only=True)
class Noop(FedAvg):
    """FedAvg without training."""

    citation: ClassVar[str] = "benchmarks"

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Any) -> float:
        return 0.0
