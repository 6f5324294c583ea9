"""What a Push brings, and what becomes of the uploads of one trip.

They stay whole, or are folded into their mean as they come where they would take too much memory.
Where clients of a trip joined through somebody, that one may make another intake.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from fedmodels.errors import PayloadError
from fedmodels.host.guarded import Guarded
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb.codec import RawFrame, Receiver, read_chunk
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Allocate, Answer, Answers, Trip
from fedsrv.engine.reduction import StreamingMean
from fedsrv.transport.refusals import NotReady, Unfinished


@dataclass
class Push:
    """A Push under way: its header, and what came with it."""

    header: rpc.PushHeader
    frame: RawFrame | None
    rest: Iterator[bytes]
    wire: int
    """Bytes that came so far."""

    digest: bytes = b""
    """Identifies the upload that was received: its header and the checksums of its frames."""
    is_whole: bool = False
    """Whether nothing more can come: it stood in one message with others."""
    moves: Callable[[], None] = lambda: None
    """Called as more comes."""

    @classmethod
    def begun(cls, stream: Iterator[bytes]) -> Self:
        """Return a Push of which the first message has come; PayloadError if that has no header."""
        return cls._read(next(stream, b""), stream)

    @classmethod
    def whole(cls, data: memoryview) -> Self:
        """Return one of several results that came in one message.

        Raises:
            PayloadError: it has no header, or is of several clients.
        """
        push = cls._read(data, iter(()), is_whole=True)
        if push.header.members:
            raise PayloadError("the sum of several clients has a Push of its own")
        if push.header.part_of:
            raise PayloadError("a part of an upload has a Push of its own")
        return push

    @classmethod
    def _read(
        cls, data: bytes | memoryview, rest: Iterator[bytes], *, is_whole: bool = False
    ) -> Self:
        header, frame = read_chunk(data, rpc.PushHeader)
        if header is None:
            raise PayloadError("a Push must start with its header")
        return cls(header, frame, rest, len(data), is_whole=is_whole)

    def received(
        self, spec: BundleSpec, allocate: Allocate, begun: Callable[[rpc.PushHeader], Begun]
    ) -> Bundle:
        """Receive the bundle behind the header; of one in parts, ``begun`` returns what there is.

        Raises:
            PayloadError: it is not what the spec says, or damaged.
            NotReady: the stream ends short. The reason does not matter: a cancelled call may look
                like a stream that its sender closed.
            Unfinished: so does one that brings a part; what came is kept.
        """
        if self.header.part_of:
            return self._rest(spec, allocate, begun(self.header))
        receiver = Receiver(self.header.bundle, spec, allocate)
        for frame in self._frames(receiver):
            receiver.feed(frame)
        if not receiver.is_complete and not self.is_whole:
            at = f"{receiver.received} of {self.header.bundle.payload_bytes} bytes"
            raise NotReady(f"the stream ended after {at}; bring the upload again")
        self.digest = receiver.digest
        return receiver.finish()

    def _rest(self, spec: BundleSpec, allocate: Allocate, begun: Begun) -> Bundle:
        """Add a part to what has come before; return the bundle with the last one."""
        receiver = begun.taken_by(self, spec, allocate)
        try:
            for frame in self._frames(receiver):
                begun.feed(self, receiver, frame)
        finally:
            begun.count(self.wire)
        if not receiver.is_complete:
            raise Unfinished(receiver.received)
        self.digest, self.wire = receiver.digest, begun.end()
        if self.digest != self.header.part_of:
            raise PayloadError("its parts are not those of one upload")
        return receiver.finish()

    def _frames(self, receiver: Receiver) -> Iterator[RawFrame]:
        """Yield the frames until the bundle is complete, or the stream ends."""
        if self.frame is not None:
            yield self.frame
        if receiver.is_complete:  # the first message held the whole bundle
            return
        for data in self.rest:
            self.wire += len(data)
            self.moves()
            header, frame = read_chunk(data, rpc.PushHeader)
            if header is not None or frame is None:
                raise PayloadError("a Push has one header only, and frames behind it")
            yield frame


class Begun:
    """What came of an upload in parts. The Push that came last adds to it; others end."""

    _push: Guarded[Push | None] = Guarded("_lock")
    _digest: Guarded[bytes] = Guarded("_lock")
    _receiver: Guarded[Receiver | None] = Guarded("_lock")
    _wire: Guarded[int] = Guarded("_lock")
    _since: Guarded[float] = Guarded("_lock")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Hold nothing yet."""
        self._lock, self._clock = threading.RLock(), clock
        self._push, self._receiver, self._digest = None, None, b""
        self._wire, self._since = 0, 0.0

    def taken_by(self, push: Push, spec: BundleSpec, allocate: Allocate) -> Receiver:
        """Return what takes the frames of a Push, which goes on where the ones before ended."""
        with self._lock:
            found, header = self._receiver, push.header
            is_same = self._digest == header.part_of
            if found is None or not is_same or found.header != header.bundle:
                found = self._receiver = Receiver(header.bundle, spec, allocate)
                self._wire, self._since = 0, self._clock()
            self._push, self._digest = push, header.part_of
            return found

    def feed(self, push: Push, receiver: Receiver, frame: RawFrame) -> None:
        """Take the next frame of a Push.

        Raises:
            Unfinished: the frame is not the next one, or another Push took the place of this one.
            NotReady: another Push has brought all of it.
        """
        with self._lock:
            if self._push is not push or frame.offset != receiver.received:
                if receiver.is_complete:
                    raise NotReady("the upload arrived through another call; send it again")
                raise Unfinished(receiver.received)
            receiver.feed(frame)

    def count(self, num_bytes: int) -> None:
        """Count bytes that crossed."""
        with self._lock:
            self._wire += num_bytes

    def end(self) -> int:
        """Keep it no longer, as it is whole; return how many bytes crossed for it."""
        with self._lock:
            self._receiver = None
            return self._wire

    @property
    def how_far(self) -> tuple[int, int, float] | None:
        """Return the bytes that are there, of how many, and for how many seconds it has come."""
        with self._lock:
            found = self._receiver
            if found is None:
                return None
            size = found.header.payload_bytes
            return found.received, size, self._clock() - self._since


class Intake:
    """What becomes of the uploads of one trip.

    The cohort holds its lock when it calls anything here, with these exceptions: the thread of a
    Push calls :meth:`check`, :meth:`read` and :meth:`refusal`, that of a Pull calls :meth:`tell`,
    and the engine's calls :meth:`end`, when nothing comes any more.
    """

    _begun: Guarded[dict[tuple[str, bool], Begun]] = Guarded("_beginning")

    def __init__(self, trip: Trip, kept_bytes: int | None = None) -> None:
        """Begin with nothing.

        Args:
            trip: whose orders have their numbers.
            kept_bytes: uploads of more in all may be folded; unless it is given, all stay whole.
        """
        self.trip = trip
        count = None if kept_bytes is None else trip.form.count
        self._folding = StreamingMean(trip.orders, count, kept_bytes or 0)
        self.answered: set[ClientId] = set()
        """Clients whose results are whole, or that failed."""
        self._beginning, self._begun = threading.RLock(), {}
        """What came in parts, by its client and whether it is a sum."""

    # --- one Push ---------------------------------------------------------------------------------

    def most_bytes(self, header: rpc.PushHeader) -> int:
        """Return the most bytes that a Push may bring."""
        return self.trip.form.spec.max_bytes

    def check(self, header: rpc.PushHeader) -> None:
        """Check that a Push of this kind may come at all; no client fails for this PayloadError."""
        if header.members:
            raise PayloadError("no sums are accepted here: each client brings its own upload")

    def read(self, clients: Sequence[ClientId], push: Push, allocate: Allocate) -> Any:
        """Receive and check what a Push brings; return what :meth:`keep` gets.

        Raises:
            PayloadError: it is refused.
            NotReady: it ended short.
        """
        (client,), header, form = clients, push.header, self.trip.form
        form.check_report(client, self.trip.orders[client], header.report)
        if header.summed:
            raise PayloadError(f"the weights of client {client} come whole in this trip")
        sent = push.received(form.spec, allocate, self.begun_of)
        upload = sent if form.restore is None else form.restore(sent, allocate)
        form.check_upload(client, upload)
        measured = self.trip.measured(client, upload)
        return Answer(upload, header.report, sent.num_bytes(), 0, push.wire, measured=measured)

    def begun_of(self, header: rpc.PushHeader) -> Begun:
        """Return what came so far of an upload or a sum in parts."""
        first = header.members[0] if header.members else header
        key = first.client_id, bool(header.members)
        with self._beginning:
            return self._begun.setdefault(key, Begun())

    def how_far(self, client: ClientId) -> tuple[int, int, float] | None:
        """Return how far a client's upload in parts is, as :attr:`Begun.how_far`."""
        with self._beginning:
            found = self._begun.get((str(client), False))
        return None if found is None else found.how_far

    def refusal(self, client: ClientId, header: rpc.PushHeader, error: PayloadError) -> str:
        """Return the line with which a client fails whose Push was refused."""
        return f"its upload was refused: {error}"

    def keep(self, client: ClientId, arrived: Any, now: float) -> Mapping[ClientId, Answer] | None:
        """Take what a Push of a client, or first of all of this client, brought.

        Returns:
            The results that are whole now, by client; None where it came too late.
        """
        return {client: arrived}

    def add(
        self, result: Answer, results: Mapping[ClientId, Answer], failed: Mapping[ClientId, str]
    ) -> None:
        """Fold a whole result in, where that saves memory, once all before it are there."""
        self._folding.add_answer(result, results, failed)

    def end(self, answers: Answers) -> None:
        """Put what the uploads make together into the answers."""
        answers.mean = self._folding.finish(answers.by_client)

    # --- who is there -----------------------------------------------------------------------------

    def tell(self, client: ClientId, header: rpc.PullHeader) -> bool:
        """Say what else a caller has to know with a trip's first order for this client.

        Returns whether anything was said; it is said once over a Pull.
        """
        return False

    def moved(self, client: ClientId, through: Through | None) -> Collection[ClientId]:
        """Note that a client joins again, maybe through somebody else.

        Returns the clients of a group that it leaves, if it leaves one.
        """
        return ()

    def overdue(
        self, is_there: Callable[[ClientId], bool], now: float
    ) -> Iterable[tuple[ClientId, str]]:
        """Return the clients whose results will not come any more, and why in a line.

        Args:
            is_there: tells whether a client is connected.
            now: the time on the monotonic clock.
        """
        return ()


class Through(Protocol):
    """Who passes the calls of some clients on; their sessions name it."""

    @property
    def told(self) -> Mapping[str, str]:
        """What is put down of it when a client joins through it."""
        ...

    def intake(self, trip: Trip, through: Mapping[ClientId, Any]) -> Intake | None:
        """Return what takes the uploads of a trip; None where they come as they always do.

        Args:
            trip: whose orders have their numbers.
            through: through whom each of its clients joined that joined through anybody.
        """
        ...
