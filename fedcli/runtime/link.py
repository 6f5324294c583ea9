"""The link to the server: one channel, calls that wait out a server that is gone for a while.

Payloads pass as raw bytes; the codec reads frames without a copy. Common parts of payloads are kept
by digest, so that clients of one process fetch them once.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc.experimental import ChannelOptions

from fedcli.gate.gate import Gate
from fedcli.runtime.answers import (
    UploadRefused,
    again_after_s,
    raise_if_final,
    said,
)
from fedcli.runtime.known_history import KnownHistory
from fedcli.runtime.worker import Progress, Result
from fedmodels.errors import ArchiveError, ConfigError, LinkError
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.times import LEAVE_S, LINE_EVERY_S, PART_S, SLOW_S
from fedpb import PROTOCOL, SERVICE
from fedpb.channels import channel_options, place_after
from fedpb.codec import Receiver, merged
from fedpb.headers import header_of
from fedpb.orders import Specs, read_order
from fedpb.pace import PART_BYTES, Pace, Parts, slow_text
from fedpb.tables import values_of
from fedpb.told import Passed, Pushed
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1.description_pb2 import ClientDescription

LEAVING = 500
"""How long the server has to take sessions back, and how many are given back in one call."""
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Membership:
    """One client's place in the run."""

    client: ClientId
    run_id: str
    token: bytes


class Link:
    """Makes the calls of the service, and repeats them while the server is away."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None = None,
        give_up_after_s: float | None = None,
        show: Callable[..., None] | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Open a channel.

        ``give_up_after_s`` are seconds without the server; None is never. ``show`` gets each call
        and its message before they are sent, and the upload, if any. ``gate`` says what leaves.
        """
        self.gate = gate or Gate()
        self.check: Callable[[], None] = lambda: None
        """Called before each join; raises LinkError for a server that is not to be joined."""
        self.run_id = ""
        """The run that was looked at, if one was: no other one is joined."""
        self.history = KnownHistory()
        self.address, self.zstd = address, False
        self._show = show or (lambda call, message, upload=None: None)
        self._give_up_after_s = give_up_after_s
        self._credentials = credentials
        self._closed = threading.Event()
        self._answered = False
        """Whether the server has ever answered a call."""
        alone = ChannelOptions.SingleThreadedUnaryStream  # a Pull needs no thread of its own
        options = [*channel_options(address), (alone, 1)]
        self._channel = self._opened(address, options)
        self._prepare = self._unary("Prepare", rpc.PrepareResponse)
        self._join = self._unary("Join", rpc.JoinResponse)
        self._join_several = self._unary("JoinSeveral", rpc.JoinSeveralResponse)
        self._beat = self._unary("Beat", rpc.BeatResponse)
        self._announce = self._unary("Announce", rpc.AnnounceResponse)
        self._leave = self._unary("Leave", rpc.LeaveResponse)
        self._pull = self._channel.unary_stream(f"/{SERVICE}/Pull", Passed.encoded, None)
        push = f"/{SERVICE}/Push"
        self._push = self._channel.stream_unary(push, Passed.encoded, rpc.PushResponse.FromString)
        self._push_whole = self._channel.unary_unary(
            push, Passed.encoded, rpc.PushResponse.FromString
        )
        """A stream of one message: the same on the wire, and without a thread that sends it."""
        self._orders: Any = None
        """The Pull under way, if there is one."""
        self._done: dict[str, tuple[float, float]] = {}
        """By name of a call that is repeated: when it was last made, and the pause before it."""
        self._held: dict[bytes, Bundle] = {}
        """The last common part by digest."""
        self._begun: dict[bytes, Receiver] = {}
        """The part that is coming, or whose beginning had come when the link broke, by digest."""
        self._arriving_since: float | None = None
        """Since when the order that comes has been on its way, on the monotonic clock. The thread
        that pulls writes it; the one that beats asks whether it is None."""
        self._pace = Pace(PART_BYTES, PART_S)
        """Of the thread that pushes."""
        self._slow_told = -math.inf
        """When a slow link was last told of; two threads may both tell of it."""

    def _opened(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, self._credentials, options)

    def _unary(self, name: str, reply: Any) -> Any:
        path = f"/{SERVICE}/{name}"
        return self._channel.unary_unary(path, Passed.encoded, reply.FromString)

    def _passed(self, call: str, message: Any) -> Passed:
        """Return a message as it leaves, once it was shown; errors as of :meth:`Gate.passed`."""
        passed = self.gate.passed(message)
        self._show(call, message)
        return passed

    @property
    def is_closed(self) -> bool:
        """Whether no call is made any more."""
        return self._closed.is_set()

    # --- patience ---------------------------------------------------------------------------------

    def _patiently(self, what: str, call: Callable[[], T]) -> T:
        """Make a call until the server answers; say so when it is gone, and again each minute.

        Raises:
            LinkError: the server refused, or stayed away for longer than allowed.
            SessionGone: the session has to be renewed.
            Superseded: the result is no longer wanted.
            RunOver: the run has ended.
        """
        lost_since = logged_at = None
        wait_s = 0.1
        while True:
            try:
                found = call()
                self._answered = True
                return found
            except grpc.RpcError as error:
                again_s = again_after_s(error)
                if again_s is None:
                    raise_if_final(what, error)
                if self._closed.is_set():
                    raise _closed(what) from None
                reason = self._explained(said(error))
            except ValueError:
                if self._closed.is_set():  # a channel that is closed raises it
                    raise _closed(what) from None
                raise
            if again_s is not None:  # the server is there: it says when to come again
                lost_since, wait_s = None, max(wait_s, again_s)
            else:
                lost_since = lost_since or time.monotonic()
                logged_at = self._log_lost(lost_since, logged_at, reason)
            if self._closed.wait(wait_s * random.uniform(0.5, 1.0)):
                raise _closed(what)
            wait_s = min(2 * wait_s, max(2.0, again_s or 0.0))

    def _slow_down(self, what: str) -> None:
        """Wait before doing again what was done less than a second ago, longer each time."""
        done, pause_s = self._done.get(what, (-math.inf, 0.0))
        if time.monotonic() - done < 1.0:
            pause_s = min(max(0.1, 2 * pause_s), 2.0)
            self._closed.wait(pause_s * random.uniform(0.5, 1.0))
        else:
            pause_s = 0.0
        self._done[what] = time.monotonic(), pause_s

    def _log_lost(self, lost_since: float, logged_at: float | None, reason: str) -> float:
        """Say that the server is gone, once and then each minute; return when that was last said.

        Raises:
            LinkError: it is gone for longer than allowed.
        """
        now = time.monotonic()
        if self._give_up_after_s is not None and now - lost_since > self._give_up_after_s:
            raise LinkError(
                f"gave up: the server at {self.address} was gone for "
                f"{self._give_up_after_s:g} s: {reason}"
            )
        if logged_at is not None and now - logged_at <= 60:
            return logged_at
        line = "lost the server at %s, trying again: %s"
        if not self._answered:
            line = "waiting for the server at %s: %s"
        log.warning(line, self.address, reason)
        return now

    def _explained(self, details: str) -> str:
        """Say why a server that never answered does not; a handshake that cannot succeed is final.

        Raises:
            LinkError: the server's certificate is not to be trusted, or names another host.
        """
        from fedpb.unreachable import clearest, distrust, in_words, why_unreachable

        if not self._answered:
            details = clearest(details, self.address, self._said_by)
        if why := distrust(details, self.address):
            raise LinkError(why)
        if self._answered and "handshake" not in details.lower():
            return in_words(details)
        over_tls = self._credentials is not None
        return why_unreachable(details, self.address, over_tls=over_tls)

    def _said_by(self, target: str, options: Sequence[tuple[str, Any]]) -> str:
        """Return what gRPC says of one address of the server; nothing if that answers."""
        with self._opened(target, [*channel_options(target), *options]) as channel:
            try:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=1.0)
            except grpc.RpcError as error:
                return said(error)
        return ""

    # --- calls ------------------------------------------------------------------------------------

    def prepare(
        self, client: ClientId, *, has_cut: bool = False, wants_known: bool = False
    ) -> rpc.PrepareResponse:
        """Ask what the run is, and how it wants a client's own files cut, unless they are cut.

        With ``wants_known``, also ask what it knows of the client's data.

        Raises:
            ConfigError: the run says nothing of it, by the server's line.
            LinkError: the server refused, with its line; or another run is served by now.
        """
        request = rpc.PrepareRequest(
            client_id=str(client), protocol=PROTOCOL, has_cut=has_cut, wants_known=wants_known
        )
        passed = self._passed("Prepare", request)
        try:
            reply: rpc.PrepareResponse = self._patiently(
                f"client {client}", lambda: self._prepare(passed)
            )
        except UploadRefused as error:
            raise ConfigError(str(error)) from None
        if reply.places:
            at = place_after(self.address, reply.places[0])
            raise LinkError(
                f"{self.address} is the front of a queue: --stay takes part in its runs; one is "
                f"served at {at}"
            )
        if reply.run_id and self.run_id not in ("", reply.run_id):
            raise LinkError(f"another run is served at {self.address} than the one that was seen")
        self.run_id = reply.run_id or self.run_id
        self.gate.heard(values_of(reply.experiment))
        return reply

    def join(self, request: rpc.JoinRequest | rpc.JoinSeveralRequest) -> rpc.JoinResponse:
        """Join the run as one client, or as several.

        Raises:
            ConfigError: the clients' data do not fit the run, by the server's line.
            LinkError: the server refused, with its line; or its certificate was revoked.
        """
        request.run_id = request.run_id or self.run_id
        if isinstance(request, rpc.JoinRequest):
            who, call = f"client {request.client_id}", self._join
        else:
            ids = [one.client_id for one in request.clients]
            who, call = f"clients {ids[0]} to {ids[-1]}", self._join_several
        self._slow_down(who)
        self.check()
        request.known = self.history.number
        passed = self._passed(type(request).__name__.removesuffix("Request"), request)
        reply: rpc.JoinResponse | rpc.JoinSeveralResponse
        try:
            reply = self._patiently(who, lambda: call(passed))
        except UploadRefused as error:
            raise ConfigError(str(error)) from None
        joined = reply if isinstance(reply, rpc.JoinResponse) else reply.joined
        self.gate.heard_names(joined.class_names)
        return joined

    def pull(
        self,
        waiting: Callable[[], Sequence[rpc.Waiting]],
        specs: Specs,
    ) -> Sequence[tuple[rpc.Order, Bundle]]:
        """Wait for orders of clients of this process; return those that come next, with payloads.

        Orders come over one call. Whenever it is made, ``waiting`` tells for whom to wait.

        Raises:
            LinkError, SessionGone: as :meth:`_patiently` says; Dismissed if the run has failed.
            PayloadError: the payload is not what ``specs`` says.
        """
        while not self._closed.is_set():
            found = self._patiently("pull", lambda: self._next_orders(waiting, specs))
            if found:
                return found
            self._slow_down("pull")
        raise _closed("pull")

    def _next_orders(
        self,
        waiting: Callable[[], Sequence[rpc.Waiting]],
        specs: Specs,
    ) -> Sequence[tuple[rpc.Order, Bundle]]:
        if self._orders is None:
            begun = [rpc.Begun(digest=d, bytes=r.received) for d, r in self._begun.items()]
            request = rpc.PullRequest(waiting=waiting(), held=list(self._held), begun=begun)
            self._orders = self._pull(self._passed("Pull", request))
        found = None
        try:
            found = read_order(self._orders, specs, self._held, self._begun, self._arrives)
        finally:
            self._arriving_since = None
            if found is None:
                self.end_pull()
        if found is None:
            return []
        header, payload = found[0], merged(found[1])
        for order in (header.order, *header.more):
            self.gate.heard_names(order.new_classes)
            self.gate.heard_names(change.now for change in order.class_changes)
        return [(order, payload) for order in (header.order, *header.more)]

    @property
    def is_arriving(self) -> bool:
        """Whether some of an order has come, and the rest is on its way."""
        return self._arriving_since is not None

    def _arrives(self, part: Receiver) -> None:
        """Note that more of an order has come; say so where it takes long."""
        now = time.monotonic()
        self._arriving_since = self._arriving_since or now
        if (seconds := now - self._arriving_since) > SLOW_S:
            size = part.header.payload_bytes
            self._tell_slow("an order comes", slow_text(part.received, size, seconds))

    def _tell_slow(self, what: str, how: str) -> None:
        """Say that something takes long over this link, at most once a minute."""
        if how and time.monotonic() - self._slow_told > LINE_EVERY_S:
            self._slow_told = time.monotonic()
            log.warning("%s over a %s", what, how)

    def end_pull(self) -> None:
        """End the Pull under way, if there is one; the next order comes over a new one."""
        if self._orders is not None:
            self._orders.cancel()
            self._orders = None

    def push(self, member: Membership, result: Result) -> rpc.PushResponse:
        """Bring back the result of an order.

        Raises:
            LinkError, SessionGone, Superseded: as :meth:`_patiently` says.
        """
        pushed = self._pushed(member, result)
        self._show("Push", pushed.header, result.upload)
        parts, what = Parts(pushed, self._pace, zstd=self.zstd), _named(result)
        while True:
            before = parts.at
            reply: rpc.PushResponse = self._patiently(what, lambda: parts.send(self._send))
            if parts.is_over(reply):
                return reply
            if parts.at <= before:  # the server began again, or another call took its place
                self._slow_down(what)
            self._tell_slow(f"{what}: its upload goes", parts.slow)

    def _pushed(self, member: Membership, result: Result) -> Pushed:
        """Return a result as it leaves; what the gate does not let through is declined."""
        header = push_header(member, result)
        try:
            return self.gate.pushed(header, result.upload, result.covers, result.inside)
        except ConfigError as error:
            log.error("client %s: %s", result.order.client_id, error)
            reason = rpc.FAILURE_REASON_DECLINED
            declined = Result(result.order, Bundle(), rpc.Report(), reason=reason)
            return self.gate.pushed(push_header(member, declined), Bundle())

    def _send(self, stream: Iterator[Passed]) -> rpc.PushResponse:
        """Make one Push; a frame is laid out while the one before it is under way."""
        first, second = next(stream), next(stream, None)
        reply: rpc.PushResponse
        if second is None:
            reply = self._push_whole(first)
        else:
            reply = self._push(itertools.chain([first, second], stream))
        return reply

    def announce(self, member: Membership, description: ClientDescription) -> Sequence[rpc.TaskOf]:
        """Tell what data a client has by now; return its tasks that the run does not take.

        Raises:
            LinkError, SessionGone, RunOver: as :meth:`_patiently` says.
        """
        request = rpc.AnnounceRequest(
            client_id=str(member.client), token=member.token, description=description
        )
        passed = self._passed("Announce", request)
        reply: rpc.AnnounceResponse = self._patiently(
            f"client {member.client}", lambda: self._announce(passed)
        )
        return [*reply.refused]

    def beat(self, member: Membership, progress: Progress, durable: int) -> bool:
        """Give a sign of life; False if the server did not get it, which does not matter here."""
        request = rpc.BeatRequest(
            client_id=str(member.client),
            token=member.token,
            epoch=progress.epoch,
            batch=progress.batch,
            durable=durable,
            interaction=progress.interaction,
            known=self.history.number,
        )
        try:
            reply = self._beat(self._passed("Beat", request), timeout=5.0)
            self.history.take("", request.known, reply.history)
            if reply.superseded and not progress.for_a_score:
                progress.superseded = True  # its interaction is committed without it
        except grpc.RpcError as error:
            log.debug("beat: %s", said(error))
            return False
        except ArchiveError as error:
            log.warning("%s", error)
            return False
        except ValueError:
            if self._closed.is_set():  # by another thread
                return False
            raise
        return True

    def leave(self, members: Iterable[Membership], reason: str) -> None:
        """Give sessions back, if the server is there; no other call is made from now on.

        The server ends a Pull when one of its clients leaves. Another Pull would name that client.
        """
        self._closed.set()
        leaving = [rpc.Leaving(client_id=str(one.client), token=one.token) for one in members]
        for first in range(0, len(leaving), LEAVING):
            one, *others = leaving[first : first + LEAVING]
            known = self.history.number
            request = rpc.LeaveRequest(
                client_id=one.client_id,
                token=one.token,
                reason=reason,
                known=known,
                others=others,
            )
            try:
                reply = self._leave(self._passed("Leave", request), timeout=LEAVE_S)
            except ArchiveError:  # the server finds out by itself
                return
            except grpc.RpcError as error:
                log.debug("leave: %s", said(error))
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    return
            else:
                self.history.take("", known, reply.history)

    def close(self) -> None:
        """Close the channel; calls under way end."""
        self._closed.set()
        self._channel.close()


def _closed(what: str) -> LinkError:
    return LinkError(f"{what}: the link is closed")


def push_header(member: Membership, result: Result) -> rpc.PushHeader:
    """Return what a client says of a result, before its tensors."""
    order = result.order
    header = rpc.PushHeader(
        client_id=order.client_id,
        token=member.token,
        kind=order.kind,
        interaction=order.interaction,
        trip=order.trip,
        report=result.report,
        failure=result.failure,
        reason=result.reason,
    )
    header.bundle.CopyFrom(header_of(result.upload))
    return header


def _named(result: Result) -> str:
    return f"client {result.order.client_id}, interaction {result.order.interaction + 1}"
