"""LG-FedAvg — Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, Think Locally, Act
Globally: Federated Learning with Local and Global Representations, 2020, Algorithm 1.
https://arxiv.org/abs/2001.01523

    paper         here                              paper     here
    theta^l_k     the private state of client k     N_k       scalars["num_examples"]
    theta^g       weights that ``shares`` names     H_k       out.features

Deviations: there is no ensemble of all clients' local parts for a new client, and clients begin
with equal local parts, from ``[net] weights`` where the paper begins after FedAvg.
"""

from __future__ import annotations

from typing import ClassVar

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg


@register("lg-fedavg")
class LgFedAvg(FedAvg):
    """FedAvg over the head; every client keeps a base, its representation, of its own."""

    citation: ClassVar[str] = "Liang et al., 2020"
    takes_targets: ClassVar[bool] = True
    takes_own_nets: ClassVar[bool] = True

    private: tuple[str, ...] = ("base/",)
    """Prefixes of the weights that stay with the client; ``*`` stands for anything in them. None is
    FedAvg."""
