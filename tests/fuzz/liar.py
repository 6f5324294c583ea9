"""A client that speaks the protocol well and lies in the values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from fedmodels.tensors.bundle import Bundle
from fedpb import PROTOCOL
from fedpb.codec import encode
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from tests.fuzz.lies import Lie, lies_about

_PATH = "/fedpb.v1.CoordinatorService/"
ANSWERS = ("Push", "PushSeveral")
"""Calls that bring the result of an order."""
BRIEFLY_S = 0.2
"""How long a stream is listened to that the coordinator may keep open for ever."""
_EVALUATOR = {
    ("Join", "fedpb.v1.JoinRequest.client_id = 'evaluator'"),
    ("JoinSeveral", "fedpb.v1.Joining.client_id = 'evaluator'"),
}
REQUESTS: dict[str, type[Message]] = {
    "Prepare": rpc.PrepareRequest, "Join": rpc.JoinRequest,
    "JoinSeveral": rpc.JoinSeveralRequest, "Pull": rpc.PullRequest,
    "Push": rpc.PushRequest, "PushSeveral": rpc.PushSeveralRequest, "Beat": rpc.BeatRequest,
    "Leave": rpc.LeaveRequest, "Watch": rpc.WatchRequest,
    "Announce": rpc.AnnounceRequest, "Steer": rpc.SteerRequest,
}  # fmt: skip


@cache
def every_lie(*methods: str) -> list[tuple[str, Lie]]:
    """Return all lies about the requests of these methods, or of all.

    One is left out: whoever has no certificate may take part as the evaluator, and is waited for.
    """
    chosen = methods or tuple(REQUESTS)
    found = [(name, lie) for name in chosen for lie in lies_about(REQUESTS[name].DESCRIPTOR)]
    return [(name, lie) for name, lie in found if (name, repr(lie)) not in _EVALUATOR]


class Liar:
    """One client id and a channel."""

    def __init__(self, address: str, client: str, description: str, upload: Bundle) -> None:
        self.channel = grpc.insecure_channel(
            address, [("grpc.max_send_message_length", 16 << 20), ("grpc.enable_retries", 0)]
        )
        self.client, self.description, self.upload = client, description, upload
        self.token = b"0123456789abcdef"

    def close(self) -> None:
        self.channel.close()

    # --- honest -----------------------------------------------------------------------------------

    def request(self, method: str, order: rpc.Order | None = None) -> Message:
        """Return what an honest client would send."""
        order = order or rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id=self.client)
        who = {"client_id": self.client, "token": self.token}
        waiting = rpc.Waiting(**who, durable=-1)
        shared = description_of(self.description)
        tasks = list(shared.tasks)
        shared.ClearField("tasks")
        requests = {
            "Prepare": rpc.PrepareRequest(client_id=self.client, protocol=PROTOCOL),
            "Join": rpc.JoinRequest(
                **who, description=description_of(self.description), protocol=PROTOCOL
            ),
            "JoinSeveral": rpc.JoinSeveralRequest(
                descriptions=[shared], clients=[rpc.Joining(**who, tasks=tasks)], protocol=PROTOCOL
            ),
            "Pull": rpc.PullRequest(waiting=[waiting]),
            "Beat": rpc.BeatRequest(**who, durable=-1, interaction=order.interaction),
            "Leave": rpc.LeaveRequest(**who, reason="done", others=[rpc.Leaving(**who)]),
            "Watch": rpc.WatchRequest(from_start=True),
            "Announce": rpc.AnnounceRequest(**who, description=description_of(self.description)),
            "Steer": rpc.SteerRequest(retire=["0"], close=True),
            "PushSeveral": rpc.PushSeveralRequest(results=[self.result(order)]),
        }
        return requests[method] if method in requests else self.result(order)

    def result(self, order: rpc.Order, failure: str = "") -> rpc.PushRequest:
        """Return an honest answer to an order, in one message."""
        upload = self.upload if order.kind == rpc.ORDER_KIND_TRAIN and not failure else Bundle()
        encoded = encode(upload)
        report = rpc.Report(loss=0.5, seconds=0.01, num_examples=5, durable=-1)
        report.counts.extend(self._scores(order))
        if order.confusion:
            report.confusions.extend(self._confusions(report.counts))
        header = rpc.PushHeader(
            client_id=self.client, token=self.token, kind=order.kind, trip=order.trip,
            interaction=order.interaction, report=report, bundle=encoded.header, failure=failure,
        )  # fmt: skip
        frames = b"".join(encoded.chunks())
        return rpc.PushRequest.FromString(
            rpc.PushRequest(header=header).SerializeToString() + frames
        )

    def _scores(self, order: rpc.Order) -> Iterator[rpc.Counts]:
        """Yield the counts of a client that is always right."""
        tasks = json.loads(self.description).get("tasks", [])
        for view in order.views:
            for number, task in enumerate(tasks[: order.tasks_seen]):
                right = task["test"]
                yield rpc.Counts(
                    view=view, rule="classifier", test_set=f"task/{number}", loss_sum=0.5,
                    support=right, predicted=right, correct=right,
                )  # fmt: skip

    def _confusions(self, scores: Iterable[rpc.Counts]) -> Iterator[rpc.Confusion]:
        """Yield that every class is taken for itself, for each view."""
        right: dict[str, Any] = {}
        for each in scores:
            right[each.view] = right.get(each.view, 0) + np.array(each.support)
        for view, support in right.items():
            yield rpc.Confusion(view=view, counts=np.diag(support).ravel())

    def join(self) -> None:
        """Take part in the run."""
        answer = self.send("Join", self.request("Join"))
        assert isinstance(answer, bytes), answer
        self.token = rpc.JoinResponse.FromString(answer).token

    def next_order(self, timeout_s: float = 60.0) -> rpc.Order | None:
        """Wait for the next order, and join again where a lie cost the session; None at the end."""
        pull = self.channel.unary_stream(f"{_PATH}Pull", None, None)
        while True:
            stream = pull(self.request("Pull").SerializeToString(), timeout=timeout_s)
            try:
                first = next(stream, None)
                if first is not None:
                    return rpc.PullResponse.FromString(first).header.order
                # a Pull that was told before, and came late, took this one's place
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                    return None
                self.join()
            finally:
                stream.cancel()

    # --- dishonest --------------------------------------------------------------------------------

    def lie(self, method: str, lie: Lie, order: rpc.Order | None = None) -> bytes | grpc.StatusCode:
        """Send a request that lies; return the answer, or the code it was refused with."""
        answer = self.send(method, lie.told(self.request(method, order)))
        if method == "PushSeveral" and isinstance(answer, bytes):
            codes = [one.code for one in rpc.PushSeveralResponse.FromString(answer).outcomes]
            return answer if 0 in codes else _CODES[codes[0]]
        return answer

    def send(self, method: str, *messages: Message) -> bytes | grpc.StatusCode:
        """Send messages; return the first answer, or the code they were refused with."""
        listens = method in ("Pull", "Watch")
        call = self.channel.stream_stream(f"{_PATH}{method}", None, None)
        stream = call(self._wire(messages), timeout=BRIEFLY_S if listens else 30.0)
        try:
            return bytes(next(stream, b""))
        except grpc.RpcError as error:
            return error.code()
        finally:
            with suppress(grpc.RpcError):
                stream.cancel()

    @staticmethod
    def _wire(messages: Iterable[Message]) -> Iterable[bytes]:
        return iter([message.SerializeToString() for message in messages])


_CODES = {code.value[0]: code for code in grpc.StatusCode}
EXPECTED = {
    "taken", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "UNAUTHENTICATED", "ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED",
    "CANCELLED",
}  # fmt: skip
"""What the protocol may answer: no INTERNAL, and no UNKNOWN, which an exception becomes."""


def takes_part(
    liar: Liar, lies: Sequence[tuple[str, Lie]], watch: Callable[[], None] = lambda: None
) -> list[tuple[str, str]]:
    """Answer each order with the next lie; return what came of the lies.

    After a lie that was no answer, and when no lie is left, the client says that it failed.
    """
    liar.join()
    waiting, outcomes = list(lies), list[tuple[str, str]]()
    while (order := liar.next_order()) is not None:
        watch()
        while waiting and waiting[0][0] not in ANSWERS:
            outcomes.append(_tell(liar, *waiting.pop(0), order))
        if waiting:
            outcomes.append(_tell(liar, *waiting.pop(0), order))
        answer = liar.send("Push", liar.result(order, failure="nothing more to say"))
        if answer == grpc.StatusCode.UNAUTHENTICATED:
            liar.join()
        if order.kind == rpc.ORDER_KIND_FINISH:
            break
    return outcomes


def _tell(liar: Liar, method: str, lie: Lie, order: rpc.Order) -> tuple[str, str]:
    answer = liar.lie(method, lie, order)
    if method == "Join" and isinstance(answer, bytes):
        liar.token = rpc.JoinResponse.FromString(answer).token
    elif method in ("JoinSeveral", "Leave") and isinstance(answer, bytes):
        liar.join()
    return f"{method} {lie}", "taken" if isinstance(answer, bytes) else answer.name
