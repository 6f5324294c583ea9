"""One process that hosts one or several clients: training in turn, network beside it.

Three threads: one pulls the next order, this one trains, one pushes results; a fourth sends
heartbeats. At most one order is fetched ahead and one result waits to be sent; where clients train
together, as many results as they are.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.partition_store import PartitionStore
from fedcli.runtime.diary import tell
from fedcli.runtime.link import (
    Dismissed,
    Link,
    Membership,
    RunOver,
    SessionGone,
    Superseded,
    UploadRefused,
)
from fedcli.runtime.state import Session, StateDirectory
from fedcli.runtime.together import Task, execute_together
from fedcli.runtime.worker import Result, Worker, open_data
from fedmodels.errors import FedtideError, LinkError
from fedmodels.resolution import experiment_of
from fedmodels.tensors.bundle import EVALUATOR, Bundle, BundleSpec, ClientId
from fedmodels.tensors.heap import give_back_free_pages
from fedpb import PROTOCOL
from fedpb.descriptions import description_of
from fedpb.tables import values_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.zstd import check_installed

KEEP_BYTES = 256 << 20
"""Bytes of uploads that a process keeps until their commit, over all its clients."""
TOKEN_BYTES = 16
IDLE_TOLD_S = 60.0
"""A process without an order says so at this interval."""
log = logging.getLogger(__name__)


class Host:
    """The clients of this process."""

    def __init__(
        self,
        clients: Sequence[ClientId],
        link: Link,
        data: Path,
        states: Path,
        device: torch.device,
        *,
        start_over: bool = False,
        code: Sequence[Path] = (),
    ) -> None:
        """Open every client's data and state, so that what is wrong with them shows at once.

        Args:
            clients: their ids.
            link: to the server.
            data: a directory with one for each client.
            states: a directory for the clients' states.
            device: where nets are trained.
            start_over: go on from the initial private state where a lost one is too far back.
            code: files of one's own whose code may run, if the server's experiment asks for it.
        """
        self.link, self.device, self.start_over, self.code = link, device, start_over, code
        store = PartitionStore.find(data)
        self.data: dict[ClientId, ClientData] = {c: open_data(data, c, store) for c in clients}
        self.states = {c: StateDirectory(states / str(c)) for c in clients}
        self.members: dict[ClientId, Membership] = {}
        self.workers: dict[ClientId, Worker] = {}
        self._pulling_as: dict[ClientId, Membership] = {}
        self._issues: dict[ClientId, int] = {}
        self._orders: queue.Queue[tuple[rpc.Order, Bundle] | BaseException] = queue.Queue(1)
        self._results: queue.Queue[Result | None] = queue.Queue(1)
        self._ahead: Task | None = None
        """An order taken off the queue that did not belong to those before it."""
        self._together = 1
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._rejoining = threading.Lock()

    # --- joining ----------------------------------------------------------------------------------

    def join(self) -> None:
        """Join the run with every client.

        Raises:
            LinkError: the server refused one of them.
        """
        for client in self.data:
            reply = self._join(client)
            self.beat_every_s = reply.beat_every_s
            if client not in self.workers:
                experiment = experiment_of(
                    values_of(reply.experiment), "the server's experiment", self.code
                )
                torch.set_num_threads(experiment.training.threads)
                self._together = experiment.training.together
                if experiment.zstd:
                    check_installed()
                self.link.zstd = experiment.zstd
                self.workers[client] = Worker(
                    client,
                    self.data[client],
                    self.states[client],
                    experiment,
                    self.device,
                    sibling=next(iter(self.workers.values()), None),
                    keep_bytes=KEEP_BYTES // len(self.data),
                )

    def _join(self, client: ClientId) -> rpc.JoinResponse:
        states = self.states[client]
        session = states.session()
        if not session.token:  # its own, and kept: a Join whose answer was lost can be repeated
            session = Session(session.run_id, secrets.token_bytes(TOKEN_BYTES))
            states.set_session(session)
        reply = self.link.join(
            rpc.JoinRequest(
                client_id=str(client),
                description=description_of(self.data[client].announcement()),
                run_id=session.run_id,
                token=session.token,
                versions=states.versions(),
                protocol=PROTOCOL,
                start_over=self.start_over,
            )
        )
        joined = Session(reply.run_id, reply.token)
        if joined != session:
            states.set_session(joined)
        self.members[client] = Membership(client, reply.run_id, reply.token)
        line = f" joined run {reply.run_id[:8]} at {self.link.address}"
        tell("joined", client, line, run_id=reply.run_id, server=self.link.address)
        return reply

    def _rejoin(self, gone: Mapping[ClientId, Membership]) -> None:
        """Renew sessions that the server has forgotten, unless another thread has done so."""
        with self._rejoining:
            for client, member in gone.items():
                if self.members[client] is member:
                    log.warning("client %s joins again", client)
                    self._join(client)

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Do what the server orders until it says that the run is over.

        A client whose last result was taken stays until then: a server that dies before it has
        committed the end wants everybody again.

        Raises:
            LinkError: the server refused, stayed away for longer than allowed, or the run failed.
        """
        leaving = ""
        try:
            self.join()
            log.info("waiting for orders")
            give_back_free_pages()
            self._work()
            leaving = "finished"
            self._results.put(None)
            self._pushing.join()
            if self._failure is not None:
                raise self._failure
        except Dismissed:
            leaving = "told that the run has failed"
            raise
        except (KeyboardInterrupt, SystemExit):
            leaving = "stopped"
            log.warning("stopped as asked: leaves the run; the same command takes part again")
            raise
        finally:
            self._closed.set()
            for member in self.members.values() if leaving else ():
                self.link.leave(member, leaving)
            self.link.close()

    def _work(self) -> None:
        """Do what orders say until the run is over."""
        self._results = queue.Queue(self._together)
        self._pushing = threading.Thread(target=self._push_forever, name="push", daemon=True)
        self._pushing.start()
        for work in (self._pull_forever, self._beat_forever):
            threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True).start()
        while True:
            try:
                tasks = self._next_tasks()
            except RunOver:
                return
            for result in self._execute(tasks):
                self._results.put(result)

    def _next_tasks(self) -> list[Task]:
        """Wait for an order, and for those that are to be trained together with it."""
        tasks = [self._next_task()]
        first = tasks[0].order
        if first.kind == rpc.ORDER_KIND_TRAIN:
            while len(tasks) < self._together and tasks[-1].order.following:
                task = self._next_task()
                if task.order.issue != first.issue:  # nobody waits for the others any more
                    self._ahead = task
                    break
                tasks.append(task)
        return tasks

    def _next_task(self) -> Task:
        if self._ahead is not None:
            task, self._ahead = self._ahead, None
            return task
        found = self._next_found()
        if isinstance(found, BaseException):
            raise found
        order, payload = found
        return Task(self.workers[client_of(order)], order, payload)

    def _next_found(self) -> tuple[rpc.Order, Bundle] | BaseException:
        """Wait for what the thread that pulls brings; say each minute that nothing came."""
        begun = time.monotonic()
        while True:
            with suppress(queue.Empty):
                return self._orders.get(timeout=IDLE_TOLD_S)
            waited = time.monotonic() - begun
            log.info("no order for %.0f s: the server waits for other clients, or is gone", waited)

    def _execute(self, tasks: list[Task]) -> list[Result]:
        """Do what orders say; those that were abandoned on the way have no result."""
        first = tasks[0]
        if self._together > 1 and first.order.kind == rpc.ORDER_KIND_TRAIN:
            return execute_together(tasks)
        result = first.worker.execute(first.order, first.payload)
        return [] if result is None else [result]

    def _pull_forever(self) -> None:
        while not self._closed.is_set():
            try:
                order, payload = self.link.pull(self._waiting, self._spec)
                self._issues[client_of(order)] = order.issue
                self._orders.put((order, payload))
                del payload
            except SessionGone:
                if not self._renew(self._pulling_as):
                    return
            except RunOver as over:
                self._abandon()
                self._orders.put(over)
                return
            except FedtideError as error:
                if isinstance(error, Dismissed):
                    self._abandon()
                if not self._closed.is_set():
                    self._orders.put(error)
                return

    def _abandon(self) -> None:
        """End what is trained: nobody waits for it any more."""
        for worker in self.workers.values():
            worker.progress.superseded = True

    def _waiting(self) -> list[rpc.Waiting]:
        """Say for whom a Pull waits, and remember with which sessions."""
        self._pulling_as = dict(self.members)
        return [
            rpc.Waiting(
                client_id=str(c),
                token=m.token,
                durable=self.states[c].durable,
                issue=self._issues.get(c, 0),
            )
            for c, m in self._pulling_as.items()
        ]

    def _renew(self, gone: Mapping[ClientId, Membership]) -> bool:
        """Join again; what goes wrong with that ends the process."""
        try:
            self._rejoin(gone)
        except FedtideError as error:
            self._fail(error)
            return False
        return True

    def _spec(self, client: str) -> Mapping[str, BundleSpec]:
        return next(iter(self.workers.values())).payload_spec

    def _push_forever(self) -> None:
        while (result := self._results.get()) is not None:
            if self._failure is None:  # after one, results are only taken off the queue
                self._push(result)

    def _push(self, result: Result) -> None:
        """Bring back one result, joining again where the server forgot the session."""
        client = client_of(result.order)
        while True:
            member = self.members[client]
            try:
                self.link.push(member, result)
                return
            except SessionGone:
                if not self._renew({client: member}):
                    return
            except UploadRefused as error:  # this client fails for this interaction
                log.error("%s", error)
                return
            except (Superseded, RunOver) as error:
                log.warning("client %s: %s", client, error)
                return
            except LinkError as error:
                self._fail(error)
                return

    def _fail(self, error: FedtideError) -> None:
        """End the process: the thread that trains finds the error where it waits for orders."""
        self._failure = self._failure or error
        self._orders.put(error)

    def _beat_forever(self) -> None:
        while not self._closed.wait(self.beat_every_s):
            for client, worker in self.workers.items():
                if worker.progress.interaction >= 0:
                    self.link.beat(
                        self.members[client], worker.progress, self.states[client].durable
                    )


def client_of(order: rpc.Order) -> ClientId:
    """Return the client an order is for."""
    return EVALUATOR if order.client_id == EVALUATOR else int(order.client_id)
