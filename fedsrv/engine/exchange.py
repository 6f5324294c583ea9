"""The exchange of a run unless a part brings another: a whole cohort is asked, and waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedmodels.training.contexts import ServerState
from fedsrv.engine.cohort import AllOf, Answers, too_few
from fedsrv.engine.server_part import Exchange, Interaction


class WholeCohort(Exchange):
    """Waits for a whole cohort, or for the first of more clients than are needed."""

    def train(self, at: Interaction, state: ServerState) -> Answers:
        """Let the cohort train; leave out uploads that do not count."""
        parts = self.parts
        if not at.ctx.cohort:
            return self.nobody(at, state)
        trip = parts.training(at.ctx, state, at.plan.is_scored(at.step))
        results = parts.cohort.send_and_receive(trip)
        out = parts.judged(at, results)
        left = [client for client in results.by_client if client not in out]
        check_left(out, left, parts.experiment.server.min_clients, at.ctx.round)
        parts.leave_out(at.ctx, results, out)
        if not out or results.mean is None:
            return results
        orders = {client: trip.orders[client] for client in left}
        without = replace(trip, orders=orders, until=AllOf(at.plan.needed_uploads(left)))
        # clients bring what they sent again
        return parts.cohort.send_and_receive(without).after(results)


def check_left(
    out: Mapping[int, str], left: Sequence[object], min_clients: int | None, round: int
) -> None:
    """Check that enough uploads are left without those that are left out.

    Raises:
        TooFewClients: fewer than ``min_clients`` are, where the config gives it; says how to go on.
    """
    if out and len(left) < (min_clients or 1):
        raise too_few(out, round, "upload", min_clients or 1)
