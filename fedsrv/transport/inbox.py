"""Receives and checks what Push calls bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedmodels.console.printable import printable
from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import ClientId
from fedmodels.times import PUSH_S, transfer_s
from fedpb.failures import failed_by
from fedpb.frames import FRAME_BYTES
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.transport.gate import Gate
from fedsrv.transport.intake import Push
from fedsrv.transport.open_trips import OpenTrip
from fedsrv.transport.refusals import Superseded, Unfinished
from fedsrv.transport.remote_cohort import RemoteCohort


def push_limit_s(num_bytes: int) -> float:
    """Return how long a call has for so many bytes."""
    return PUSH_S + transfer_s(num_bytes)


Ends = Callable[[ClientId, OpenTrip, Push, Any], None]
"""Takes a checked result of a client, or why the client failed for this trip."""


class Inbox:
    """Receives and checks what Push calls bring; the trip's intake says how."""

    def __init__(self, cohort: RemoteCohort, gate: Gate, ends: Ends | None = None) -> None:
        """Keep results in the cohort, unless something else takes them."""
        self.cohort, self.gate, self._ends = cohort, gate, ends or self._keep

    def take(self, clients: Sequence[ClientId], push: Push, context: Any) -> rpc.PushResponse:
        """Take the result of one order, or what several clients bring together.

        Raises:
            PayloadError: it is refused; the clients fail for this trip.
            Superseded: nobody wants it any more.
            NotReady: the clients should bring it again.
        """
        header = push.header
        trips = {client: self.cohort.begin_result(client, header) for client in clients}
        answered = [f"client {client}" for client, found in trips.items() if found is None]
        if 0 < len(answered) < len(trips):
            names = ", ".join(answered)
            raise Superseded(f"the sum holds results that have come without it: {names}")
        trip = trips[clients[0]]
        if trip is not None:
            trip.intake.check(header)
            kind, limit_s = "Sum" if header.members else "Push", push_limit_s(FRAME_BYTES)

            def moves() -> None:
                self.gate.renew(context, limit_s)
                self.cohort.hears(clients)

            push.moves = moves
            with (
                self.gate.alone([(kind, client) for client in clients], context),
                self.gate.within(context, limit_s),
            ):
                try:
                    self._receive(clients, trip, push)
                except Unfinished as error:
                    return rpc.PushResponse(received=error.received)
        return rpc.PushResponse(repeated_upload=trip is None)

    def _receive(self, clients: Sequence[ClientId], trip: OpenTrip, push: Push) -> None:
        failed = failed_by(push.header.reason, push.header.failure)
        if failed and not push.header.members:
            return self._ends(clients[0], trip, push, printable(failed))
        try:
            arrived = trip.intake.read(clients, push, self.cohort.spool.allocate)
        except PayloadError as error:
            line = printable(trip.intake.refusal(clients[0], push.header, error))
            for client in clients:
                self._ends(client, trip, push, line)
            raise
        return self._ends(clients[0], trip, push, arrived)

    def _keep(self, client: ClientId, trip: OpenTrip, push: Push, arrived: Any) -> None:
        taken = self.cohort.end_result(client, trip, arrived)
        if not (taken or isinstance(arrived, str)):
            who = "this sum" if push.header.members else client
            raise Superseded(f"interaction {push.header.interaction + 1} closed without {who}")
