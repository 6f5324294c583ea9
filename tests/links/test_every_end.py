"""A process of several clients ends with a line, whoever of its threads meets the end first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from fedcli.runtime.host import Host
from fedcli.runtime.link import Link
from fedcli.runtime.worker import Progress
from fedmodels.errors import ArchiveError, LinkError
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.run import RunFacts
from fedpb.codec import encode
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import coordinator_pb2_grpc
from tests.conftest import tiny_experiment
from tests.links.test_several_results import result

pytestmark = pytest.mark.loopback

PATIENCE_S = 60.0


class Server(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """A server that gives three clients an order each, and lets a test decide what follows."""

    def __init__(self) -> None:
        self.experiment = tiny_experiment(schedule={"rounds": 1, "clients": 3})
        self.pushed, self.gone = threading.Event(), threading.Event()
        self.orders = [
            rpc.Order(
                kind=rpc.ORDER_KIND_TRAIN, client_id=str(c), issue=1, base=-1, following=2 - c
            )
            for c in range(3)
        ]

    def JoinSeveral(self, request: Any, context: Any) -> rpc.JoinSeveralResponse:  # noqa: N802
        table = table_of(self.experiment.to_dict())
        reply = rpc.JoinResponse(run_id="abc", beat_every_s=2.0, experiment=table)
        return rpc.JoinSeveralResponse(joined=reply)

    def Pull(self, request: Any, context: Any) -> Iterator[rpc.PullResponse]:  # noqa: N802
        if self.gone.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        weights = RunFacts(self.experiment, Problem((1, 8, 8), 10)).initial_weights
        encoded = encode(Bundle(weights=weights))
        header = rpc.PullHeader(order=self.orders[0], more=self.orders[1:])
        header.parts.add(role="common", digest=encoded.digest, bundle=encoded.header)
        yield rpc.PullResponse(header=header)
        yield from map(rpc.PullResponse.FromString, encoded.chunks())
        self.after(context)

    def after(self, context: Any) -> None:
        """Go on after the orders."""
        self.gone.wait(PATIENCE_S)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    def Push(self, requests: Any, context: Any) -> rpc.PushResponse:  # noqa: N802
        self.pushed.set()
        self.gone.wait(PATIENCE_S)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        raise AssertionError

    def Beat(self, request: Any, context: Any) -> rpc.BeatResponse:  # noqa: N802
        return rpc.BeatResponse()

    def Leave(self, request: Any, context: Any) -> rpc.LeaveResponse:  # noqa: N802
        return rpc.LeaveResponse()


@pytest.fixture
def ending(digits: Path, tmp_path: Path) -> Iterator[Any]:
    """Return what runs three clients against a server, and returns the error they end with."""
    stack: list[tuple[grpc.Server, Server]] = []

    def run(service: Server, meanwhile: Any = lambda: None) -> BaseException:
        server = grpc.server(ThreadPoolExecutor(8))
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(service, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        stack.append((server, service))
        link = Link(address, None, give_up_after_s=1.0)
        host = Host(range(3), link, digits, tmp_path / "states", torch.device("cpu"))
        ends: list[BaseException] = []

        def until_the_end() -> None:
            try:
                host.run()
            except BaseException as error:
                ends.append(error)

        thread = threading.Thread(target=until_the_end, daemon=True)
        thread.start()
        meanwhile()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it hangs"
        return ends[0]

    yield run
    for server, service in stack:
        service.gone.set()
        server.stop(None).wait()


def test_a_process_whose_server_is_gone_gives_up_with_results_on_their_way(ending):
    """One result is being brought, one waits, the third has no place: all threads are held up."""
    service = Server()

    def dies() -> None:
        assert service.pushed.wait(PATIENCE_S)
        service.gone.set()

    found = ending(service, dies)
    assert isinstance(found, LinkError)
    assert "gave up" in str(found)


def test_two_orders_for_one_client_end_a_process(ending):
    """Each would make a net of its own."""
    service = Server()
    service.orders[2].client_id = "0"
    found = ending(service)
    assert str(found) == "a message brings two orders for one client"


def test_a_session_that_cannot_be_read_ends_a_process(ending, tmp_path, monkeypatch):
    """Joining again reads it, in the threads that pull and push."""

    class Forgets(Server):
        def after(self, context: Any) -> None:
            self.pushed.wait(PATIENCE_S)
            file = tmp_path / "states" / "session.json"
            file.unlink()
            file.mkdir()
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")

    found = ending(Forgets())
    assert isinstance(found, ArchiveError)
    assert str(found).endswith("session.json: Is a directory")


def test_calls_over_a_closed_link_say_so():
    link = Link("127.0.0.1:1")
    link.close()
    member, done = result(0)
    for call in (
        lambda: link.push(member, done),
        lambda: link.pull(list, lambda client: {}),
    ):
        with pytest.raises(LinkError, match="the link is closed"):
            call()
    assert not link.beat(member, Progress(), -1)
