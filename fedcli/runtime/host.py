"""One process that hosts one or several clients: they train in turn, beside the network.

Of its threads the main one trains, one pulls orders, one pushes results, and one sends heartbeats.
In an open run a fifth one announces new tasks. While the main thread works through the orders of
one message, the next message is fetched. A result waits until the one before it is sent.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedcli.runtime.answers import (
    Dismissed,
    RunOver,
    SessionGone,
    Superseded,
    UploadRefused,
)
from fedcli.runtime.client_part import NOTHING, Brought
from fedcli.runtime.enrolment import Enrolment, client_of
from fedcli.runtime.link import Link, Membership
from fedcli.runtime.order_queue import OrderQueue
from fedcli.runtime.patience import executed, patiently
from fedcli.runtime.state import lock_states
from fedcli.runtime.worker import GivenOrder, Progress, Result
from fedcli.runtime.workers import Workers
from fedmodels.config.bounds import DETAILS, CountDetail
from fedmodels.config.combinations import halves_of, part_at
from fedmodels.console.printable import printable
from fedmodels.errors import (
    ArchiveError,
    ConfigError,
    FedtideError,
    LinkError,
    PayloadError,
    SetOut,
)
from fedmodels.facts.resolution import received_experiment
from fedmodels.host.machine import end_if_signalled, give_back_free_pages
from fedmodels.own.code_names import refuse_exits
from fedmodels.tensors.bundle import ClientId
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.times import WAKE_S
from fedmodels.training.asked import reported
from fedpb.orders import WITHOUT_PAYLOAD
from fedpb.tables import usual_of, values_of
from fedpb.v1 import coordinator_pb2 as rpc

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from fedcli.runtime.own_certificate import OwnCertificate
    from fedmodels.config.experiment import Experiment


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
        weights: Sequence[Path] = (),
        deploys: bool = False,
        certificate: OwnCertificate | None = None,
        announce: CountDetail = "exact",
        brought: Mapping[str, Brought] = NOTHING,
        shown: Experiment | None = None,
    ) -> None:
        """Make ready; what is wrong with a client's data or state shows when it joins.

        Arguments are as of :func:`fedcli.joining.host_of`, but for ``data``, a directory with one
        for each client or with a store; ``brought``: what the site brings for parts, by name; and
        ``shown``: the config of the run as a site with conditions has looked at it.
        """
        self._certificate, self._shown = certificate, shown
        self.announce = announce
        self.link, self.code, self.weights, self._states = link, code, weights, states
        self.data = data
        self.workers = Workers(clients, data, states, device, brought, deploys=deploys)
        self._ids = frozenset(map(str, clients))
        self.enrolment = Enrolment(
            link, self.workers, states, start_over=start_over, announce=announce
        )
        self._pulling_as: dict[ClientId, Membership] = {}
        self._issues: dict[ClientId, int] = {}
        self._orders = OrderQueue()
        self._results: queue.Queue[list[Result] | None] = queue.Queue(1)
        self._unfinished: dict[str, str] = {}
        """Why a client could not do its last order, by id."""
        self._closed = threading.Event()

    # --- joining ----------------------------------------------------------------------------------

    def join(self) -> None:
        """Join the run with every client.

        Raises:
            LinkError: the server refused one of them.
            ConfigError: the run asks for an extra that is not installed, or for less privacy than
                the site requires.
        """
        if self._certificate is not None:
            self._certificate.remind()
        reply = self.enrolment.join()
        self.beat_every_s = reply.beat_every_s
        experiment = received_experiment(
            values_of(reply.experiment),
            "the server's experiment",
            self.code,
            self.weights,
            usual_of(reply.experiment),
        )
        self._check_shown(experiment)
        for brought in self.workers.brought.values():
            brought.joined(experiment, reply.run_id, self.workers.clients)
        told = self.announce
        if DETAILS.index(experiment.announced) > DETAILS.index(told):
            log.warning(
                "this run takes %s counts of examples, and it was told exact ones: join with "
                "--announce %s", experiment.announced, experiment.announced,
            )  # fmt: skip
        torch.set_num_threads(experiment.training.threads)
        if experiment.zstd:
            part_at("fedpb.zstd:check_installed")()
        self.link.zstd = experiment.zstd
        self.workers.begin(experiment, reply.class_names)
        set_up = self.workers.set_ups.of(rpc.Order())
        for run in set_up.run.of_each_net:
            self.link.gate.declare(reported(set_up.method, run) | set_up.wire.tells)
        beside = (part.beside(self.enrolment) for part in halves_of(experiment, "client"))
        self._looks = [look for look in beside if look is not None]

    def _check_shown(self, experiment: Experiment) -> None:
        """Hold the config of a run against the one that a site with conditions has looked at.

        A run that is resumed may have more rounds, say: what may change then may differ.

        Raises:
            ConfigError: it differs in something else.
        """
        if self._shown is None or experiment == self._shown:
            return
        from fedmodels.config.changes import forbidden_changes

        if other := forbidden_changes(self._shown, experiment):
            raise ConfigError(
                "the server gives those who join another config than it showed before, which this "
                f"site looked at: it differs in {', '.join(other[:5])}, so the site stays out"
            )

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Do what the server orders until it says that the run is over.

        Raises:
            FedtideError: see :meth:`taking_part`.
        """
        with self.taking_part(), refuse_exits():
            for given in self.orders():
                self.hand_on(self.execute(given))

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Join, let the block do what the server orders, and leave.

        A client whose last result was taken stays until the end: a server that dies before it has
        committed the end wants everybody again.

        Raises:
            LinkError: the server refused, stayed away for longer than allowed, or the run failed.
            ArchiveError: another process has one of the clients, or the run is over, and one could
                not store its final model.
        """
        leaving, lock = "", None
        try:
            lock = lock_states(self._states, self.workers.clients)
            patiently(f"client {self.workers.clients[0]}", self.join, lambda: True)
            log.info("waiting for orders")
            give_back_free_pages()
            yield
            leaving = "finished"
            self.hand_on(None)
            while self._pushing.is_alive():
                self._pushing.join(WAKE_S)
            if self._orders.failure is not None:
                raise self._orders.failure
            self._check_finished()
        except Dismissed:
            leaving = "told that the run has failed"
            raise
        except ConfigError:
            leaving = "cannot do what the run asks for"
            raise
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            leaving = "stopped"
            log.warning("stopped as asked: leaves the run; the same command rejoins")
            raise
        finally:
            self._closed.set()
            if leaving:
                self.link.leave(self.enrolment.members.values(), leaving)
            self.link.close()
            if lock is not None:
                os.close(lock)

    def orders(self) -> Iterator[GivenOrder]:
        """Yield what is to be done next, until the run is over.

        Whoever iterates hands on the results.
        """
        self._pushing = threading.Thread(target=self._push_forever, name="push", daemon=True)
        self._pushing.start()
        for work in (self._pull_forever, self._beat_forever):
            threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True).start()
        for look in self._looks:
            threading.Thread(target=self._look_forever, args=[look], daemon=True).start()
        while True:
            try:
                given = self._next_order()
            except RunOver:
                return
            with self.workers.set_ups.busy:
                yield given

    def hand_on(self, results: list[Result] | None) -> None:
        """Give results, or None at the end, to the thread that pushes; wait until it has room.

        Raises:
            BaseException: what another thread says ends this process.
        """
        while results is None or results:
            with suppress(queue.Full):
                return self._results.put(results, timeout=WAKE_S)
            if self._orders.failure is not None:
                raise self._orders.failure

    def _next_order(self) -> GivenOrder:
        """Wait for an order."""
        end_if_signalled()
        order, payload = self._orders.take()
        self.workers.follow(order.settings)
        return GivenOrder(self.workers.of(client_of(order.client_id)), order, payload)

    def execute(self, given: GivenOrder) -> list[Result]:
        """Do what an order says; one that was abandoned on the way has no result."""
        results = executed(given)
        for result in results:
            if result.order.kind == rpc.ORDER_KIND_FINISH:
                self._unfinished[result.order.client_id] = result.failure
        return results

    def _check_finished(self) -> None:
        """Raise ArchiveError unless every client stored what is left of a run; says why."""
        for client, why in self._unfinished.items():
            if why:
                raise ArchiveError(
                    f"the run is over, but client {client} has no final model: {why}"
                )

    def _pull_forever(self) -> None:
        with self._ending("orders cannot be read"):
            while not self._closed.is_set():
                try:
                    orders = self.link.pull(self._waiting, self._spec)
                    for order, _ in orders:
                        self._issues[client_of(order.client_id)] = order.issue
                    self._orders.put(orders)
                    del orders
                except SessionGone:
                    self._rejoin()
                except RunOver:
                    self._abandon()
                    return self._orders.end()
                except Dismissed:
                    self._abandon()
                    raise

    def _rejoin(self) -> None:
        """Renew sessions that the server has forgotten; SetOut where it takes nobody any more."""
        try:
            self.enrolment.rejoin(self._pulling_as)
        except SetOut:
            self._abandon()
            raise

    @contextmanager
    def _ending(self, what: str) -> Iterator[None]:
        """End the process with an error of one of its threads, so that no other thread waits."""
        try:
            yield
        except FedtideError as error:
            self._orders.end(error)
        except Exception as error:
            log.exception(what)
            self._orders.end(LinkError(f"{what}: {printable(str(error))}"))

    def _abandon(self) -> None:
        """End what is trained: nobody waits for it any more."""
        for worker in self.workers.open().values():
            worker.progress.superseded = True

    def _waiting(self) -> list[rpc.Waiting]:
        """Say for whom a Pull waits, and remember with which sessions."""
        members, out = self.enrolment.members, self.enrolment.out
        self._pulling_as = {c: member for c, member in members.items() if c not in out}
        return [
            rpc.Waiting(
                client_id=str(c),
                token=m.token,
                durable=self.workers.durable(c),
                issue=self._issues.get(c, 0),
            )
            for c, m in self._pulling_as.items()
        ]

    def _spec(self, order: rpc.Order) -> Mapping[str, BundleSpec]:
        """Return what the parts of an order's payload must hold."""
        if order.client_id not in self._ids:
            raise PayloadError(
                f"an order is for client {printable(order.client_id, 60)}, which is not in this "
                "process"
            )
        without = order.kind in WITHOUT_PAYLOAD
        return {} if without else self.workers.set_ups.of(order).payload_spec

    def _push_forever(self) -> None:
        while (results := self._results.get()) is not None:
            if self._orders.failure is None:  # after one, results are only taken off the queue
                with self._ending("results cannot be brought back"):
                    for result in results:
                        self._push(result)

    def _push(self, result: Result) -> None:
        """Bring a result until it is taken or refused; FedtideError if this process has to end."""
        while True:
            member = self.enrolment.members[client_of(result.order.client_id)]
            try:
                self.link.push(member, result)
                return
            except (SessionGone, UploadRefused, Superseded, RunOver) as error:
                if not self._is_brought_again(member, error):
                    return

    def _is_brought_again(self, member: Membership, error: Exception) -> bool:
        """Handle a Push's answer; return whether to push again."""
        if isinstance(error, SessionGone):
            self.enrolment.rejoin({member.client: member})
            return member.client not in self.enrolment.out
        if isinstance(error, UploadRefused):  # this client fails for this interaction
            log.error("%s", error)
        else:
            log.warning("client %s: %s", member.client, error)
        return False

    def _beat_forever(self) -> None:
        """Tell how far those at work are, and what became safe on the disk after its upload.

        A client of a large population may get no order again for a long time: without the beat, the
        run would keep every state since its upload.
        """
        told: dict[ClientId, int] = {}
        while not self._closed.wait(self.beat_every_s):
            if self._certificate is not None:
                self._certificate.remind()
            at_work = {
                client: worker.progress
                for client, worker in self.workers.open().items()
                if worker.progress.interaction >= 0
            }
            if self.link.is_arriving and not at_work:  # else a slow link looks like a dead one
                at_work = dict.fromkeys([*self._pulling_as][:1], Progress())
            durable = self.workers.all_durable()
            news = (client for client in durable if durable[client] != told.get(client, -1))
            for client in dict.fromkeys([*at_work, *news]):
                if client in self.enrolment.out:
                    continue
                member, safe = self.enrolment.members[client], durable.get(client, -1)
                if self.link.beat(member, at_work.get(client, Progress()), safe):
                    told[client] = safe

    def _look_forever(self, look: Callable[[], None]) -> None:
        """Do what a part does beside orders, as often as the process beats."""
        while not self._closed.wait(self.beat_every_s):
            try:
                look()
            except Exception:  # the run goes on
                if not self._closed.is_set():
                    log.exception("what a part of the run does beside orders failed")
