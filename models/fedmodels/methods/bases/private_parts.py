"""What the methods with private parts share: FedAvg over a part of the weights.

The rest of a client's weights, such as its head, stays in its private state. Some papers score a
global model of such methods with the mean of the private parts: these then travel for scores alone,
as :mod:`fedmodels.techniques.evaluation_heads` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
from fedmodels.techniques import evaluation_heads as heads
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.run import RunFacts

PRIVATE_VIEWS = ("after_local", "after_downlink")
"""The models of a method without a global one."""


@dataclass(frozen=True, kw_only=True)
class PrivateParts(FedAvg):
    """FedAvg over the weights that ``shares`` names; the others may go up for scores."""

    eval_upload_head: bool = False
    """Send private weights up, for scoring a global model with their mean and nothing else; their
    bytes are counted apart."""

    @property
    def views(self) -> tuple[str, ...]:
        return ("global", *PRIVATE_VIEWS) if self.eval_upload_head else PRIVATE_VIEWS

    def shared(self, weights: Weights) -> Weights:
        return heads.travelling(weights, self.shares, self.eval_upload_head)

    def scored(self, state: ServerState) -> Weights:
        """Return the weights that travel down for scores alone."""
        return heads.evaluation_part(state.common).weights

    def net_weights(self, payload: Bundle) -> Weights:
        """Return the part of a payload's weights that belongs into the net."""
        return heads.received(payload)

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return heads.trained_part(state.common), {}

    def evaluation(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        extra = Bundle(weights=self.scored(state))
        return heads.trained_part(state.common), heads.sent_to_everyone(ctx.run, extra)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        sent = Bundle(weights=self.shared(run.forms))
        extra = heads.evaluation_part(sent).weights
        return BundleSpec.of(heads.trained_part(sent)), heads.evaluation_spec(extra)

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, {**self.net_weights(payload), **state.weights})

    def global_weights(self, common: Bundle) -> Weights:
        return self.net_weights(common)


@dataclass(frozen=True, kw_only=True)
class PrivatePrefixes(PrivateParts):
    """Private parts that prefixes name."""

    private: tuple[str, ...] = ("head/",)
    """Prefixes of the weights that stay with the client; none is FedAvg."""

    @property
    def views(self) -> tuple[str, ...]:
        return super().views if self.private else ("global", "after_local")

    def shares(self, name: str) -> bool:
        return not name.startswith(self.private)
