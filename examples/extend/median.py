"""The coordinate-wise median of what clients trained: a few liars cannot move it far.

Yin et al., Byzantine-Robust Distributed Learning, ICML 2018. https://arxiv.org/abs/1803.01498

    fedsrv launch examples/quickstart.toml --out run --set method.name=examples/extend/median.py:Median
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedtide import (
    Bundle,
    FedAvg,
    Reduction,
    ServerContext,
    ServerState,
    Uploads,
)


@dataclass(frozen=True, kw_only=True)
class Median(FedAvg):
    """FedAvg with a median in place of the mean."""

    citation: ClassVar[str] = "Yin et al., ICML 2018"
    reduction: ClassVar[Reduction] = "each"

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        trained = [u.weights for u in uploads.values() if u.scalars["num_examples"]]
        if not trained:
            return state
        weights = {
            key: torch.stack([each[key] for each in trained]).median(dim=0).values
            for key in trained[0]
        }
        return replace(state, common=Bundle(weights))
