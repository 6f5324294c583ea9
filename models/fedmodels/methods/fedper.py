"""FedPer — Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
https://arxiv.org/abs/1912.00818

    paper   here                              paper   here
    W_B     weights that ``shares`` names     K_P     private
    W_Pj    the private state of client j     n_j     scalars["num_examples"]

Deviations: batch-normalisation statistics of the base travel with it; there is no global model
unless heads are sent up for evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
from fedmodels.parts import evaluation_heads as heads
from fedmodels.tensors.bundle import Bundle, BundleSpec, ClientId, Weights
from fedmodels.training.method import ClientContext, Run, ServerContext, ServerState


@register("fedper")
@dataclass(frozen=True, kw_only=True)
class FedPer(FedAvg):
    """FedAvg over the base; every client keeps a head of its own."""

    citation: ClassVar[str] = "Arivazhagan et al., 2019"

    private: tuple[str, ...] = ("head/",)
    """Prefixes of the weights that stay with the client; none is FedAvg."""
    eval_upload_head: bool = False
    """Send private weights up, for scoring a global model with their mean and nothing else."""

    @property
    def views(self) -> tuple[str, ...]:
        own = ("after_local", "after_downlink")
        if not self.private:
            return ("global", "after_local")
        return ("global", *own) if self.eval_upload_head else own

    def shares(self, name: str) -> bool:
        return not name.startswith(self.private)

    def shared(self, weights: Weights) -> Weights:
        return heads.travelling(weights, self.shares, self.eval_upload_head)

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return heads.trained_part(state.common), {}

    def evaluation(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        extra = heads.evaluation_part(state.common)
        return heads.trained_part(state.common), heads.sent_to_everyone(ctx.run, extra)

    def payload_spec(self, run: Run) -> tuple[BundleSpec, BundleSpec]:
        sent = Bundle(weights=self.shared(run.forms))
        extra = heads.evaluation_part(sent).weights
        return BundleSpec.of(heads.trained_part(sent)), heads.evaluation_spec(extra)

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, {**heads.received(payload), **state.weights})

    def load_global(self, ctx: ClientContext, payload: Bundle) -> None:
        load_weights(ctx.net, heads.received(payload))
