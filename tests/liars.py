"""A run without a network whose clients go through the service, and some of which lie.

Honest clients are workers of this process; what a liar sends is made of what it would have sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import torch

from fedcli.data.store.opened_data import open_data
from fedcli.parts.secure_peers import SecurePeers
from fedcli.parts.sum_terms import SumTerms
from fedcli.runtime.state import StateDirectory
from fedcli.runtime.worker import Worker
from fedmodels.config.experiment import Experiment
from fedmodels.tensors.bundle import Bundle
from fedpb import PROTOCOL
from fedpb.codec import encode, merged
from fedpb.orders import WITHOUT_PAYLOAD
from fedpb.peer_certificates import PeerCertificates
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.coordinator import set_aside
from fedsrv.engine.admission import Admission
from fedsrv.engine.rounds import Engine
from fedsrv.parts import parts_of
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool
from fedtide.inprocess import transported

Answer = tuple[Bundle, rpc.Report, str]
Lie = Callable[[int, rpc.Order, Answer], Answer]
"""From a client, its order and the honest answer to what it says instead."""


class Refused(Exception):
    """A call that the service ended with a code."""

    def __init__(self, code: grpc.StatusCode, line: str) -> None:
        super().__init__(f"{code.name}: {line}")
        self.code, self.line = code, line


class Gone(Exception):
    """Raised by a lie: the client is gone for good, without a word."""


class Caller:
    """As much of a call's context as the service looks at."""

    def auth_context(self) -> Mapping[str, Any]:
        return {}

    def abort(self, code: grpc.StatusCode, line: str) -> None:
        raise Refused(code, line)

    def is_active(self) -> bool:
        return True

    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True


class Stage:
    """An engine in a thread of its own, and a client in each of some others."""

    def __init__(
        self, experiment: Experiment, data: Path, out: Path, lie: Lie, liars: Collection[int] = (2,)
    ) -> None:
        self.experiment, self.data, self.out = experiment, data, out
        self.lie, self.liars = lie, liars
        self.refused: list[Refused] = []
        self.peers: PeerCertificates | None = None
        """Checks certificates for the coordinator, where clients have some."""
        self.signing: Callable[[int], SecurePeers | None] = lambda client: None
        """Returns what signs for a client in secure sums."""

    def run(self, resume: bool = False, without: Collection[int] = ()) -> dict[str, Any]:
        """Run to the end and return the summary; raises what the engine raises.

        Clients that are set aside never come.
        """
        store, events = Store(self.out, self.experiment, resume), EventLog()
        set_aside(store, [*without])
        aside = store.aside()
        spool = Spool(self.out / "server" / "spool", self.experiment.server.upload_memory_mb << 20)
        clients = self.experiment.schedule.clients
        admission = Admission.of(self.experiment, store.ledger.profiles())
        self.cohort = RemoteCohort(
            clients, spool, events, admission=admission,
            deadline_s=self.experiment.server.deadline_s, min_clients=self.experiment.min_clients,
            out=store.gone(store.committed + 1), peers=self.peers,
        )  # fmt: skip
        self.service = Service(store.run_id, {}, self.cohort, events)
        engine = Engine(self.experiment, self.cohort, store, events, parts_of(store, events))
        torch.set_num_threads(1)
        with ThreadPoolExecutor(1 + clients) as pool:
            ended: Future[dict[str, Any]] = pool.submit(engine.run)
            ended.add_done_callback(lambda _: self.cohort.wake())
            present = [c for c in range(clients) if c not in aside]
            served = [pool.submit(self._client, c, ended) for c in present]
            try:
                return ended.result()
            finally:
                self.cohort.wake()
                events.close()
                for each in served:
                    each.result()
                store.close()

    def announcement(self, client: int) -> str:
        return open_data(self.data, client).announcement()

    def _client(self, client: int, ended: Future[Any]) -> None:
        worker = Worker(
            client, open_data(self.data, client),
            StateDirectory(self.out / "clients" / str(client)),
            self.experiment, torch.device("cpu"),
            brought={"sums": SumTerms(lambda: self.signing(client))},
        )  # fmt: skip
        request = rpc.JoinRequest(
            client_id=str(client), description=description_of(self.announcement(client)),
            protocol=PROTOCOL, versions=worker.states.versions(),
        )  # fmt: skip
        reply = self.service.join(request, Caller())
        token = reply.token
        worker.brought["sums"].joined(self.experiment, reply.run_id, [])
        member, issue = self.cohort.session(client, token), 0
        while not ended.done():
            caller = self.cohort.caller({client: member}, {client: issue})
            found = self.cohort.next_orders(caller, lambda: not ended.done())
            if found is None:
                continue
            (order,), trip = found
            issue = order.issue
            parts, specs = {}, worker.set_up.payload_spec
            if order.kind not in WITHOUT_PAYLOAD:
                parts["common"] = transported(trip.trip.common, specs["common"])
            if client in trip.trip.personal:
                own = trip.trip.personal[client]
                parts["personal"] = transported(own, specs["personal"])
            done = worker.execute(order, merged(parts))
            assert done is not None
            answer = done.upload, done.report, done.failure
            try:
                if client in self.liars:
                    answer = self.lie(client, order, answer)
                self.push(client, token, order, answer)
            except Gone:
                return
            except Refused as refused:
                self.refused.append(refused)
                if client not in self.liars and refused.code != grpc.StatusCode.ABORTED:
                    raise

    def push(self, client: int, token: bytes, order: rpc.Order, answer: Answer) -> None:
        """Send a result as a client does."""
        bundle, report, failure = answer
        encoded = encode(bundle)
        header = rpc.PushHeader(
            client_id=str(client), token=token, kind=order.kind, interaction=order.interaction,
            trip=order.trip, report=report, bundle=encoded.header, failure=failure,
        )  # fmt: skip
        head = rpc.PushRequest(header=header).SerializeToString()
        self.service.push(iter([head, *encoded.chunks()]), Caller())


def silent(client: int, order: rpc.Order, answer: Answer) -> Answer:
    """Say that it could not be done."""
    return Bundle(), rpc.Report(), "no"
