"""The calls of a queue's front: what is served, and how runs are added and ended."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveError, ConfigError, PayloadError, RunFailed
from fedpb import FRONT, PROTOCOL, SERVICE
from fedpb.channels import place_after
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import front_pb2 as pb
from fedplugins.queues.front import Front
from fedplugins.queues.run_queue import runs_of, withdraw
from fedplugins.queues.submitting import put_apart
from fedsrv.identity.guard import Guard, NotYours
from fedsrv.transport.gate import Gate, RejectionLog

MOST_WAITING = 1000
"""Runs of a queue that have not ended; more cannot be submitted over the network."""
OF_RUNS = (
    "Join", "JoinSeveral", "Pull", "Push", "PushSeveral", "Beat", "Announce", "Leave", "Watch",
    "Steer",
)  # fmt: skip
"""Calls that a run's own coordinator answers."""
log = logging.getLogger(__name__)


class NoRun(Exception):
    """No run is served now."""


_CODES: Mapping[type[Exception], grpc.StatusCode] = {
    PayloadError: grpc.StatusCode.INVALID_ARGUMENT,
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    ArchiveError: grpc.StatusCode.INTERNAL,
    RunFailed: grpc.StatusCode.INTERNAL,
    NotYours: grpc.StatusCode.PERMISSION_DENIED,
    NoRun: grpc.StatusCode.UNAVAILABLE,
}


class FrontService:
    """Answers the calls of ``service FrontService``, and says of others where runs are served."""

    def __init__(self, front: Front, guard: Guard) -> None:
        self.front, self.guard = front, guard
        self.complaints = RejectionLog(log)
        self._submitting = threading.Lock()
        self.gate = Gate(0, admitted=self._admitted, look=self._look)
        self.health = health.HealthServicer(experimental_non_blocking=False)

    def handlers(self) -> dict[str, grpc.GenericRpcHandler]:
        """Return what answers the calls of each service, by its full name."""
        of_front = {
            "ListRuns": self._answered(self.list_runs, pb.ListRunsRequest),
            "SubmitRun": self._answered(self.submit_run, pb.SubmitRunRequest),
            "WithdrawRun": self._answered(self.withdraw_run, pb.WithdrawRunRequest),
        }
        elsewhere = grpc.stream_stream_rpc_method_handler(self._elsewhere)
        of_runs = dict.fromkeys(OF_RUNS, elsewhere)
        of_runs["Prepare"] = self._answered(self.prepare, rpc.PrepareRequest)
        generic = grpc.method_handlers_generic_handler
        return {FRONT: generic(FRONT, of_front), SERVICE: generic(SERVICE, of_runs)}

    def _answered(self, call: Callable[[Any], Any], kind: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a call; what is wrong with it ends it with a code and a line."""

        def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return bytes(call(kind.FromString(data)).SerializeToString())
            except DecodeError:
                self._refuse(context, PayloadError(f"{kind.DESCRIPTOR.name} cannot be parsed"))
            except tuple(_CODES) as error:
                self._refuse(context, error)

        return grpc.unary_unary_rpc_method_handler(answer)

    def _refuse(self, context: grpc.ServicerContext, error: Exception) -> NoReturn:
        code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
        line = printable(str(error))
        if not isinstance(error, NoRun):
            self.complaints.tell(code.name, line)
        context.abort(code, line)
        raise AssertionError("abort raises") from error

    @contextlib.contextmanager
    def _admitted(self, call: str, context: grpc.ServicerContext) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.guard.admitted(call, context))
            except NotYours as error:
                self._refuse(context, error)
            yield

    def _look(self) -> None:
        self.guard.look()
        for line in self.guard.warnings():
            log.warning("%s", line)

    # --- calls ------------------------------------------------------------------------------------

    def prepare(self, request: rpc.PrepareRequest) -> rpc.PrepareResponse:
        """Say behind which ports runs are served, the oldest first."""
        if request.protocol != PROTOCOL:
            raise PayloadError(
                f"this front speaks protocol {PROTOCOL}, the client {request.protocol}: install "
                "one release of fedtide at both"
            )
        if not (served := self.front.served()):
            raise NoRun("the queue has no run that is served now")
        return rpc.PrepareResponse(places=[run.place for run in served])

    def _elsewhere(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Refuse a call that is for the coordinator of a run, and say where runs are."""
        places = (
            f"{run.name} at {place_after(self.front.address, run.place)}"
            for run in self.front.served()
        )
        runs = ", ".join(places) or "none"
        line = f"this is the front of a queue, and each run has an address of its own: {runs}"
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, printable(line))
        yield b""

    def list_runs(self, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
        """Tell how far the runs are."""
        served = {run.name: run for run in self.front.served()}
        found = pb.ListRunsResponse()
        for queued in runs_of(self.front.queue):
            run = served.get(name := queued.place.name)
            place, line = (run.place, run.line) if run else (0, "")
            found.runs.add(name=name, state=queued.state, place=place, line=printable(line))
        return found

    def submit_run(self, request: pb.SubmitRunRequest) -> pb.SubmitRunResponse:
        """Put a run at the end of the queue."""
        with self._submitting:
            waiting = [run for run in runs_of(self.front.queue) if not run.end.exists()]
            if len(waiting) >= MOST_WAITING:
                raise ConfigError(f"{MOST_WAITING} runs wait already")
            name = put_apart(request, self.front.queue)
        log.info("%s: submitted", name)
        self.front.look_again()
        return pb.SubmitRunResponse(name=name)

    def withdraw_run(self, request: pb.WithdrawRunRequest) -> pb.WithdrawRunResponse:
        """Take a run out of the queue; one that is served ends."""
        withdraw(self.front.queue, request.name)
        self.front.look_again()
        return pb.WithdrawRunResponse()
