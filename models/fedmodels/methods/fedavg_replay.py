"""FedAVG-replay — FedAvg whose clients replay the classes they met, as in pFedGRP.
Tan and Liu, https://arxiv.org/abs/2410.01502v2, appendices B and D.1

    paper    here                          paper       here
    C        state.common.weights          A_{i,c}     private generators, one for each class

Generators never leave a client. The received model filters; the model trained from it says which
generators are trained again. Deviations: docs/methods/fedavg-replay.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedmodels.methods import register
from fedmodels.methods.bases.replay import GenerativeReplay


@register("fedavg-replay")
@dataclass(frozen=True, kw_only=True)
class FedAvgReplay(GenerativeReplay):
    """FedAvg with class replay; no alignment, no personal model."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2, baseline"
