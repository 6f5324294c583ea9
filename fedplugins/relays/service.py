"""The calls of a relay: those of a coordinator, passed on to the one above."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.host.guarded import Guarded
from fedmodels.tensors.bundle import ClientId, Problem
from fedpb.tables import usual_of, values_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import description_pb2 as pb
from fedplugins.relays.trips import PassedOn, RelayedRun, RelayedTrips
from fedplugins.relays.uplink import Q, R, Uplink
from fedsrv.identity.guard import Guard, NotYours
from fedsrv.progress.events import EventLog
from fedsrv.transport.journal import Journal
from fedsrv.transport.refusals import NotReady, UnknownSession, WrongRun
from fedsrv.transport.service import Service, coded

log = logging.getLogger(__name__)


class RelayService:
    """The calls of a relay's clients: a service below, and a link to the coordinator above."""

    _run_id: Guarded[str] = Guarded("_lock")
    """The one run that is passed on: that of the client that joined first."""
    _last: Guarded[tuple[object, RelayedRun | None]] = Guarded("_lock")
    """The config sent to the client that joined last, and the run; a resumed run may change it."""

    def __init__(
        self,
        clients: range,
        trips: RelayedTrips,
        events: EventLog,
        uplink: Uplink,
        *,
        guard: Guard | None = None,
        code: Sequence[Path] = (),
        journal: Journal | None = None,
        on_other_run: Callable[[str, str], None] = lambda run, other: None,
    ) -> None:
        """Pass calls on.

        ``code`` are custom files whose code may run, if the run's config names them. ``journal`` is
        told who did what. ``on_other_run`` is told the ids of the run that clients have joined and
        of another one, once the coordinator above serves that.
        """
        self.name = f"{clients[0]}-{clients[-1]}"
        """The relay's name above: the ids of its clients, so it is the same after a restart."""
        self.process = secrets.token_bytes(16)
        """Tells this process from another relay of the same name."""
        self.trips, self.uplink, self.code = trips, uplink, code
        self._ids = {str(client) for client in clients}
        self.below = below = Service(
            "", {}, trips.below, events,
            guard=guard, passed_on=PassedOn(trips, uplink).take,
            check_id=self._check_id, journal=journal,
        )  # fmt: skip
        self.cohort, self.events, self.health = below.cohort, below.events, below.health
        self.gate, self.complaints, self.refuse = below.gate, below.complaints, below.refuse
        self.pull, self.push, self.watch = below.pull, below.push, below.watch
        self.push_several = below.push_several
        self._told = ""
        self._lock, self._on_other_run = trips.changed, on_other_run
        self._run_id = ""
        self._last = None, None

    def _check_id(self, text: str) -> None:
        if text not in self._ids:
            who = printable(text, 60)
            raise PayloadError(f"this relay is for clients {self.name}; {who!r} joins elsewhere")

    @coded
    def prepare(
        self, request: rpc.PrepareRequest, context: grpc.ServicerContext
    ) -> rpc.PrepareResponse:
        """Pass on that a client asks how its files are to be cut."""
        self.below.client(request.client_id, context)
        reply = self.uplink.prepare(request)
        if reply.places:  # a front has come up, and this relay took it for a run's coordinator
            self._on_other_run("", "")
            raise NotReady("this relay continues with a run of the queue; ask again")
        self._is_another(reply.run_id)
        return reply

    @coded
    def join(self, request: rpc.JoinRequest, context: grpc.ServicerContext) -> rpc.JoinResponse:
        """Pass on that a client joins."""
        client = self.below.client(request.client_id, context)
        self._begin_join(request, context)
        reply = self._passed(self.uplink.join, request)
        self._begin_run(reply.run_id)
        self._learn(client, reply, request.description)
        token = request.token or reply.token
        self._admit(context, client, token, request.versions, request.start_over)
        return reply

    @coded
    def join_several(
        self, request: rpc.JoinSeveralRequest, context: grpc.ServicerContext
    ) -> rpc.JoinSeveralResponse:
        """Pass on that clients of one process join."""
        clients = [self.below.client(one.client_id, context) for one in request.clients]
        self._begin_join(request, context)
        reply = self._passed(self.uplink.join_several, request)
        self._begin_run(reply.joined.run_id)
        for client, one in zip(clients, request.clients, strict=True):
            self._learn(client, reply.joined, request.descriptions[one.description])
            self._admit(context, client, one.token, one.versions, request.start_over)
        return reply

    def _begin_run(self, run_id: str) -> None:
        """Take the run that a client has joined for the one that is passed on.

        Raises:
            NotReady: it is another one than others have joined.
        """
        with self._lock:
            self._run_id = self._run_id or run_id
        if self._is_another(run_id):
            raise NotReady("this relay leaves its former run; join again")

    def _is_another(self, run_id: str) -> bool:
        """Tell whether a run is another one than that which is passed on, which then ends here."""
        with self._lock:
            known = self._run_id
        if not known or run_id in ("", known):  # an earlier version may not say it
            return False
        self._on_other_run(known, run_id)
        return True

    def _passed(self, join: Callable[[Q], R], request: Q) -> R:
        """Have the coordinator above admit clients; say once why it makes them wait."""
        try:
            return join(request)
        except NotReady as error:
            if not error.is_fault and str(error) != self._told:
                log.warning("clients cannot join yet: %s", error)
                self._told = str(error)
            raise

    def _admit(
        self,
        context: grpc.ServicerContext,
        client: ClientId,
        token: bytes,
        versions: Sequence[int],
        start_over: bool,
    ) -> None:
        """Begin the session here of a client that the coordinator above has admitted."""
        took_over = self.cohort.presence.is_there(client)
        self.cohort.join(client, "", token, versions, start_over)
        self.below.journal.tell("joined", context, client, took_over=took_over)

    def _begin_join(
        self, request: rpc.JoinRequest | rpc.JoinSeveralRequest, context: grpc.ServicerContext
    ) -> None:
        self.below.guard.check_joins_itself(context)
        if request.relay:
            raise PayloadError(
                "a relay cannot stand behind another: give it the coordinator's --up"
            )
        request.relay, request.relay_process = self.name, self.process
        self.trips.begin_join()

    def _learn(
        self, client: ClientId, reply: rpc.JoinResponse, description: pb.ClientDescription
    ) -> None:
        """Remember what travels to and from a client, by the problem that it states."""
        classes = (
            len(reply.class_names) or description.num_classes
        )  # of an open run, the first ones
        problem = Problem(tuple(description.input_shape), classes)
        with self._lock:
            known, run = self._last
        if run is None or run.facts.problem != problem or known != reply.experiment:
            try:
                run = RelayedRun.of(
                    values_of(reply.experiment), problem, self.code, usual_of(reply.experiment)
                )
            except ConfigError as error:
                raise WrongRun(str(error)) from None
            with self._lock:
                self._last = reply.experiment, run
            self.uplink.zstd = run.facts.experiment.zstd
        self.trips.learn(client, run)

    @coded
    def announce(
        self, request: rpc.AnnounceRequest, context: grpc.ServicerContext
    ) -> rpc.AnnounceResponse:
        """Pass on that a client of an open run has new tasks."""
        self.below.session(request.client_id, request.token, context)
        return self.uplink.announce(request)

    @coded
    def steer(self, request: rpc.SteerRequest, context: grpc.ServicerContext) -> rpc.SteerResponse:
        """Refuse what an operator wants of the run.

        Raises:
            WrongRun: always; says where to go.
        """
        raise WrongRun(f"this is a relay: ask the run's coordinator, {self.uplink.address}")

    @coded
    def beat(self, request: rpc.BeatRequest, context: grpc.ServicerContext) -> rpc.BeatResponse:
        """Pass on a sign of life."""
        _, session = self.below.session(request.client_id, request.token, context)
        self.cohort.is_safe(session, request.durable)
        return self.uplink.beat(request)

    @coded
    def leave(self, request: rpc.LeaveRequest, context: grpc.ServicerContext) -> rpc.LeaveResponse:
        """Pass on that clients leave; one that is refused keeps no other one here."""
        leaving = [one for one in (request, *request.others) if self._is_here(one, context)]
        try:
            if leaving:
                first, *others = leaving
                passed = rpc.LeaveRequest()
                passed.CopyFrom(request)
                passed.client_id, passed.token = first.client_id, first.token
                del passed.others[:]
                passed.others.extend(others)
                return self.uplink.leave(passed)
        finally:
            found = self.below.leave(request, context)  # refuses those that are unknown
        return found

    def _is_here(self, one: rpc.LeaveRequest | rpc.Leaving, context: grpc.ServicerContext) -> bool:
        """Tell whether a client has a session here."""
        try:
            self.below.session(one.client_id, one.token, context)
        except (PayloadError, NotYours, UnknownSession):
            return False
        return True
