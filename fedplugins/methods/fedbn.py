"""FedBN — Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization,
ICLR 2021, Algorithm 1. https://arxiv.org/abs/2102.07623

    paper          here
    w^(l), BN      run.batch_norm_weights, the private state
    w^(l), others  state.common.weights

Deviations: layers are told by their type, where the published code looks for ``bn`` in a name;
everyone counts alike, as there, though clients differ in size (``weighting``).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fedmodels.errors import ConfigError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.training.contexts import ServerState
from fedmodels.training.run import RunFacts


@register("fedbn")
class FedBN(FedAvg):
    """FedAvg of all layers but batch normalisation, which every client keeps for itself."""

    citation: ClassVar[str] = "Li et al., ICLR 2021"
    takes_targets: ClassVar[bool] = True
    views: ClassVar[tuple[str, ...]] = (
        "after_local",
        "after_downlink",
    )  # no two clients have one model

    weighting: Literal["examples", "uniform"] = "uniform"

    def shares(self, run: RunFacts, name: str) -> bool:
        return name not in run.batch_norm_weights

    def init_server(self, run: RunFacts) -> ServerState:
        if not run.batch_norm_weights:
            raise ConfigError(
                f"method 'fedbn' keeps the layers of batch normalisation at clients, and net "
                f"{run.experiment.net.name!r} has none here: take resnet20, or set [net] norm = "
                "'batch' of digits-cnn or cnn5"
            )
        return super().init_server(run)
