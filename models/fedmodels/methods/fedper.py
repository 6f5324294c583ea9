"""FedPer — Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
https://arxiv.org/abs/1912.00818

    paper   here                              paper   here
    W_B     weights that ``shares`` names     K_P     private
    W_Pj    the private state of client j     n_j     scalars["num_examples"]

Deviations: batch-normalisation statistics of the base travel with it; there is no global model
unless heads are sent up for evaluation.
"""

from __future__ import annotations

from typing import ClassVar

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg


@register("fedper")
class FedPer(FedAvg):
    """FedAvg over the base; every client keeps a head of its own."""

    citation: ClassVar[str] = "Arivazhagan et al., 2019"

    private: tuple[str, ...] = ("head/",)
    """Prefixes of the weights that stay with the client; none is FedAvg."""
