"""The gRPC calls of the coordinator: the service checks each call, and the cohort answers it.

The server is synchronous: each call holds a thread while it lasts. So there are always more threads
than calls that processes can have under way. Payload messages pass as raw bytes; the codec reads
and writes them without a copy through protobuf.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health

from fedmodels.console.printable import printable
from fedmodels.errors import PayloadError, PayloadTooLarge
from fedmodels.facts.position import Interaction
from fedmodels.facts.run_classes import ClassChange
from fedmodels.plugins import gone, loaded
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedmodels.times import AGAIN_AFTER_MS, BEAT_EVERY_S
from fedpb import AGAIN_AFTER, PROTOCOL, SET_OUT
from fedpb.codec import messages
from fedpb.frames import unpacked
from fedpb.orders import WITHOUT_PAYLOAD
from fedpb.tables import client_json_of, description_of, table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1.description_pb2 import ClientDescription
from fedsrv.engine.admission import OtherPartition
from fedsrv.identity.guard import Guard, NotYours
from fedsrv.progress.events import Event, EventLog
from fedsrv.state.history import LossTooLarge
from fedsrv.transport.gate import Gate, RejectionLog
from fedsrv.transport.inbox import Ends, Inbox
from fedsrv.transport.intake import Push, Through
from fedsrv.transport.journal import Journal
from fedsrv.transport.open_trips import OpenTrip
from fedsrv.transport.refusals import (
    AlreadyConnected,
    NotReady,
    RunHasFailed,
    RunOver,
    SecondRelay,
    SetOut,
    Superseded,
    UnknownSession,
    WrongRun,
)
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.sessions import Caller, ClientSession, client_id_of

MAX_DESCRIBED = 256 << 20
"""Characters of the descriptions of all clients that join with one message."""
MAX_WATCHERS = 16
"""Limit of watchers at a time; each holds a thread that clients could use."""
log = logging.getLogger(__name__)


_CODES: dict[type[Exception], grpc.StatusCode] = {
    OtherPartition: grpc.StatusCode.NOT_FOUND,
    PayloadTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PayloadError: grpc.StatusCode.INVALID_ARGUMENT,
    WrongRun: grpc.StatusCode.FAILED_PRECONDITION,
    LossTooLarge: grpc.StatusCode.FAILED_PRECONDITION,
    NotYours: grpc.StatusCode.PERMISSION_DENIED,
    UnknownSession: grpc.StatusCode.UNAUTHENTICATED,
    AlreadyConnected: grpc.StatusCode.ALREADY_EXISTS,
    Superseded: grpc.StatusCode.ABORTED,
    RunOver: grpc.StatusCode.OUT_OF_RANGE,
    RunHasFailed: grpc.StatusCode.FAILED_PRECONDITION,
    SetOut: grpc.StatusCode.FAILED_PRECONDITION,
    NotReady: grpc.StatusCode.UNAVAILABLE,
}

F = TypeVar("F", bound=Callable[..., Any])


def coded(call: F) -> F:
    """Wrap a call of an object with ``refuse``: errors of the caller end it with gRPC codes."""

    @functools.wraps(call)
    def answered(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return call(self, request, context)
        except tuple(_CODES) as error:
            return self.refuse(context, error)

    return answered  # type: ignore[return-value]


class Service:
    """The calls of ``service CoordinatorService``."""

    def __init__(
        self,
        run_id: str,
        experiment: Mapping[str, Any],
        cohort: RemoteCohort,
        events: EventLog,
        *,
        guard: Guard | None = None,
        journal: Journal | None = None,
        passed_on: Ends | None = None,
        check_id: Callable[[str], None] = lambda text: None,
        exclude: Callable[[Sequence[int]], None] | None = None,
        set_aside: Callable[[Sequence[tuple[int, int]]], None] | None = None,
        classes: Callable[[Sequence[ClassChange], bool], Sequence[rpc.ClassOf]] | None = None,
        retire: Callable[[Sequence[int], bool], None] | None = None,
        close: Callable[[bool], None] | None = None,
        usual: Collection[tuple[str, ...]] = (),
    ) -> None:
        """Answer calls.

        Args:
            run_id: of the run.
            experiment: what clients are told of its config.
            cohort: who joins.
            events: told what happens.
            guard: checks who calls; by default everybody may.
            journal: told who did what; by default nothing is kept of it.
            passed_on: takes results on their way up; by default the cohort keeps them.
            check_id: refuses the ids of clients that have to join elsewhere.
            exclude: keeps in mind whom an operator excludes; by default nobody can be.
            set_aside: the same of single tasks, of a run that may grow.
            classes: the same of classes that are to change; returns those that an open run has.
            retire: the same of clients that leave for good, and are forgotten.
            close: the same of the end of the run, at once or not.
            usual: the keys of the config whose values are defaults.
        """
        self.run_id, self.experiment = run_id, table_of(experiment, usual)
        self._data: Mapping[str, Any] | None = experiment.get("data")
        scenario = experiment.get("scenario") or {}
        self._changed_by = next((k for k in ("domains", "concepts", "blur") if k in scenario), "")
        self._seed = int(experiment.get("seed", 0))
        how = (experiment.get("privacy") or {}).get("announce", "exact")
        self._announce = "" if how == "exact" else how
        self.cohort, self.events = cohort, events
        self.guard, self.journal, self.check_id = guard or Guard(), journal or Journal(), check_id
        self.journal.guard = self.guard
        self._exclude, self._set_aside, self._classes = exclude, set_aside, classes
        self._retire, self._close = retire, close
        self.complaints = RejectionLog(log)
        self.gate = Gate(cohort.most_present, admitted=self._admitted, look=self._look)
        self.inbox = Inbox(cohort, self.gate, passed_on)
        self.health = health.HealthServicer(experimental_non_blocking=False)
        self._watchers = threading.BoundedSemaphore(MAX_WATCHERS)
        self._told: set[str] = set()

    def refuse(self, context: grpc.ServicerContext, error: Exception) -> None:
        """End a call with the code and the line of an error."""
        code, line = self._judged(error, context)
        if isinstance(error, SecondRelay):
            self._tell_once(line)
        if isinstance(error, NotReady) and not error.is_fault:
            context.set_trailing_metadata(((AGAIN_AFTER, str(AGAIN_AFTER_MS)),))
        if isinstance(error, SetOut):
            context.set_trailing_metadata(((SET_OUT, str(error.client)),))
        context.abort(code, line)

    def _tell_once(self, line: str) -> None:
        """Tell watchers what is not meant, once."""
        with self.cohort.changed:
            is_new, self._told = line not in self._told, self._told | {line}
        if is_new:
            self.events.tell("note", line=line)

    def _judged(
        self, error: Exception, context: grpc.ServicerContext
    ) -> tuple[grpc.StatusCode, str]:
        """Return the code and the line of an error; complain where the caller is at fault."""
        code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
        line = printable(str(error))  # the line travels in a header, and may quote the caller
        passes = isinstance(error, NotReady) and not error.is_fault
        if not (passes or isinstance(error, RunOver | RunHasFailed)):
            self.complaints.tell(code.name, line)
            self.journal.tell("refused", context, code=code.name, line=line)
        return code, line

    @contextlib.contextmanager
    def _admitted(self, call: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Refuse a call that the caller's certificate does not allow."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.guard.admitted(call, context))
            except NotYours as error:
                self.refuse(context, error)
            yield

    def _look(self) -> None:
        """End calls whose certificates hold no more, warn of others; see which clients are gone."""
        self.guard.look()
        self.journal.write()
        self.cohort.look_after()
        for line in self.guard.warnings():
            self.events.tell("note", line=line)
            self.journal.warn(line)

    # --- who calls --------------------------------------------------------------------------------

    def client(self, text: str, context: grpc.ServicerContext) -> ClientId:
        """Read the client id and check that the certificate, if any, covers it."""
        self.check_id(text)
        client = client_id_of(text, self.cohort.num_clients)
        self.guard.check_covers(client, context)
        return client

    def session(
        self, text: str, token: bytes, context: grpc.ServicerContext
    ) -> tuple[ClientId, ClientSession]:
        """Return a client and its session, once certificate and token are checked."""
        client = self.client(text, context)
        return client, self.cohort.session(client, token)

    # --- calls ------------------------------------------------------------------------------------

    @coded
    def prepare(
        self, request: rpc.PrepareRequest, context: grpc.ServicerContext
    ) -> rpc.PrepareResponse:
        """Tell a client what the run is, and how it wants the client's own files cut."""
        client = self.client(request.client_id, context)
        self._check_protocol(request.protocol)
        if not request.has_cut:
            self._check_says_how_to_cut(client)
        return rpc.PrepareResponse(
            known=self._known(client) if request.wants_known else None,
            data=table_of(self._data or {}),
            seed=self._seed,
            announce=self._announce,
            run_id=self.run_id,
            experiment=self.experiment,
        )

    def _known(self, client: ClientId) -> ClientDescription:
        """Return how a client of an open run last described its data; PayloadError if it did not.

        Over mutual TLS, it is the client that asks.
        """
        self._check_open()
        admission = self.cohort.admission
        if admission is None or (text := admission.known(client)) is None:
            raise PayloadError(f"client {client} never described its data to this run")
        return description_of(text)

    def _check_says_how_to_cut(self, client: ClientId) -> None:
        """Check that the config says how a client's own files are cut; PayloadError if not."""
        if self._data is None:
            raise PayloadError(
                f"client {client} brings files of its own, and the run's config has no [data] that "
                "says how to cut them: bring a directory with client.json (docs/data.md)"
            )
        if self._changed_by:
            raise PayloadError(
                f"client {client} brings files of its own, and [scenario] {self._changed_by} "
                "changes the examples that fedcli partition deals out: leave it out of the run's "
                "config"
            )

    @coded
    def join(self, request: rpc.JoinRequest, context: grpc.ServicerContext) -> rpc.JoinResponse:
        """Admit a client to the run."""
        client = self.client(request.client_id, context)
        through = self._through(request, [client], context)
        self._check_run(request, f"client {client}'s state directory belongs")
        description = client_json_of(request.description)
        facts = request.token, request.versions, request.start_over, through
        token = self._admit(context, client, description, *facts)
        return self._welcome(token, request.known, [client])

    @coded
    def join_several(
        self, request: rpc.JoinSeveralRequest, context: grpc.ServicerContext
    ) -> rpc.JoinSeveralResponse:
        """Admit several clients of one process; if one is refused, those before it are admitted."""
        clients = [self.client(one.client_id, context) for one in request.clients]
        self._check_run(request, "these clients' state directories belong")
        if not clients:
            raise PayloadError("a JoinSeveral must name at least one client")
        if len({*clients}) < len(clients):
            raise PayloadError("a JoinSeveral must name each client once")
        through = self._through(request, clients, context)
        start_over, room = request.start_over, MAX_DESCRIBED
        for client, one in zip(clients, request.clients, strict=True):
            if not one.token:
                raise PayloadError(f"client {client} must bring a token to join with others")
            if one.description >= len(request.descriptions):
                raise PayloadError(f"client {client} names a description that is not there")
            shared = request.descriptions[one.description]
            del shared.tasks[:]
            shared.tasks.extend(one.tasks)
            shared.name = one.name
            description = client_json_of(shared)
            room -= len(description)
            if room < 0:
                raise PayloadError(
                    f"the descriptions take more than {MAX_DESCRIBED >> 20} MiB; join with fewer "
                    "clients in one process"
                )
            self._admit(context, client, description, one.token, one.versions, start_over, through)
        return rpc.JoinSeveralResponse(joined=self._welcome(b"", request.known, clients))

    def _admit(self, context: grpc.ServicerContext, client: ClientId, *facts: Any) -> bytes:
        """Admit one client by what it says; return its token."""
        with self.cohort.changed:
            took_over = client in self.cohort.sessions and self.cohort.presence.is_there(client)
        token: bytes = self.cohort.join(client, *facts)
        through: Through | None = facts[-1]
        told = through.told if through else {}
        self.journal.tell("joined", context, client, took_over=took_over, **told)
        return token

    def _check_protocol(self, spoken: int) -> None:
        """Check that a client speaks the protocol of this server."""
        if spoken != PROTOCOL:
            raise WrongRun(
                f"this server speaks protocol {PROTOCOL}, the client {spoken}: install one release "
                "of fedtide at both"
            )

    def _check_run(self, request: rpc.JoinRequest | rpc.JoinSeveralRequest, whose: str) -> None:
        """Check that whoever joins speaks this protocol and is of this run."""
        self._check_protocol(request.protocol)
        if request.run_id and request.run_id != self.run_id:
            raise WrongRun(
                f"{whose} to run {request.run_id[:8]}, this is run {self.run_id[:8]}; give it "
                "another --state-dir"
            )

    def _through(
        self,
        request: rpc.JoinRequest | rpc.JoinSeveralRequest,
        clients: Sequence[ClientId],
        context: grpc.ServicerContext,
    ) -> Through | None:
        """Return who passes a request on; None where the clients' own process makes the call."""
        if not request.relay:
            self.guard.check_joins_itself(context)
            return None
        admitted = next(loaded("fedsrv.relays"), None)
        if admitted is None:
            raise WrongRun(gone("a relay", "relays"))
        found: Through = admitted(
            request.relay, request.relay_process, clients,
            num_clients=self.cohort.num_clients,
            check_covers=lambda client: self.client(client, context),
            listening=self.cohort.listening(),
        )  # fmt: skip
        return found

    def _welcome(self, token: bytes, known: int, clients: Sequence[ClientId]) -> rpc.JoinResponse:
        with self.cohort.changed:
            committed = self.cohort.committed
        return rpc.JoinResponse(
            run_id=self.run_id,
            token=token,
            experiment=self.experiment,
            committed=committed,
            class_names=self.cohort.class_names,
            beat_every_s=BEAT_EVERY_S,
            history=self.journal.history(known),
            refused=self._refused(clients),
        )

    def _refused(self, clients: Sequence[ClientId]) -> list[rpc.TaskOf]:
        """Return the tasks of clients that the run does not take."""
        admission = self.cohort.admission
        return [
            rpc.TaskOf(client_id=str(client), task=task, why=why)
            for client in clients
            for task, why in (admission.refused(client) if admission else {}).items()
        ]

    def pull(self, request: rpc.PullRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Stream the orders of the caller's clients for as long as the caller listens."""
        try:
            waiting: dict[ClientId, ClientSession] = {}
            issues: dict[ClientId, int] = {}
            for one in request.waiting:
                client, session = self.session(one.client_id, one.token, context)
                session.durable = one.durable
                waiting[client], issues[client] = session, one.issue
            if not waiting:
                raise PayloadError("a Pull must name at least one client")
            caller = self.cohort.caller(waiting, issues)
            if not context.add_callback(lambda: self.cohort.wake(caller)):
                return
            held, told = set(request.held), set[int]()
            begun = {one.digest: one.bytes for one in request.begun}
            try:
                with self.gate.alone([("Pull", client) for client in waiting], context):
                    while found := self.cohort.next_orders(caller, context.is_active):
                        yield from self._sent(caller, *found, held, told, begun)
                        begun = {}
                        del found  # its payload leaves memory once nobody needs it
            finally:
                self.cohort.hung_up(caller)
        except tuple(_CODES) as error:
            self.refuse(context, error)

    def _sent(
        self,
        caller: Caller,
        orders: Sequence[rpc.Order],
        trip: OpenTrip,
        held: set[bytes],
        told: set[int],
        begun: Mapping[bytes, int],
    ) -> Iterator[bytes]:
        """Stream orders of one payload, and the parts of it that the caller lacks.

        ``told`` are the issues of the trips of which the caller was told more than the orders, and
        ``begun`` how many bytes it holds of parts, by digest.
        """
        order = orders[0]
        facts = {"interaction": order.interaction, "round": order.round, "order": order.kind}
        for each in orders:
            self.events.tell("order", each.client_id, **facts)
        parts = {} if order.kind in WITHOUT_PAYLOAD else {"common": trip.common}
        client = client_id_of(order.client_id, self.cohort.num_clients)
        if client in trip.personal:
            parts["personal"] = trip.personal[client]
        header = rpc.PullHeader(order=order, more=orders[1:])
        sent, left = list[Iterator[bytes]](), 0
        if trip.issue not in told and trip.intake.tell(client, header):
            told.add(trip.issue)
        for role, encoded in parts.items():
            part = header.parts.add(role=role, digest=encoded.digest, held=encoded.digest in held)
            if not part.held:
                part.bundle.CopyFrom(encoded.header)
                size, there = encoded.header.payload_bytes, begun.get(encoded.digest, 0)
                part.offset = there if there < size else 0
                left += size - part.offset
                sent.append(encoded.chunks(part.offset, caller.pace.most))
        head = rpc.PullResponse(header=header).SerializeToString()
        crossed, begins = 0, time.monotonic()
        for message in messages(head, itertools.chain.from_iterable(sent)):
            self.cohort.sends(caller, (crossed, left, begins))
            before = time.monotonic()
            yield message
            caller.pace.took(len(message), time.monotonic() - before)
            crossed += len(message)
        caller.pace.begin()
        self.cohort.sends(caller, None)
        self.cohort.count_down(trip, crossed)
        if parts:  # the caller keeps the last common part
            held.clear()
            held.add(trip.common.digest)

    def push(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> rpc.PushResponse:
        """Take the result of one order, or what several clients bring together."""
        try:
            return self._take(Push.begun(stream), context)
        except tuple(_CODES) as error:
            self.refuse(context, error)
            raise AssertionError("abort raises") from error

    def push_several(self, data: bytes, context: grpc.ServicerContext) -> rpc.PushSeveralResponse:
        """Take the results of several orders; each has an outcome of its own."""
        response = rpc.PushSeveralResponse()
        try:
            results = unpacked(data, self.cohort.most_present + 1)  # with the evaluator's
        except PayloadError as error:
            self.refuse(context, error)
        for result in results:
            outcome = response.outcomes.add()
            try:
                taken = self._take(Push.whole(result), context)
                outcome.repeated_upload = taken.repeated_upload
            except tuple(_CODES) as error:
                code, outcome.line = self._judged(error, context)
                outcome.code = code.value[0]
        return response

    def _take(self, push: Push, context: grpc.ServicerContext) -> rpc.PushResponse:
        """Take what a Push brings."""
        header, clients = push.header, list[ClientId]()
        for one in header.members or [header]:
            client, session = self.session(one.client_id, one.token, context)
            clients.append(client)
            if not header.members:
                self.cohort.is_safe(session, header.report.durable)
        taken = self.inbox.take(clients, push, context)
        if not (taken.repeated_upload or taken.HasField("received")):
            self.journal.sent(context, clients, header, push.wire, push.digest)
        return taken

    @coded
    def beat(self, request: rpc.BeatRequest, context: grpc.ServicerContext) -> rpc.BeatResponse:
        """Record a client's progress as a sign of life."""
        client, session = self.session(request.client_id, request.token, context)
        self.cohort.is_safe(session, request.durable)
        if request.interaction >= 0:
            self.cohort.works(session)
        if request.epoch >= 0 and session.is_news(time.monotonic()):
            facts = {"epoch": request.epoch, "batch": request.batch}
            self.events.tell("beat", client, interaction=request.interaction, **facts)
        return rpc.BeatResponse(
            superseded=self.cohort.is_superseded(Interaction(request.interaction)),
            history=self.journal.history(request.known),
        )

    @coded
    def announce(
        self, request: rpc.AnnounceRequest, context: grpc.ServicerContext
    ) -> rpc.AnnounceResponse:
        """Take a client's description with new tasks."""
        client, session = self.session(request.client_id, request.token, context)
        self._check_open()
        self.cohort.announce(client, session, client_json_of(request.description))
        return rpc.AnnounceResponse(refused=self._refused([client]))

    @coded
    def steer(self, request: rpc.SteerRequest, context: grpc.ServicerContext) -> rpc.SteerResponse:
        """Note what the operator wants."""
        excluded = self._numbers_of(request.exclude, "is not excluded")
        of_open = request.retire or request.forget or request.close or request.now
        of_open = of_open or len(request.set_aside) > 0
        changes = [ClassChange(one.old, one.now) for one in request.class_changes]
        of_open = of_open or bool(changes) or request.list_classes
        if of_open or not excluded:
            self._check_open()
        numbered = self._numbers_of(request.retire, "does not retire")
        owners = self._numbers_of([one.client_id for one in request.set_aside], "has no tasks")
        self.cohort.check_known([*excluded, *numbered])
        if request.forget and not numbered:
            raise PayloadError("no client to retire or forget: name the clients")
        if excluded and self._exclude is None:
            raise WrongRun("clients are excluded at the coordinator of their run")
        if excluded and self._exclude is not None:
            self._exclude(excluded)
            self.cohort.go_on_without(excluded)
            self.journal.tell("steered", context, exclude=excluded)
        if not of_open:
            return rpc.SteerResponse()
        if request.set_aside and self._set_aside is not None:
            tasks = [*zip(owners, (one.task for one in request.set_aside), strict=True)]
            self._set_aside(tasks)
            self.journal.tell("steered", context, set_aside=tasks)
        classes = list[rpc.ClassOf]()
        if (changes or request.list_classes) and self._classes is not None:
            classes += self._classes(changes, request.merge)
        if changes:
            told = {"merge": True} if request.merge else {}
            self.journal.tell("steered", context, class_changes=changes, **told)
        wanted = {"forget": request.forget, "close": request.close, "now": request.now}
        if numbered and self._retire is not None:
            self._retire(numbered, request.forget)
        if request.close and self._close is not None:
            self._close(request.now)
        self.cohort.go_on_without([*numbered, *(c for c in owners if isinstance(c, int))])
        self.cohort.look_again()
        if numbered or any(wanted.values()):
            self.journal.tell("steered", context, retire=numbered or None, **wanted)
        return rpc.SteerResponse(classes=classes if request.list_classes else ())

    def _numbers_of(self, clients: Sequence[str], refusal: str) -> list[int]:
        """Return clients' numbers by their ids; refuse the evaluator, which has none."""
        found = [client_id_of(text, self.cohort.num_clients) for text in clients]
        if EVALUATOR in found:
            raise PayloadError(f"the evaluator {refusal}: stop its process")
        return [client for client in found if isinstance(client, int)]

    def _check_open(self) -> None:
        """Check that the run may grow."""
        if self._set_aside is None:
            raise WrongRun(
                "this run knew all its tasks and clients when it began; a run with [schedule] "
                "open = true takes new ones"
            )

    @coded
    def leave(self, request: rpc.LeaveRequest, context: grpc.ServicerContext) -> rpc.LeaveResponse:
        """End sessions at their clients' wish; one that is refused keeps no other one here."""
        refused: Exception | None = None
        for one in (request, *request.others):
            try:
                client, _ = self.session(one.client_id, one.token, context)
            except tuple(_CODES) as error:
                refused = refused or error
                continue
            self.cohort.leave(client, printable(request.reason))
            self.journal.tell("left", context, client, reason=printable(request.reason, 200))
        if refused is not None:
            raise refused
        return rpc.LeaveResponse(history=self.journal.history(request.known))

    def watch(
        self, request: rpc.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[rpc.WatchResponse]:
        """Stream the run's events."""
        from fedsrv.transport.event_messages import message_of  # watchers alone need it

        if not self._watchers.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers follow this run")
        try:
            first = Event("present", detail=self.cohort.present(), unix_time=time.time())
            for event in itertools.chain([first], self.events.listen(request.from_start)):
                if not context.is_active():
                    return
                yield rpc.WatchResponse(event=message_of(event), head=self.journal.head())
        finally:
            self._watchers.release()
