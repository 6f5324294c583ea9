"""The base of methods whose clients train with more than a net: FedAvg, and what goes beside it.

The server keeps it as its own state: a flow, a generator, a memory. Orders to train bring it to
each client of the cohort, with the classes that were announced up to now. Evaluation does without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedmodels.methods.fedavg import FedAvg
from fedmodels.techniques.continual import announced
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.roles import without
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState


@dataclass(frozen=True, kw_only=True)
class Accompanied(FedAvg):
    """FedAvg whose orders to train bring more than the net's weights."""

    replaces_old_data: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]]
    """Roles of the weights that go beside the net's own, such as ``flow`` of ``flow/…``."""

    # --- server half ---------------------------------------------------------------------------

    def beside(self, ctx: ServerContext, state: ServerState) -> Bundle:
        """Return the weights sent beside the common part: the server's own, unless overridden."""
        return Bundle(weights=state.own.weights, histogram=announced(ctx, state.own.histogram))

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return state.common, dict.fromkeys(ctx.cohort, self.beside(ctx, state))

    def evaluation(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return state.common, {}

    # --- client half ---------------------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        self.load_global(ctx, payload)

    def global_weights(self, common: Bundle) -> Weights:
        return without(common.weights, *self.roles)
