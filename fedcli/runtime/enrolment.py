"""Joining a run with the clients of a process, and joining again.

A client that is alone joins by ``Join``. Several clients of a process join by ``JoinSeveral``: what
their descriptions share is sent once.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedcli.runtime.known_history import HEAD, KnownHistory
from fedcli.runtime.link import Link, Membership
from fedcli.runtime.reporting import tell
from fedcli.runtime.sessions import Sessions
from fedcli.runtime.workers import Workers
from fedmodels.config.bounds import CountDetail
from fedmodels.console.printable import printable
from fedmodels.errors import FedtideError, LinkError, SetOut
from fedmodels.facts.data_description import MAX_WHY
from fedmodels.host.files import Stamp
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedpb import PROTOCOL
from fedpb.tables import description_of, values_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1.description_pb2 import ClientDescription

MAX_BYTES = 1 << 20
"""Size at which a request to join is sent; further clients follow in another one."""
MIN_BETWEEN_BEATS, MAX_BETWEEN_BEATS = 0.1, 3600.0
"""Seconds between signs of life that a server may ask for."""
log = logging.getLogger(__name__)


class Enrolment:
    """The clients of a process as members of a run."""

    def __init__(
        self,
        link: Link,
        workers: Workers,
        states: Path,
        *,
        start_over: bool,
        announce: CountDetail = "exact",
    ) -> None:
        """Join nobody yet; clients have their state directories in ``states``.

        With ``start_over``, clients go on from the initial private state where a lost one is too
        far back. ``announce`` says how exactly they tell how many examples of each class they have.
        """
        self.link, self.workers, self.start_over = link, workers, start_over
        self.announce: CountDetail = announce
        self.members: dict[ClientId, Membership] = {}
        self.out: set[ClientId] = set()
        """The clients of the process that take no part in the run any more."""
        self.announced: dict[ClientId, Stamp | None] = {}
        """What each client's ``client.json`` was when the server was last told of it."""
        self._told: dict[ClientId, tuple[int, int]] = {}
        self._taken: dict[ClientId, tuple[int, int]] = {}
        """Of how many tasks and classes the server was last told, and how many it took."""
        self._new: dict[ClientId, tuple[int, int]] = {}
        """The tasks that the server was last told of and had not taken: the first, and the end."""
        self._refused: dict[ClientId, Stamp | None] = {}
        """What a ``client.json`` was when the server refused it."""
        self._told_refused: set[tuple[str, int]] = set()
        """Clients and tasks that the server does not take, of which a line was told."""
        is_shared = len(workers.clients) > 1
        self._sessions = Sessions(states, shared=is_shared)
        place = states if is_shared else states / str(workers.clients[0])
        link.history = KnownHistory(place / HEAD)
        self._joining = threading.Lock()

    def join(self) -> rpc.JoinResponse:
        """Join with all clients of the process; return the last answer.

        Raises:
            LinkError: the server refused one of them.
            SetOut: none of them takes part any more.
            DataError, ArchiveError: a client's data or states cannot be used.
        """
        reply = self._join_with(self.workers.clients)
        assert reply is not None, "somebody is left"
        return reply

    def _join_with(self, clients: Sequence[ClientId]) -> rpc.JoinResponse | None:
        """Join with these clients, but for those that are out; SetOut where nobody is left."""
        while wanted := [client for client in clients if client not in self.out]:
            try:
                return self._join_once(wanted)
            except SetOut as out:
                if out.client not in wanted:
                    raise
                self.out.add(out.client)
                if self.out >= {*self.workers.clients}:
                    raise
                log.warning("%s", out)
        return None

    def _join_once(self, wanted: Sequence[ClientId]) -> rpc.JoinResponse:
        is_alone, sent = len(self.workers.clients) == 1, 0
        for request in [self._request(*wanted)] if is_alone else [*self._requests(wanted)]:
            sent += request.ByteSize()
            reply = _checked(self.link.join(request))
            for one in [request] if isinstance(request, rpc.JoinRequest) else request.clients:
                client = client_of(one.client_id)
                self._sessions.joined(client, reply.run_id)
                self.taken(client)
                self.members[client] = Membership(client, reply.run_id, one.token)
                line = f" joined run {reply.run_id[:8]} at {self.link.address}"
                tell("joined", client, line, run_id=reply.run_id, server=self.link.address)
            self.link.history.take(reply.run_id, request.known, reply.history)
            if reply.refused and values_of(reply.experiment).get("schedule", {}).get("open"):
                self.tell_refused(reply.refused)  # only an open run refuses single tasks
        if not is_alone:
            log.info("%d clients joined, in %d bytes", len(wanted), sent)
        return reply

    def rejoin(self, gone: Mapping[ClientId, Membership]) -> None:
        """Renew sessions that the server has forgotten, unless another thread has done so."""
        with self._joining:
            again = [c for c, member in gone.items() if self.members[c] is member]
            if (reply := self._join_with(again)) is not None:
                self.workers.name(reply.class_names)

    def description(self, client: ClientId) -> ClientDescription:
        """Return what a client says of its data, and note that the server is told of it.

        What the server refused is left out until ``client.json`` changes.

        Raises:
            DataError: the data are missing or damaged.
        """
        data = self.workers.data(client)
        self.announced[client] = data.stamp
        is_refused = client in self._refused and self._refused[client] == data.stamp
        part = self._taken.get(client) if is_refused else None
        told = self._told[client] = part or (data.num_tasks, data.file.num_classes)
        self._new[client] = self._taken.get(client, (0, 0))[0], told[0]
        return description_of(data.announcement(part, self.announce))

    def taken(self, client: ClientId) -> None:
        """Note that the server took what it was last told of a client's data."""
        self._taken[client] = self._told[client]

    def refused(self, client: ClientId) -> None:
        """Note a refusal: a client that joins again tells what was taken before."""
        self._refused[client] = self.announced[client]

    def tell_refused(self, tasks: Iterable[rpc.TaskOf]) -> None:
        """Say, once for each, which tasks of the process's clients the server does not take.

        They are set aside in the clients' data, so that none of their rows counts as known. Those
        that the server took from this process before stay as they are, whatever it says.
        """
        own = {str(client): client for client in self.workers.clients if isinstance(client, int)}
        for one in tasks:
            new = range(*self._new.get(own.get(one.client_id, EVALUATOR), (0, 0)))
            if one.task in new and (one.client_id, one.task) not in self._told_refused:
                self._told_refused.add((one.client_id, one.task))
                log.error(
                    "client %s: its task %d is set aside: %s", printable(one.client_id, 60),
                    one.task, printable(one.why, MAX_WHY),
                )  # fmt: skip
                from fedcli.data.store.dropping import drop_task  # reads tables and images

                with suppress(FedtideError):  # the server keeps it in mind as well
                    drop_task(self.workers.root, int(one.client_id), one.task, one.why)

    def _request(self, client: ClientId) -> rpc.JoinRequest:
        """Return the request of a client that is alone in its process."""
        session = self._sessions.of(client)
        return rpc.JoinRequest(
            client_id=str(client),
            description=self.description(client),
            run_id=session.run_id,
            token=session.token,
            versions=self.workers.versions(client),
            protocol=PROTOCOL,
            start_over=self.start_over,
        )

    def _requests(self, clients: Sequence[ClientId]) -> Iterator[rpc.JoinSeveralRequest]:
        """Yield requests to join with all these clients, each request for clients of one run."""
        request, known = rpc.JoinSeveralRequest(), dict[bytes, int]()
        size = 0
        for client in clients:
            session = self._sessions.of(client)
            if size > MAX_BYTES or (request.clients and session.run_id != request.run_id):
                yield request
                request, known, size = rpc.JoinSeveralRequest(), {}, 0
            request.run_id, request.protocol = session.run_id, PROTOCOL
            request.start_over = self.start_over
            description = self.description(client)
            tasks, name = list(description.tasks), description.name
            description.ClearField("tasks")
            description.ClearField("name")
            shared = description.SerializeToString(deterministic=True)
            if shared not in known:
                known[shared] = len(known)
                request.descriptions.append(description)
                size += len(shared)
            one = request.clients.add(
                client_id=str(client),
                token=session.token,
                versions=self.workers.versions(client),
                description=known[shared],
                tasks=tasks,
                name=name,
            )
            size += one.ByteSize()
        yield request


def _checked(reply: rpc.JoinResponse) -> rpc.JoinResponse:
    """Return a server's answer; raise LinkError if the run's id or the beat is out of bounds."""
    if not re.fullmatch(r"[\w-]{1,64}", reply.run_id, re.ASCII):
        raise LinkError(f"the server's run has a malformed id: {printable(reply.run_id, 60)}")
    if not MIN_BETWEEN_BEATS <= reply.beat_every_s <= MAX_BETWEEN_BEATS:
        raise LinkError(
            f"the server asks for a sign of life every {reply.beat_every_s:g} s; a client takes "
            f"{MIN_BETWEEN_BEATS:g} to {MAX_BETWEEN_BEATS:g} s"
        )
    return reply


def client_of(text: str) -> ClientId:
    """Return a client's id as the wire has it."""
    return EVALUATOR if text == EVALUATOR else int(text)


# --- new tasks ------------------------------------------------------------------------------------
