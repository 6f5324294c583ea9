"""A run from outside: its events as they come, whether it serves, what operators ask of it.

Nothing here imports torch: probes of containers ask for a coordinator's health every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedmodels.console.printable import printable
from fedmodels.errors import LinkError
from fedmodels.facts.run_classes import ClassChange
from fedmodels.times import CONNECT_S, HEALTH_S, REFUSED_AGAIN_S, REFUSED_S
from fedpb import FRONT, SERVICE
from fedpb.unreachable import in_words
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.tls import caller_channel, silence_of
from fedsrv.progress.events import Event
from fedsrv.transport.event_messages import event_of

_SILENCE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
"""What gRPC says where no coordinator answers."""


def _line_of(error: grpc.RpcError) -> str:
    line = printable(error.details() or "")
    if error.code() == grpc.StatusCode.UNAVAILABLE:  # the words of gRPC, not of a coordinator
        return in_words(line)
    return f"{line} ({error.code().name})"


def await_answer(
    channel: grpc.Channel,
    address: str,
    credentials: grpc.ChannelCredentials | None,
    within_s: float,
    refused_s: float,
) -> Any:
    """Return a coordinator's answer to a question about its health.

    Args:
        channel: to the coordinator.
        address: its HOST:PORT.
        credentials: of the caller, if it serves TLS.
        within_s: how long a host that says nothing may take.
        refused_s: how long a host is asked again that refuses, or breaks the link off.

    Raises:
        LinkError: nobody answers, or the certificate is not trusted.
        grpc.RpcError: it answers with another code than its health.
    """
    # channel_ready_future would leave a thread that fails when the channel closes soon
    check = health_pb2_grpc.HealthStub(channel).Check
    begun = time.monotonic()
    while True:
        left = begun + within_s - time.monotonic()
        try:
            return check(health_pb2.HealthCheckRequest(), timeout=max(left, REFUSED_AGAIN_S))
        except grpc.RpcError as error:
            if error.code() not in _SILENCE:
                raise
            if time.monotonic() - begun > min(refused_s, within_s):
                raise LinkError(silence_of(address, credentials)) from None
        time.sleep(REFUSED_AGAIN_S)


def watched(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    seconds: float | None = None,
    connect_s: float = CONNECT_S,
) -> Iterator[Event]:
    """Yield the last events of a run, then new ones as they come, until it ends.

    Args:
        address: HOST:PORT of the coordinator.
        credentials: of a watcher, where it serves TLS.
        seconds: stop then, though the run goes on; whoever looks so briefly waits a second for a
            port that refuses.
        connect_s: how long the coordinator may take to answer.

    Raises:
        LinkError: nobody answers, the coordinator refuses, or its certificate is not trusted.
    """
    with caller_channel(address, credentials) as channel:
        patience = connect_s if seconds is None else REFUSED_S
        with suppress(grpc.RpcError):  # another code is an answer
            await_answer(channel, address, credentials, connect_s, patience)
        watch: Any = channel.unary_stream(
            f"/{SERVICE}/Watch", rpc.WatchRequest.SerializeToString, rpc.WatchResponse.FromString
        )
        try:
            last = b""
            for answer in watch(rpc.WatchRequest(from_start=True), timeout=seconds):
                yield event_of(answer.event)
                if answer.head.link != last:
                    last = answer.head.link
                    yield Event("head", detail={"head": f"{answer.head.number}:{last.hex()}"})
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED or seconds is None:
                raise LinkError(f"watching {address}: {_line_of(error)}") from None


def ask_front(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    name: str,
    request: Any,
    reply: Any,
    within_s: float = CONNECT_S,
) -> Any:
    """Make a call to the front of a queue; return None where a run's coordinator answers instead.

    Args:
        address: HOST:PORT.
        credentials: of the caller, where it serves TLS.
        name: of the call.
        request: its message.
        reply: the kind of message that comes back.
        within_s: how long the answer may take, once somebody is there.

    Raises:
        LinkError: nobody answers, the front refuses, or its certificate is not trusted.
    """
    with caller_channel(address, credentials) as channel:
        call: Any = channel.unary_unary(
            f"/{FRONT}/{name}", type(request).SerializeToString, reply.FromString
        )
        with suppress(grpc.RpcError):  # another code is an answer
            await_answer(channel, address, credentials, CONNECT_S, REFUSED_S)
        try:
            return call(request, timeout=within_s)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return None
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise LinkError(
                    f"{address} did not answer {name} within {within_s:g} s, and may have done it: "
                    f"fedsrv status {address} shows its runs"
                ) from None
            raise LinkError(f"{address}: {_line_of(error)}") from None


def check_health(
    address: str, credentials: grpc.ChannelCredentials | None = None, within_s: float = HEALTH_S
) -> None:
    """Check that a coordinator serves; credentials are those of a watcher.

    Raises:
        LinkError: it does not answer, is about to end, or its certificate is not trusted.
    """
    with caller_channel(address, credentials) as channel:
        try:
            answer = await_answer(channel, address, credentials, within_s, REFUSED_S)
        except grpc.RpcError as error:
            raise LinkError(f"no health of {address}: {error.code().name}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise LinkError(f"{address} says {status}: it is about to end")


def steer(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    retire: Sequence[str] = (),
    forget: bool = False,
    close: bool = False,
    now: bool = False,
    exclude: Sequence[str] = (),
    set_aside: Sequence[tuple[str, int]] = (),
    classes: Sequence[ClassChange] | None = None,
    merge: bool = False,
    within_s: float = CONNECT_S,
) -> Sequence[rpc.ClassOf]:
    """Let clients retire from an open run, or end it; exclude clients from any run.

    Args:
        address: HOST:PORT of the coordinator.
        credentials: of an operator, if the coordinator serves TLS.
        retire: ids of clients that leave for good.
        forget: drop what the server's state holds of these clients alone, too.
        close: end the run once nothing is left to learn.
        now: end it after the round under way.
        exclude: ids of clients that are set aside.
        set_aside: ids of clients, each with a task of an open run that is set aside.
        classes: what is to become of the classes of an open run; nothing asks for them alone.
        merge: whether they become part of others; else they get other names.
        within_s: how long the answer may take.

    Returns:
        The classes of the run, where they were asked for.

    Raises:
        LinkError: nobody answers, the coordinator refuses, or its certificate is not trusted.
    """
    tasks = [rpc.TaskOf(client_id=client, task=task) for client, task in set_aside]
    request = rpc.SteerRequest(
        retire=retire, forget=forget, close=close, now=now, exclude=exclude, set_aside=tasks,
        class_changes=[rpc.ClassChange(**one._asdict()) for one in classes or ()],
        list_classes=classes is not None and not classes, merge=merge,
    )  # fmt: skip
    with caller_channel(address, credentials) as channel:
        call: Any = channel.unary_unary(
            f"/{SERVICE}/Steer", rpc.SteerRequest.SerializeToString, rpc.SteerResponse.FromString
        )
        with suppress(grpc.RpcError):  # another code is an answer
            await_answer(channel, address, credentials, within_s, REFUSED_S)
        try:
            answer = call(request, timeout=within_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise LinkError(silence_of(address, credentials)) from None
            raise LinkError(f"{address}: {_line_of(error)}") from None
    return list(answer.classes)
