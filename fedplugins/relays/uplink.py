"""A relay's calls to the coordinator above it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from fedmodels.console.printable import printable
from fedmodels.errors import LinkError, PayloadError, PayloadTooLarge
from fedmodels.tensors.bundle import Bundle
from fedmodels.times import BEAT_S, CHECK_S, JOIN_S, LEAVE_S, PART_S
from fedpb import AGAIN_AFTER, CROWDED, SERVICE
from fedpb.channels import set_out_by
from fedpb.headers import header_of
from fedpb.pace import PART_BYTES, Pace, Parts
from fedpb.told import Door, Passed
from fedpb.unreachable import distrust, in_words, why_unreachable
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import OtherPartition
from fedsrv.identity.guard import NotYours
from fedsrv.identity.tls import caller_channel, failure_of
from fedsrv.transport.inbox import push_limit_s
from fedsrv.transport.refusals import (
    AlreadyConnected,
    NotReady,
    RunOver,
    SetOut,
    Superseded,
    UnknownSession,
    WrongRun,
)

CallFailed: TypeAlias = grpc.RpcError
Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
_MEANINGS: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.NOT_FOUND: OtherPartition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PayloadTooLarge,
    grpc.StatusCode.INVALID_ARGUMENT: PayloadError,
    grpc.StatusCode.FAILED_PRECONDITION: WrongRun,
    grpc.StatusCode.PERMISSION_DENIED: NotYours,
    grpc.StatusCode.UNAUTHENTICATED: UnknownSession,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyConnected,
    grpc.StatusCode.ABORTED: Superseded,
    grpc.StatusCode.OUT_OF_RANGE: RunOver,
    grpc.StatusCode.UNIMPLEMENTED: WrongRun,
}
"""What a code of the coordinator above means; every other one says that it is away. The relay ends
its own client's call with the same code."""
REFUSALS: tuple[type[Exception], ...] = (NotReady, SetOut, *_MEANINGS.values())
"""What a failed call may mean."""


class CoordinatorUnreachable(NotReady):
    """The coordinator above cannot be reached."""

    is_fault = True


def meaning_of(error: Any) -> Exception:
    """Return what a failed call means, as the error that ends a client's call in the same way."""
    line = printable(error.details() or "")
    again = any(key == AGAIN_AFTER for key, _ in error.trailing_metadata() or ())
    if again or error.details() == CROWDED:
        return NotReady(line)
    if (client := set_out_by(error)) is not None:
        return SetOut(client, line)
    kind = _MEANINGS.get(error.code(), CoordinatorUnreachable)
    return kind(
        f"the coordinator above is away: {in_words(line)}"
        if kind is CoordinatorUnreachable
        else line
    )


class Uplink:
    """One channel to the coordinator above; a call that fails raises one of :data:`REFUSALS`."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.address, self.zstd = address, False
        self._credentials = credentials
        self._channel = caller_channel(address, credentials)
        self._door, self._rate = Door(), 0.0
        self.prepare = self._unary("Prepare", rpc.PrepareRequest, rpc.PrepareResponse, JOIN_S)
        self.join = self._unary("Join", rpc.JoinRequest, rpc.JoinResponse, JOIN_S)
        self.join_several = self._unary(
            "JoinSeveral", rpc.JoinSeveralRequest, rpc.JoinSeveralResponse, JOIN_S
        )
        self.announce = self._unary("Announce", rpc.AnnounceRequest, rpc.AnnounceResponse, JOIN_S)
        self.beat = self._unary("Beat", rpc.BeatRequest, rpc.BeatResponse, BEAT_S)
        self.leave = self._unary("Leave", rpc.LeaveRequest, rpc.LeaveResponse, LEAVE_S)
        self._pull = self._channel.unary_stream(f"/{SERVICE}/Pull", Passed.encoded, None)
        self._push = self._channel.stream_unary(
            f"/{SERVICE}/Push", Passed.encoded, rpc.PushResponse.FromString
        )

    def _unary(
        self, name: str, request: type[Q], reply: type[R], limit_s: float
    ) -> Callable[[Q], R]:
        """Return what passes a client's request on and returns the coordinator's reply."""
        call = self._channel.unary_unary(f"/{SERVICE}/{name}", Passed.encoded, reply.FromString)
        return lambda sent: _replied(call, self._door.passed(sent), limit_s)

    def pull(self, request: rpc.PullRequest) -> Any:
        """Return the stream of orders for some clients; ``cancel()`` ends it with CallFailed."""
        return self._pull(self._door.passed(request))

    def push(self, header: rpc.PushHeader, upload: Bundle) -> rpc.PushResponse:
        """Send a result; the header's bundle is filled in."""
        header.bundle.CopyFrom(header_of(upload))
        pace = Pace(PART_BYTES, PART_S)
        pace.rate = self._rate  # of the last one; several threads push
        parts = Parts(self._door.pushed(header, upload), pace, zstd=self.zstd)
        while True:
            before, limit_s = parts.at, push_limit_s(parts.num_bytes)
            reply: rpc.PushResponse = parts.send(partial(_replied, self._push, limit_s=limit_s))
            self._rate = pace.rate
            if parts.is_over(reply):
                return reply
            if parts.at <= before:
                raise NotReady("the coordinator lost the part of an upload that it had")

    def check(self) -> str:
        """Return why the coordinator cannot be reached now; empty if it can.

        Raises:
            LinkError: the coordinator's certificate is not trusted, or names another host; or the
                coordinator refuses this relay's certificate.
        """
        try:
            self._channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=CHECK_S)
        except CallFailed as error:
            details = printable(error.details() or "")
            if isinstance(meaning_of(error), CoordinatorUnreachable):
                details = failure_of(self.address, self._credentials) or details
            if isinstance(refused := meaning_of(error), NotYours):
                line = f"the coordinator at {self.address} refuses this relay: {refused}"
                raise LinkError(line) from None
            if why := distrust(details, self.address):
                raise LinkError(why.replace("--tls-ca", "--up-ca")) from None
            if isinstance(meaning_of(error), CoordinatorUnreachable):
                tls = self._credentials is not None
                return why_unreachable(details, self.address, over_tls=tls, option="--up")
        return ""

    def close(self) -> None:
        """End all calls."""
        self._channel.close()


def _replied(call: Any, sent: Any, limit_s: float) -> Any:
    """Make a call; raise what its failure means for the client's call."""
    try:
        return call(sent, timeout=limit_s)
    except CallFailed as error:
        raise meaning_of(error) from None
