"""What FedDrift begins with in two readings of its code; docs/methods/feddrift.md has sources."""

from __future__ import annotations

from fedmodels.methods.variants import Variants
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedplugins.methods.feddrift import FedDrift


class OnePerClient(FedDrift):
    """Each client begins with a model of its own, as in the code's ``H_A_F_1_06_0``.

    From their second task on, models that fit alike merge. Clients for whose model there is no
    room have the one of least loss, as after a drift.
    """

    def _drifts(self, ctx: ClientContext, state: Bundle, accuracy: float) -> bool:
        return ctx.task == 0 or super()._drifts(ctx, state, accuracy)


OF = {"feddrift": Variants(readings={"begins": {"one": None, "client": OnePerClient}})}
