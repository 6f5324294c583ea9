"""What a relay that lies comes to know of a site that has conditions.

    python -m benchmarks.attacks.lying_relay

An honest coordinator serves a run, and a relay stands between it and one site. To the site a relay
is the coordinator, so it may say anything: it changes settings and payloads on their way down,
gives one order many times, and asks for what the coordinator never asked for. Unlike a coordinator
it has true orders to hide its own among, and a true run to go on with: it claims counts, drops
uploads, brings one twice, forgets sessions, and is a new process at each join.

It tells the same lies to four sites, and what it hears is judged as in :mod:`.lying_coordinator`:
bit by bit under two data sets and two secrets, with each release charged in closed form. What the
coordinator above makes of its lies is another question; its run has to end.
"""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message import Message

from benchmarks.attacks import lying_columns as columns
from benchmarks.attacks.lying_coordinator import (
    CLIP,
    PROBLEM,
    Ask,
    Finding,
    Heard,
    config,
    floor_of,
    leaks,
    other_data,
    scored_more,
    script,
    tensors_of,
    told_to,
    unpaid,
)
from fedcli.gate.rules import Rules
from fedcli.joining import host_of
from fedmodels.config.experiment import Experiment
from fedmodels.errors import FedtideError
from fedmodels.methods import make
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.run import RunFacts
from fedpb import SERVICE
from fedpb.codec import encode
from fedpb.orders import read_order
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import coordinator_pb2_grpc
from fedsrv.coordinator import Listen, serve
from fedtide.testing.trial import digits_in, tiny_experiment

Says = Callable[[str, Any], None]
"""Changes a message by the name of its call."""
HONEST = Ask("as it is")
TRIES = 3
"""So often a lie is told again where not all sites made the same calls."""


def nothing(call: str, message: Any) -> None:
    """Pass a message on as it is."""


@dataclass(frozen=True)
class Lie:
    """What a relay does with one site."""

    asks: Sequence[Ask] = (HONEST,)
    """What each order to train becomes. The answer to the first one goes up."""
    down: Says = nothing
    """Changes the coordinator's answer to Prepare or Join."""
    up: Says = nothing
    """Changes what the site says, on its way up."""
    brings: int = 1
    """How often an upload goes up; 0 drops it."""
    forgets: bool = False
    """Whether it says once that it knows no session, and takes no result then."""


@dataclass
class Relay(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Stands between a coordinator and client 0, and keeps all that it hears."""

    above: str
    shown: Experiment
    lie: Lie = field(default_factory=Lie)
    heard: list[tuple[str, Message]] = field(default_factory=list)
    uploads: list[tuple[Ask, dict[str, Any]]] = field(default_factory=list)
    _run_id: str = ""
    """Of the run above; the site is told another one."""
    _first: Bundle | None = None
    """The first payload: it goes with each order to train, so that all sites train from one."""
    _given: tuple[Ask, rpc.Order, bool] = (HONEST, rpc.Order(), False)
    """The order under way: what it is asked by, what came from above, and whether that is told."""
    _waits_for: int | None = None
    """The trip of the answer that is waited for."""
    _joins: int = 0
    """How often the site has joined."""
    _answered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        """Open a channel to the coordinator."""
        self._channel = grpc.insecure_channel(self.above)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(  # type: ignore[no-untyped-call]
            self._channel
        )
        self._pull = self._channel.unary_stream(
            f"/{SERVICE}/Pull", rpc.PullRequest.SerializeToString, None
        )
        self._forgets = self.lie.forgets

    def _passed(self, call: str, request: Any, context: Any) -> Any:
        """Say upwards what a site said, or what the lie makes of it; return the answer."""
        kept = type(request)()
        kept.CopyFrom(request)
        if call in ("Join", "Leave"):
            kept.known = 0  # of the coordinator's statements, as many as were safe just then
        self.heard.append((call, kept))
        if call == "Join":
            self._joins += 1
            request.relay, request.relay_process = "0-0", secrets.token_bytes(16)
            request.run_id = self._run_id
        self.lie.up(call, request)
        try:
            reply = getattr(self._stub, call)(request, timeout=60)
        except grpc.RpcError as error:
            self._end(error, context)
        if call != "Leave":
            self._run_id, reply.run_id = reply.run_id, "lies"
        self.lie.down(call, reply)
        return reply

    @staticmethod
    def _end(error: Any, context: Any) -> None:
        """End the site's call as the coordinator ended the relay's."""
        context.set_trailing_metadata(error.trailing_metadata() or ())
        context.abort(error.code(), error.details())

    def Prepare(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Pass on what the run is."""
        return self._passed("Prepare", request, context)

    def Join(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Pass on that the site joins a run of another name, through a relay that just began."""
        return self._passed("Join", request, context)

    def Leave(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Pass on that the site leaves."""
        return self._passed("Leave", request, context)

    def Beat(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Take a sign of life, and keep it."""
        return rpc.BeatResponse()

    def Pull(self, request: Any, context: Any) -> Iterator[rpc.PullResponse]:  # noqa: N802
        """Give the orders that come, and others of its own behind them."""
        (waiting,) = request.waiting
        waiting.issue = 0  # what it got before, it may get again
        call = self._pull(rpc.PullRequest(waiting=[waiting]))
        context.add_callback(call.cancel)
        held = dict[bytes, Bundle]()
        try:
            while found := read_order(call, self._specs, held):
                header, parts = found
                yield from self._orders(header.order, parts)
                if self._waits_for is None:
                    call.cancel()
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such session")
        except grpc.RpcError as error:
            self._end(error, context)

    def _specs(self, order: rpc.Order) -> Mapping[str, Any]:
        run = RunFacts(self.shown, PROBLEM)
        method = make(self.shown.method.name, **self.shown.method.hyper_parameters())
        common, personal = method.payload_spec(run)
        return {"common": common, "personal": personal}

    def _orders(self, order: rpc.Order, parts: Mapping[str, Bundle]) -> Iterator[rpc.PullResponse]:
        trains = order.kind == rpc.ORDER_KIND_TRAIN
        if trains:
            self._first = self._first or parts["common"]
        for number, ask in enumerate(self.lie.asks if trains else [HONEST]):
            told = rpc.Order()
            told.CopyFrom(order)
            told.trip = 0
            if number:
                told.kind = ask.kind  # type: ignore[assignment]
                for name in ask.order:
                    told.ClearField(name)
                told.MergeFrom(rpc.Order(**ask.order))
            told.trip += 100 * self._joins
            given = self._first if trains else parts["common"]
            assert given is not None
            moved = {name: one + ask.moved for name, one in given.weights.items()}
            encoded = encode(replace(given, weights=moved))
            header = rpc.PullHeader(order=told)
            header.parts.add(role="common", digest=encoded.digest, bundle=encoded.header)
            self._given, self._waits_for = (ask, order, number == 0), told.trip
            yield rpc.PullResponse(header=header)
            yield from map(rpc.PullResponse.FromString, encoded.chunks())
            assert self._answered.acquire(timeout=60)
            if self._waits_for is None:
                return

    def Push(self, requests: Iterator[Any], context: Any) -> Any:  # noqa: N802
        """Keep a result, and bring that of a true order up."""
        ask, order, is_true = self._given
        first, *more = requests
        if first.header.trip != self._waits_for:
            context.abort(grpc.StatusCode.ABORTED, "nobody waits for it")
        if self._forgets and is_true and order.kind == rpc.ORDER_KIND_TRAIN:
            self._forgets, self._waits_for = False, None
            self._answered.release()
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such session")
        frames = b"".join(bytes(one.frame.payload) for one in (first, *more))
        self._waits_for = 0
        self.heard.append(("Push", rpc.PushHeader.FromString(first.header.SerializeToString())))
        trained = replace(ask, order={"task": order.task, **ask.order})
        self.uploads.append((trained, tensors_of(first.header.bundle, frames)))
        reply = rpc.PushResponse()
        if is_true:
            first.header.trip, first.header.issue = order.trip, order.issue
            self.lie.up("Push", first.header)
            trains = order.kind == rpc.ORDER_KIND_TRAIN
            if trains and not self.lie.brings:
                first.header.failure, more = "the relay says so", []
                first.header.ClearField("bundle")
                first.ClearField("frame")
            for _ in range(max(1, self.lie.brings) if trains else 1):
                try:
                    reply = self._stub.Push(iter([first, *more]), timeout=60)
                except grpc.RpcError as error:
                    self._answered.release()
                    self._end(error, context)
        self._answered.release()
        return reply

    def close(self) -> None:
        """End all calls to the coordinator."""
        self._channel.close()


# --- the run above --------------------------------------------------------------------------------


@dataclass
class Above:
    """An honest coordinator, and the other clients of its run."""

    experiment: Experiment
    data: Path
    root: Path
    address: str = ""
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))
    _stop: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Serve the run."""
        ready = threading.Event()

        def listening(address: str, events: Any) -> None:
            self.address = address
            ready.set()

        self.run: Future[Any] = self._threads.submit(
            serve, self.experiment, self.root / "run", Listen("127.0.0.1:0"), on_ready=listening,
            stop=self._stop,
        )  # fmt: skip
        self.run.add_done_callback(lambda _: ready.set())
        assert ready.wait(60)
        if self.run.done():
            self.run.result()

    def others(self) -> list[Future[None]]:
        """Let the other clients take part."""
        cpu = torch.device("cpu")
        return [
            self._threads.submit(
                host_of([client], self.address, self.data, self.root / f"other-{client}", cpu).run
            )
            for client in (1, 2)
        ]

    def ended(self, others: Sequence[Future[None]]) -> list[str]:
        """Wait for the end of the run; return why it did not end well, if it did not."""
        try:
            self.run.result(60)
            for one in others:
                one.result(60)
        except (FedtideError, TimeoutError) as error:
            return [f"{type(error).__name__}: {error}"]
        return []

    def end(self) -> None:
        """Stop the run, if it is under way."""
        self._stop.set()
        try:
            self.run.result(60)
        except FedtideError:
            pass  # :meth:`ended` has said it, or it was stopped
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def serving(experiment: Experiment, data: Path, root: Path) -> Iterator[Above]:
    """Serve a run for as long as the block lasts."""
    root.mkdir(parents=True, exist_ok=True)
    above = Above(experiment, data, root)
    above.begin()
    try:
        yield above
    finally:
        above.end()


# --- the plays ------------------------------------------------------------------------------------


def run_of(level: str, views: Sequence[str] = ()) -> Experiment:
    """Return the config of the coordinator: two tasks, an interaction each, of three clients."""
    tables = {"schedule": {"rounds": 1}, "server": {"min_clients": 2}}
    allow = {} if views else {"privacy": {"allow": ["announced", "examples", "loss"]}}
    return config(level, evaluate={"views": [*views]}, **tables, **allow)


def claims(call: str, message: Any) -> None:
    """Announce a hundred times the examples that the site has, and report as many."""
    if call == "Join":
        for task in message.description.tasks:
            task.train[:] = [100 * count for count in task.train]
    if call == "Push" and message.report.num_examples:
        message.report.num_examples *= 100


def bare(call: str, message: Any) -> None:
    """Leave out what an answer to Join may do without."""
    if call == "Join":
        message.ClearField("class_names")
        message.ClearField("history")


def lies(models: int) -> dict[str, Lie]:
    """Return what is tried on sites that have joined."""
    few = [HONEST, Ask("replay", {"trip": 77}), Ask("restart", {"trip": 78}, 1e-6)]
    return {
        "orders": Lie([HONEST, *script(models)[1:-1]]),
        "forgets": Lie(few, forgets=True),
        "claims": Lie(few, up=claims),
        "drops": Lie(few, brings=0),
        "twice": Lie(few, brings=2),
        "bare": Lie(few, down=bare),
    }


def play(
    level: str, data: Path, root: Path, name: str, lie: Lie, *, most: int = 0
) -> list[Finding]:
    """Tell a lie to four sites that have joined; return what is amiss.

    A site whose session is gone joins once more now and then, and all that follows is at another
    place. Then all four are told anew: a number of calls that follows from data differs again.

    Args:
        level: whose noise the sites require.
        data: a partition.
        root: a directory for runs, states and ledgers.
        name: what the lie is called.
        lie: what the relay does.
        most: models that the sites let be scored.
    """
    rules = Rules.of(require_privacy=floor_of(level), scores=most)
    experiment = run_of(level, ["global", "after_downlink"] if most else [])
    places, found = [data, other_data(data, root / "other")], list[Finding]()

    def heard(which: int, place: Path) -> Heard:
        with serving(experiment, places[which], place) as above:
            others = above.others()
            relay = Relay(above.address, experiment, lie)
            one = told_to([relay], rules, places[which], place)
            relay.close()
            found.extend(Finding(name, f"the run above: {why}") for why in above.ended(others))
        return one

    for again in range(TRIES):
        tried = root / str(again)
        sites = {(n, of): heard(n, tried / f"{n}{of}") for n in range(2) for of in range(2)}
        if len({(*one.calls,) for one in sites.values()}) == 1:
            break
    one, ledger = sites[0, 0], tried / "00" / "site.db"
    clips = [CLIP] * len(one.lies)
    found += [Finding(name, one.ended)] if one.ended else []
    found += leaks(sites, ["scores"] if most else [])
    found += unpaid(level, one, sites[0, 1], clips, ledger)
    return found + scored_more(one, most, ledger)


def early(level: str) -> dict[str, Says]:
    """Return what a relay may make of the coordinator's answers, so that a site stays out.

    The coordinator above is honest, and its run is one that the site would take part in.
    """
    wide, scoring = (
        table_of(config(level, **tables).to_dict())
        for tables in ({"privacy": {"clip": 3 * CLIP}}, {"evaluate": {"views": ["global"]}})
    )
    plain = table_of(tiny_experiment().to_dict())
    return {
        "no run": lambda _, m: m.ClearField("run_id"),
        "no config": lambda _, m: m.ClearField("experiment"),
        "a wider bound": lambda _, m: m.experiment.CopyFrom(wide),
        "scores": lambda _, m: m.experiment.CopyFrom(scoring),
        "no privacy": lambda _, m: m.experiment.CopyFrom(plain),
    }


def play_early(level: str, data: Path, root: Path) -> list[Finding]:
    """Say what a site's rules refuse, before it joins and after; return what it told."""
    rules, found, experiment = Rules.of(require_privacy=floor_of(level)), [], run_of(level)
    with serving(experiment, data, root) as above:

        def told(name: str, down: Says) -> Heard:
            relay = Relay(above.address, experiment, Lie(down=down))
            (states := root / name.replace(" ", "-")).mkdir()
            heard = told_to([relay], rules, data, states)
            relay.close()
            return heard

        for name, down in early(level).items():
            heard = told(name, down)
            if {*heard.calls} != {"Prepare"} or not heard.ended:
                found.append(Finding(name, f"the site told {heard.calls}: {heard.ended!r}"))
        other = early(level)["no privacy"]
        heard = told("another join", lambda call, m: other(call, m) if call == "Join" else None)
        if "Push" in heard.calls or not heard.ended:
            found.append(Finding("another config after the join", f"it told {heard.calls}"))
    return found


def play_columns(root: Path, asked: Sequence[columns.Wish]) -> list[Finding]:
    """Say another table to cut files by than the coordinator does; return what two sites told.

    Args:
        root: a directory for the run, tables and states.
        asked: what the relay would like to read.
    """
    rules, honest = Rules.of(allow_column=columns.ALLOWED), columns.config(columns.HONEST)
    found = list[Finding]()
    with serving(honest, root, root) as above:
        for number, wish in enumerate(asked):
            data = columns.config(wish.columns).data
            assert data is not None
            cut = table_of(data.model_dump(mode="json", exclude_none=True))
            lie = Lie(down=lambda call, m, cut=cut: m.data.CopyFrom(cut))  # type: ignore[misc]

            def relay(lie: Lie = lie) -> Relay:
                return Relay(above.address, honest, lie)

            sites = columns.heard_of(relay, rules, root, str(number))
            found += [Finding(wish.what, one.what) for one in leaks(sites, ())]
            calls = {call for one in sites.values() for call in one.calls}
            if calls != {"Prepare"}:
                found.append(Finding(wish.what, f"it told {sorted(calls)}"))
    return found


def main() -> int:
    """Tell all lies at each level; return 1 if something leaks."""
    found: dict[str, list[Finding]] = {}
    with tempfile.TemporaryDirectory() as made:
        data = digits_in(Path(made) / "data")
        for level in ("client", "example"):
            for name, lie in lies(5).items():
                most = 4 if name == "orders" else 0
                (root := Path(made) / f"{level}-{name}").mkdir()
                found[f"{level}, {name}"] = play(level, data, root, name, lie, most=most)
            root = Path(made) / f"{level}-early"
            found[f"{level}, before the join"] = play_early(level, data, root)
        found["columns"] = play_columns(Path(made) / "columns", columns.wishes())
    for name, findings in found.items():
        print(f"{name}: {'nothing' if not findings else ''}")
        for one in findings:
            print(f"  {one.lie or 'all'}: {one.what}")
    print(json.dumps({name: len(each) for name, each in found.items()}))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
