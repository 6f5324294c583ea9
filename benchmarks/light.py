"""Light clients: they speak the protocol by hand, many to a process, each over its own connection.

    python -m benchmarks.light CONFIG DATA HOST:PORT FIRST-LAST [KIND]

They train nothing: an upload is the initial weights, a score is that all was right. KIND is
``honest``, ``slow`` (every answer takes two seconds) or ``liar`` (every answer is wrong somewhere).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from fedmodels.facts.config_file import parse_experiment
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.run import RunFacts
from fedpb import PROTOCOL
from fedpb.codec import encode
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import coordinator_pb2_grpc

SLOW_S = 2.0
APART = [("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", 20_000)]
"""Each client has a connection of its own, as if it came from a machine of its own."""
OVER = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.FAILED_PRECONDITION)


@dataclass
class Light:
    """One light client."""

    client: int
    description: str
    weights: dict[str, Any]
    kind: str
    lies: Iterator[str] = field(default_factory=lambda: itertools.cycle(LIES))
    token: bytes = b""
    issue: int = 0
    finished: bool = False

    async def live(self, address: str) -> None:
        """Join, answer every order, and come back when the link breaks, until the run is over."""
        async with grpc.aio.insecure_channel(address, options=APART) as channel:
            stub, wait_s = coordinator_pb2_grpc.CoordinatorServiceStub(channel), 0.1
            while True:
                try:
                    await self._join(stub)
                    await self._obey(stub)
                    wait_s = 0.1
                except grpc.aio.AioRpcError as error:
                    self.finished = self.finished or error.code() in OVER
                if self.finished:
                    return await self._leave(stub)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, 2.0)

    async def _join(self, stub: Any) -> None:
        self.token = self.token or hashlib.sha256(str(self.client).encode()).digest()[:16]
        request = {"client_id": str(self.client), "description": description_of(self.description)}
        request |= {"token": self.token, "protocol": PROTOCOL}
        self.token = (await stub.Join(rpc.JoinRequest(**request))).token

    async def _leave(self, stub: Any) -> None:
        """Give the session back, if the server is still there."""
        request = rpc.LeaveRequest(client_id=str(self.client), token=self.token, reason="finished")
        with suppress(grpc.aio.AioRpcError):
            await stub.Leave(request, timeout=2.0)

    async def _obey(self, stub: Any) -> None:
        """Answer the orders of one Pull."""
        waiting = rpc.Waiting(
            client_id=str(self.client), token=self.token, durable=-1, issue=self.issue
        )
        missing, order = 0, None
        async for chunk in stub.Pull(rpc.PullRequest(waiting=[waiting])):
            if chunk.HasField("header"):
                order = chunk.header.order
                missing = sum(p.bundle.payload_bytes for p in chunk.header.parts if not p.held)
            missing -= len(chunk.frame.payload)
            if order is not None and missing <= 0:
                self.issue = order.issue
                await self._answer(stub, order)
                order = None

    async def _answer(self, stub: Any, order: rpc.Order) -> None:
        if self.kind == "slow":
            await asyncio.sleep(SLOW_S)
        try:
            await stub.Push(iter(self._chunks(order)))
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED):
                raise
        self.finished = order.kind == rpc.ORDER_KIND_FINISH

    def _chunks(self, order: rpc.Order) -> list[rpc.PushRequest]:
        facts = json.loads(self.description)
        examples = sum(sum(task["train"]) for task in facts["tasks"][: order.task + 1][-1:])
        upload, report = Bundle(), rpc.Report()
        if order.kind == rpc.ORDER_KIND_TRAIN:
            report.num_examples = examples
            upload = Bundle(weights=self.weights, scalars={"num_examples": float(examples)})
        elif order.kind == rpc.ORDER_KIND_EVALUATE:
            report.counts.extend(_all_right(order, facts))
        else:
            report.state_sha256 = hashlib.sha256(b"light").hexdigest()
        encoded = encode(upload)
        header = rpc.PushHeader(
            client_id=str(self.client), token=self.token, kind=order.kind, report=report,
            interaction=order.interaction, trip=order.trip, bundle=encoded.header,
        )  # fmt: skip
        chunks = [rpc.PushRequest.FromString(chunk) for chunk in encoded.chunks()]
        if self.kind == "liar" and order.kind == rpc.ORDER_KIND_TRAIN:
            _spoil(next(self.lies), header, chunks)
        return [rpc.PushRequest(header=header), *chunks]


def _all_right(order: rpc.Order, facts: dict[str, Any]) -> list[rpc.Counts]:
    """Return scores that say that every example was predicted as what it is."""
    return [
        rpc.Counts(
            view=view, rule="classifier", test_set=f"task/{k}",
            support=task["test"], predicted=task["test"], correct=task["test"],
        )
        for view in order.views
        for k, task in enumerate(facts["tasks"][: order.tasks_seen])
    ]  # fmt: skip


LIES = ("nan", "claim", "short", "name", "examples", "rules", "extra")


def _spoil(lie: str, header: rpc.PushHeader, chunks: list[rpc.PushRequest]) -> None:
    """Make a push wrong in one way."""
    if lie == "nan":
        header.report.seconds = math.nan
    elif lie == "claim":
        header.bundle.payload_bytes = 10 << 30
    elif lie == "short":
        chunks.pop()
    elif lie == "name":
        header.bundle.weights.tensors[0].name = "head/nothing"
    elif lie == "examples":
        header.report.num_examples = 2**62
    elif lie == "rules":
        header.report.counts.extend(rpc.Counts(view="global", rule=f"r{i}") for i in range(9000))
    else:
        header.report.extra.update({f"views{i}": math.inf for i in range(5000)})


async def _live_all(clients: list[Light], address: str) -> None:
    await asyncio.gather(*(client.live(address) for client in clients))


def main() -> None:
    """Be these clients until the run is over."""
    config, data, address, ids, *kind = sys.argv[1:]
    first, _, last = ids.partition("-")
    clients = range(int(first), int(last or first) + 1)
    files = {c: (Path(data) / str(c) / "client.json").read_text() for c in clients}
    facts = json.loads(files[clients[0]])
    problem = Problem(tuple(facts["input_shape"]), facts["num_classes"])
    run = RunFacts(parse_experiment(Path(config).read_text(), config, ()), problem)
    weights = dict(run.initial_weights)
    kinds = kind[0] if kind else "honest"
    asyncio.run(_live_all([Light(c, text, weights, kinds) for c, text in files.items()], address))


if __name__ == "__main__":
    main()
