"""Secure sums once their masks are off: what they say, and whether honest clients come to it.

Nobody sees a single upload. So a sum that honest clients cannot come to counts for nothing, and its
group is all that can be named. One that they can come to, and that moved the weights much farther
than the sums before it, is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedmodels.errors import PayloadError
from fedmodels.secure_sum.fixed_point import FixedPoint, added
from fedmodels.secure_sum.masks import Vector
from fedmodels.tensors.differences import Measured
from fedmodels.tensors.uploads import Summed
from fedmodels.training.contexts import ServerContext
from fedmodels.training.secure_upload import SecureUpload
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.cohort import Answers, Trip
from fedsrv.engine.comparison import MIN_COHORT, SUSPECT, oddities
from fedsrv.engine.server_part import Kernel
from fedsrv.parts.secure_group import SecureGroup
from fedsrv.state.record import of_parts

Opened = Sequence[tuple[SecureGroup, Vector]]
"""Groups, and the sums of their uploads without masks."""
COMPARED = 10
"""Earlier sums that a sum is compared with."""


class OpenedSums:
    """Reads the sums of a run."""

    def __init__(self, parts: Kernel) -> None:
        """Begin; how far earlier sums moved the weights stands in the records."""
        self.parts = parts
        records = (of_parts(record) for record, _ in parts.store.ledger.records())
        self._moved = [
            norms for record in records for norms in record.get("secure_sum", {}).get("moved", ())
        ][-COMPARED:]

    def of(
        self,
        ctx: ServerContext,
        trip: Trip,
        numbers: FixedPoint,
        opened: Opened,
        results: Answers,
    ) -> list[Mapping[str, float]]:
        """Put what sums come to into the results: of each group for a rule, else of all together.

        Groups whose sums are no sums of honest uploads are set aside. Return how far each sum moved
        the parts of a model.
        """
        secure = self.parts.plan.wire.part(SecureUpload)

        def summed(clients: Sequence[int], total: Vector) -> Summed | None:
            declared = [results.by_client[client].upload for client in clients]
            return secure.summed_up(total, numbers, trip.common.weights, declared)

        sound, found = list[tuple[SecureGroup, Vector]](), list[Summed | None]()
        for group, total in opened:
            try:
                found.append(summed(group.counted, total))
                sound.append((group, total))
            except PayloadError as error:
                why = f"the secure sum of its group is no sum of honest uploads: {error}"
                self.set_aside(ctx, results, group, why)
        if len(sound) > 1 and not self.parts.rule.reads_each:
            clients = [client for group, _ in sound for client in group.counted]
            found = [summed(clients, added([total for _, total in sound]))]
        results.sums = [one for one in found if one is not None]
        measured = [trip.given.measured(one.mean) for one in results.sums]
        self._tell_of_far_ones(ctx, measured)
        return [one.norms for one in measured]

    def set_aside(self, ctx: ServerContext, results: Answers, group: SecureGroup, why: str) -> None:
        """Let a group not count, and say why."""
        for client in group.counted:
            results.set_aside(client, why)
        members = clients_text([*map(str, group.counted)])
        line = f"interaction {ctx.interaction + 1} counts for none of {members}: {why}"
        self.parts.events.tell("note", line=line)

    def _tell_of_far_ones(self, ctx: ServerContext, sums: Sequence[Measured]) -> None:
        """Tell of sums that are much farther from what clients were given than those before."""
        for one in sums:
            odd = oddities({0: one}, SUSPECT, self._moved).get(0)
            if odd is not None and odd.of >= MIN_COHORT:
                line = (
                    f"interaction {ctx.interaction + 1}: a secure sum is far from those before it "
                    f"({odd}, this one with them), as if one of its clients had lied: "
                    "[privacy.secure_sum] clip bounds how far one moves the mean"
                )
                self.parts.events.tell("note", line=line)
        self._moved = [*self._moved, *(one.norms for one in sums)][-COMPARED:]
