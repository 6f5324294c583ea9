"""What Push calls bring: the result of one client, or the sum of a relay's clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from fedmodels.errors import PayloadError
from fedmodels.printable import printable
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import check_numbers
from fedmodels.tensors.differences import STATISTICS, Measured, TrainingBase
from fedmodels.tensors.differences import WEIGHTS as PARAMETERS
from fedmodels.tensors.weighted_mean import mean_of_sums
from fedpb.codec import RawFrame, Receiver, read_chunk
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer
from fedsrv.transport.gate import Gate
from fedsrv.transport.open_trips import WEIGHTS, GroupSum, OpenTrip, dtypes_of_weights
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.sessions import NotReady, Superseded

ROUNDING = 1e-4
"""Part of a norm by which rounding to float32 may change it."""
PUSH_S, PUSH_BYTES_PER_S = 60.0, 16 << 10
"""Time limit of an upload: a fixed part, and its size at the rate of the slowest usable link."""


class RelayAtFault(PayloadError):
    """What a relay says beside a client's upload cannot be; the client is not to blame."""


def push_limit_s(num_bytes: int) -> float:
    """Return the time limit of an upload of this size."""
    return PUSH_S + num_bytes / PUSH_BYTES_PER_S


@dataclass
class Push:
    """A Push under way: its header, and what came with it."""

    header: rpc.PushHeader
    frame: RawFrame | None
    rest: Iterator[bytes]
    wire: int
    """Bytes that came so far."""

    digest: bytes = b""
    """Identifies the upload that was received: its header and the checksums of its frames."""
    is_whole: bool = False
    """Whether nothing more can come: it stood in one message with others."""

    @classmethod
    def begun(cls, stream: Iterator[bytes]) -> Self:
        """Return a Push of which the first message has come.

        Raises:
            PayloadError: that message has no header.
        """
        return cls._read(next(stream, b""), stream)

    @classmethod
    def whole(cls, data: memoryview) -> Self:
        """Return one of several results that came in one message.

        Raises:
            PayloadError: it has no header, or is the sum of a relay.
        """
        push = cls._read(data, iter(()), is_whole=True)
        if push.header.members:
            raise PayloadError("the sum of a relay has a Push of its own")
        return push

    @classmethod
    def _read(
        cls, data: bytes | memoryview, rest: Iterator[bytes], *, is_whole: bool = False
    ) -> Self:
        header, frame = read_chunk(data, rpc.PushHeader)
        if header is None:
            raise PayloadError("a Push must begin with its header")
        return cls(header, frame, rest, len(data), is_whole=is_whole)

    def received(self, spec: BundleSpec, allocate: Callable[[int], memoryview]) -> Bundle:
        """Receive the bundle behind the header.

        Raises:
            PayloadError: it is not what the spec says, or damaged.
            NotReady: the stream ends short. The reason does not matter: a cancelled call may look
                like a stream that its sender closed.
        """
        receiver = Receiver(self.header.bundle, spec, allocate)
        if self.frame is not None:
            receiver.feed(self.frame)
        if not receiver.is_complete:  # else the first message held the whole bundle
            self._feed(receiver)
        if not receiver.is_complete and not self.is_whole:
            at = f"{receiver.received} of {self.header.bundle.payload_bytes} bytes"
            raise NotReady(f"the stream ended after {at}; bring the upload again")
        self.digest = receiver.digest
        return receiver.finish()

    def _feed(self, receiver: Receiver) -> None:
        for data in self.rest:
            self.wire += len(data)
            header, frame = read_chunk(data, rpc.PushHeader)
            if header is not None or frame is None:
                raise PayloadError("a Push has one header only, and frames behind it")
            receiver.feed(frame)


Ends = Callable[[ClientId, OpenTrip, Push, Answer | str], None]
"""Takes a checked result, or why a client failed for this trip."""


class Inbox:
    """Receives and checks what Push calls bring."""

    def __init__(self, cohort: RemoteCohort, gate: Gate, passed_on: Ends | None = None) -> None:
        """Keep results in the cohort; a relay passes them on, and takes no sums."""
        self.cohort, self.gate = cohort, gate
        self._ends, self._takes_sums = passed_on or self._keep, passed_on is None

    def take_result(self, client: ClientId, push: Push, context: Any) -> rpc.PushResponse:
        """Take the result of one order.

        Raises:
            PayloadError: it is refused; the client fails for this trip.
            Superseded: nobody wants it any more.
            NotReady: the client should bring it again.
        """
        trip = self.cohort.begin_result(client, push.header)
        if trip is not None:
            size = min(push.header.bundle.payload_bytes, trip.trip.spec.max_bytes)
            with (
                self.gate.alone([("Push", client)], context),
                self.gate.within(context, push_limit_s(size)),
            ):
                self._take(client, trip, push)
        return rpc.PushResponse(repeated_upload=trip is None)

    def _take(self, client: ClientId, trip: OpenTrip, push: Push) -> None:
        outcome: Answer | str = printable(push.header.failure)
        if not push.header.failure:
            try:
                outcome = self._receive(client, trip, push)
            except RelayAtFault as error:
                self._ends(
                    client, trip, push, printable(f"its relay {trip.relays[client]} {error}")
                )
                raise
            except PayloadError as error:
                self._ends(client, trip, push, printable(f"its upload was refused: {error}"))
                raise
        self._ends(client, trip, push, outcome)

    def _keep(self, client: ClientId, trip: OpenTrip, push: Push, outcome: Answer | str) -> None:
        taken = self.cohort.end_result(client, trip, outcome)
        if isinstance(outcome, Answer) and not taken:
            raise Superseded(f"interaction {push.header.interaction + 1} closed without {client}")

    def _receive(self, client: ClientId, trip: OpenTrip, push: Push) -> Answer:
        """Receive an upload and check it; one whose weights are summed elsewhere lacks them."""
        header = push.header
        trip.trip.check_report(client, trip.trip.orders[client], header.report)
        spec = trip.spec_of(client, is_summed=header.summed)
        sent = upload = push.received(spec, self.cohort.spool.allocate)
        if not header.summed:
            upload = trip.trip.restored(sent, self.cohort.spool.allocate)
        trip.trip.check_upload(client, upload)
        if header.summed:
            trip.check_promise(client, upload)
        measured = trip.trip.measured(client, upload)
        if header.summed and measured is not None:
            measured = measured_by_relay(measured, header, trip.trip.given)
        return Answer(
            upload, header.report, sent.num_bytes(), 0, push.wire,
            is_promise=header.summed, measured=measured,
        )  # fmt: skip

    def take_sum(self, clients: Sequence[ClientId], push: Push, context: Any) -> rpc.PushResponse:
        """Take a relay's sum; if it is refused, its clients fail for this trip.

        Raises:
            PayloadError, Superseded, NotReady: as of :meth:`take_result`.
        """
        if not self._takes_sums:
            raise PayloadError("a relay takes no sums: each client brings its own upload")
        trips = {client: self.cohort.begin_result(client, push.header) for client in clients}
        answered = [f"client {client}" for client, found in trips.items() if found is None]
        if 0 < len(answered) < len(trips):
            names = ", ".join(answered)
            raise Superseded(f"the sum holds results that have come without it: {names}")
        trip = trips[clients[0]]
        if trip is not None:
            size = min(push.header.bundle.payload_bytes, 2 * trip.trip.spec.max_bytes)
            with (
                self.gate.alone([("Sum", client) for client in clients], context),
                self.gate.within(context, push_limit_s(size)),
            ):
                self._take_sum(clients, trip, push)
        return rpc.PushResponse(repeated_upload=trip is None)

    def _take_sum(self, clients: Sequence[ClientId], trip: OpenTrip, push: Push) -> None:
        try:
            group = trip.members(clients)
            total = trip.total_of(group)
            sent = push.received(sum_spec(trip.trip.spec, total), self.cohort.spool.allocate)
            mean = check_sum(trip.trip.spec, sent.weights, total)
            moved = trip.trip.given.measured(Bundle(mean)) if mean else None
            promised = [trip.promised[client].measured for client in group]
            check_moved(trip.trip.given, moved, [one for one in promised if one is not None])
        except PayloadError as error:
            relay = trip.relays.get(clients[0], "")
            line = printable(f"the sum of its relay {relay} was refused: {error}")
            for client in clients:
                self.cohort.end_result(client, trip, line)
            raise
        told = cosines_of(push.header)
        found = GroupSum(group, sent.weights, sent.num_bytes(), push.wire, told, moved)
        if not self.cohort.end_sum(trip, found):
            raise Superseded(f"interaction {push.header.interaction + 1} closed without this sum")


# --- what relays say ------------------------------------------------------------------------------


def sum_spec(spec: BundleSpec, total: float) -> BundleSpec:
    """Return the specification of a sum of uploads' weights: floats are float64.

    Args:
        spec: of an upload.
        total: the sum of the uploads' coefficients; with 0 there is nothing to send.
    """
    found = {}
    for key, one in spec.required.items() if total else ():
        if key.startswith(WEIGHTS):
            wide = torch.float64 if one.dtype.is_floating_point else one.dtype
            found[key] = replace(one, dtype=wide)
    return BundleSpec(found)


def check_sum(spec: BundleSpec, sums: Weights, total: float) -> Weights:
    """Return the mean behind a sum, once it is within the bounds of an upload's weights.

    Raises:
        PayloadError: names the first number that is too large.
    """
    if not sums:
        return {}
    mean = mean_of_sums([sums], total, dtypes_of_weights(spec))
    check_numbers(Bundle(mean))
    return mean


def check_moved(given: TrainingBase, moved: Measured | None, members: Collection[Measured]) -> None:
    """Check that a mean lies no farther from what was given than all uploads in it.

    Args:
        given: what the clients were given.
        moved: how far the mean lies from it; None of a mean without tensors.
        members: how far each upload in it does, as the relay says.

    Raises:
        PayloadError: it does, so it is not the mean of these uploads.
    """
    for part, what in ((PARAMETERS, "weights"), (STATISTICS, "statistics")):
        norm = 0.0 if moved is None else moved.norms.get(part, 0.0)
        most = max((one.norms.get(part, 0.0) for one in members), default=0.0)
        if part in given.sizes and not norm <= ROUNDING * (most + given.sizes[part]) + most:
            raise PayloadError(
                f"it moves the {what} by {norm:.3g}, and each upload in it by {most:.3g} at most, "
                "as the relay says itself"
            )


def measured_by_relay(one: Measured, header: rpc.PushHeader, given: TrainingBase) -> Measured:
    """Return what is kept of an upload whose weights stay with its relay, which has measured them.

    Raises:
        RelayAtFault: the relay does not say how far they moved, or what it says is no norm.
    """
    told = header.distance
    if not header.HasField("distance"):
        raise RelayAtFault("did not say how far its weights moved")
    norms = {PARAMETERS: told.weights, STATISTICS: told.statistics}
    if not all(0.0 <= norm < math.inf for norm in norms.values()):
        raise RelayAtFault("has measured its weights, and says what is no norm")
    held = {part: norm for part, norm in norms.items() if part in given.sizes}
    return Measured({**one.norms, **held}, given.sizes, told.weights)


def cosines_of(header: rpc.PushHeader) -> dict[str, float]:
    """Return what a relay says of the directions of the uploads in its sum, by client id."""
    return {
        member.client_id: member.cosine
        for member in header.members
        if member.HasField("cosine") and -1.0 <= member.cosine <= 1.0
    }
