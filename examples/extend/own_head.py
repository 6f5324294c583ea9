"""Private heads: clients share the base, and each keeps its head, smoothed over its rounds.

fedsrv launch quickstart --out run --set method.name=examples/extend/own_head.py:OwnHead
"""

from dataclasses import replace
from typing import Any

from fedtide import Bundle, ClientContext, FedAvg, RunFacts


class OwnHead(FedAvg):
    """FedAvg on the base, and a private head h: h <- s h + (1 - s) (h after local training)."""

    private = ("head/",)  # uploads and payloads contain only the rest

    smoothing: float = 0.5
    """s, the part of the old head; 0 keeps the one just trained."""

    def reported(self, run: RunFacts) -> frozenset[str]:
        return frozenset({"rounds_trained"})

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        heads = super().init_client(run, client)  # the private weights
        return replace(heads, scalars={"rounds": 0.0})

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        trained = super().after_local(ctx, state, refs).weights
        rounds = state.scalars["rounds"] + 1
        s = self.smoothing if rounds > 1 else 0.0  # the initial head is not the client's
        head = {key: s * state.weights[key] + (1 - s) * new for key, new in trained.items()}
        ctx.metrics["rounds_trained"] = rounds
        return Bundle(head, scalars={"rounds": rounds})
