"""What a coordinator that deviates comes to know of a site that has conditions.

    python -m benchmarks.attacks.lying_coordinator

It replays orders, moves settings and payloads, goes back, leaves fields out, asks for scores of
models of its own, and restarts with another config. It tells the same lies to four sites: of two
data sets, each with two secrets. What it hears in all four is compared, bit by bit:

- what differs between data sets must be an upload under noise, which differs between secrets as
  well, or something that the site's rules allow;
- the noise in an upload is measured by the difference of two secrets. Its cost, in closed form, is
  held against the site's ledger, and no two releases may share noise.

Nothing here asks the product what a field is, what a part covers or what a training costs.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import torch
from google.protobuf.message import Message
from torch import Tensor

from fedcli.gate.rules import Rules
from fedcli.joining import host_of
from fedmodels.config.experiment import Experiment
from fedmodels.errors import FedtideError
from fedmodels.methods import make
from fedmodels.privacy.ledger import PrivacyLedger
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.run import RunFacts
from fedpb.codec import encode
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import coordinator_pb2_grpc
from fedtide import own_loop
from fedtide.testing.trial import digits_in, tiny_experiment

PROBLEM = Problem((1, 8, 8), 10)
CLIENTS, NOISE, CLIP, DELTA = 3, 4.0, 50.0, 1e-3
ALLOW = ["announced", "examples", "loss", "scores"]
BY_CHANCE = {
    "JoinRequest.token", "PushHeader.token", "LeaveRequest.token", "Waiting.token",
    "AnnounceRequest.token",
    "Report.seconds", "Report.peak_rss_bytes", "Report.state_sha256",
}  # fmt: skip
"""Fields that differ from one run to the next, whatever the data are: drawn, keyed or measured."""
TELLS = {
    "Report.loss": "loss",
    "Report.extra": "metrics",
    "Counts": "scores",
    "Confusion": "scores",
    "PushHeader.failure": "failure",
}
"""By field, or message, the word by which a site allows it."""
SIGMAS = 6
"""How far chance may move what is measured of noise, in standard deviations."""


def config(level: str, **tables: Any) -> Experiment:
    """Return the config that is shown to a site."""
    where = {"where": "clients"} if level == "client" else {}
    privacy = {
        "level": level, "noise_multiplier": NOISE, "delta": DELTA, "clip": CLIP, "allow": ALLOW,
        **where, **tables.pop("privacy", {}),
    }  # fmt: skip
    tables = {"training": {"batch_size": 64}, "evaluate": {"views": []}, **tables}
    return tiny_experiment(privacy=privacy, **tables)


# --- the lies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """An order, and the payload that it is given with."""

    lie: str
    order: Mapping[str, Any] = field(default_factory=dict)
    moved: float = 0.0
    """What is added to the weights."""
    kind: int = rpc.ORDER_KIND_TRAIN


def scores(count: int) -> list[Ask]:
    """Ask for scores of models of the coordinator's own."""
    views = {"views": ["global", "after_downlink"], "tasks_seen": 2, "confusion": True}
    return [Ask("own model", views, n / 10, rpc.ORDER_KIND_EVALUATE) for n in range(count)] + [
        Ask("train for a score", {"views": ["after_local"]}, 0.0, rpc.ORDER_KIND_EVALUATE)
    ]


def script(models: int = 3) -> list[Ask]:
    """Return the orders of one session."""
    names = [f.name for f in rpc.Order.DESCRIPTOR.fields if not f.message_type]
    names = [n for n in names if n not in ("kind", "client_id", "new_classes")]
    return [
        Ask("first"),
        *(Ask("replay", {"trip": n}) for n in range(1, 3)),
        *(Ask("settings", {"trip": n, "settings": table_of({"training.lr": 0.1 + n * 1e-7})})
          for n in range(3, 5)),
        Ask("payload", {"trip": 5}, 1e-6),
        *(Ask(f"{name} is another", {"trip": 6, name: _other(name)}) for name in names),
        Ask("back", {"interaction": 3, "trip": 8}),
        Ask("forth", {"interaction": 1, "trip": 9}),
        Ask("score what it trained", {"trip": 10, "views": ["after_local"], "tasks_seen": 1}),
        *scores(models),
        Ask("no kind", {}, 0.0, 99),
        Ask("the end", {}, 0.0, rpc.ORDER_KIND_FINISH),
    ]  # fmt: skip


def _other(name: str) -> Any:
    kind = rpc.Order.DESCRIPTOR.fields_by_name[name]
    one = True if kind.cpp_type == kind.CPPTYPE_BOOL else 1
    text = {"views": ["after_local"], "set_aside": [1]}
    return text.get(name, one)


@dataclass
class Liar(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """The coordinator: it says what it is told to, and keeps all that it hears."""

    shown: Experiment
    asks: Sequence[Ask]
    problem: Problem = PROBLEM
    joined: Experiment | None = None
    """What it says once a site has joined, where that is something else."""
    prepared: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its answer to Prepare that are others; None leaves one out."""
    heard: list[tuple[str, Message]] = field(default_factory=list)
    uploads: list[tuple[Ask, dict[str, Tensor]]] = field(default_factory=list)
    _answered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _next: int = 0

    def Prepare(self, request: Any, context: Any) -> rpc.PrepareResponse:  # noqa: N802
        """Say what the run is."""
        self.heard.append(("Prepare", request))
        facts = {"run_id": "lies", "experiment": table_of(self.shown.to_dict()), "seed": 0}
        if self.shown.data is not None:
            facts["data"] = table_of(self.shown.data.model_dump(mode="json", exclude_none=True))
        facts |= self.prepared
        return rpc.PrepareResponse(**{k: v for k, v in facts.items() if v is not None})

    def Join(self, request: Any, context: Any) -> rpc.JoinResponse:  # noqa: N802
        """Take a site in."""
        self.heard.append(("Join", request))
        said = table_of((self.joined or self.shown).to_dict())
        return rpc.JoinResponse(run_id="lies", beat_every_s=3600, experiment=said)

    def Pull(self, request: Any, context: Any) -> Iterator[rpc.PullResponse]:  # noqa: N802
        """Give the next order, once the one before is answered."""
        while self._next < len(self.asks):
            ask, self._next = self.asks[self._next], self._next + 1
            facts = {"base": -1, "committed": -1, "durable": -1, "issue": self._next}
            order = rpc.Order(kind=ask.kind, client_id="0", **{**facts, **ask.order})
            encoded = encode(self._payload(ask))
            header = rpc.PullHeader(order=order)
            header.parts.add(role="common", digest=encoded.digest, bundle=encoded.header)
            yield rpc.PullResponse(header=header)
            yield from map(rpc.PullResponse.FromString, encoded.chunks())
            self._answered.acquire(timeout=60)
        context.abort(grpc.StatusCode.OUT_OF_RANGE, "the run is over")

    def _payload(self, ask: Ask) -> Bundle:
        run = RunFacts(self.shown, self.problem)
        method = make(self.shown.method.name, **self.shown.method.hyper_parameters())
        common, _ = method.payload_spec(run)
        names = [key.removeprefix("weights/") for key in common.required]
        return Bundle({name: run.initial_weights[name] + ask.moved for name in names})

    def Push(self, requests: Iterator[Any], context: Any) -> rpc.PushResponse:  # noqa: N802
        """Keep a result."""
        first = next(requests)
        frames = [first.frame, *(each.frame for each in requests)]
        self.heard.append(("Push", first.header))
        found = tensors_of(first.header.bundle, b"".join(bytes(f.payload) for f in frames))
        self.uploads.append((self.asks[self._next - 1], found))
        self._answered.release()
        return rpc.PushResponse()

    def Beat(self, request: Any, context: Any) -> rpc.BeatResponse:  # noqa: N802
        """Take a sign of life."""
        return rpc.BeatResponse()

    def Leave(self, request: Any, context: Any) -> rpc.LeaveResponse:  # noqa: N802
        """Let a site go."""
        self.heard.append(("Leave", request))
        return rpc.LeaveResponse()


KINDS = {1: "<f4", 2: "<f8", 3: "<f2", 5: "<i8", 6: "<i4", 7: "<i2", 8: "i1", 9: "u1", 10: "?"}
"""Element types by their number in the schema."""


def tensors_of(header: Any, payload: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of an upload by key, as the schema lays them out."""
    listed = [(f"weights/{one.name}", one) for one in header.weights.tensors]
    for level in header.prototypes:
        parts = {"vectors": level.vectors, "labels": level.labels, "counts": level.counts}
        listed += [(f"prototypes/{level.level}/{part}", one) for part, one in parts.items()]
    for one in header.generators:
        listed += [(f"generators/{one.key}/{tensor.name}", tensor) for tensor in one.tensors]
    if header.HasField("histogram"):
        listed += [("histogram/round", header.histogram.round)]
        listed += [("histogram/total", header.histogram.total)]
    found = {}
    for key, one in listed:
        kind = np.dtype(KINDS[one.dtype])
        count = math.prod(one.shape)
        flat = np.frombuffer(payload, kind, count, one.offset)
        found[key] = flat.reshape([*one.shape]).copy()
    return found | {f"scalars/{k}": np.array(v) for k, v in header.scalars.items()}


# --- the sites ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heard:
    """What a coordinator heard of one site."""

    fields: Mapping[str, bytes]
    """By place, such as ``Push 3/PushHeader.report/Report.loss``."""
    uploads: Sequence[Mapping[str, np.ndarray[Any, Any]]]
    """By session and order; empty where the site sent none."""
    lies: Sequence[str]
    """Of each upload, what it was asked by."""
    tasks: Sequence[int]
    """Of each upload, whose examples it is of."""
    ended: str
    """The line that the site ended with, if it did."""
    calls: Sequence[str]


def other_data(data: Path, place: Path) -> Path:
    """Copy a partition, with other inputs under the same labels."""
    shutil.copytree(data, place)
    for file in place.glob("[0-9]*/task-*/*_x.npy"):
        x = np.load(file)
        np.save(file, x.max() - x)
    return place


Joins = Callable[[str, Path, Path, Rules, Path | None], None]
"""Takes part as client 0 at an address, with data, states, rules and a ledger."""


def by_command(address: str, data: Path, states: Path, rules: Rules, ledger: Path | None) -> None:
    """Take part as ``fedcli join`` does."""
    host_of(
        [0], address, data, states, torch.device("cpu"), rules=rules, ledger=ledger,
        give_up_after=20.0,
    ).run()  # fmt: skip


def by_own_loop(address: str, data: Path, states: Path, rules: Rules, ledger: Path | None) -> None:
    """Take part with a training loop of the site's own: a few steps over the data of the task."""
    given = {"scores": rules.scores} if rules.scores is not None else {}
    tasks = own_loop.client(
        address, 0, data, state_dir=states, ledger=ledger, give_up_after=20.0, tell=[*rules.told],
        require_privacy=None if rules.floor is None else rules.floor.text, **given,
    )  # fmt: skip
    for task in tasks:
        x, y = task.data.tensors
        steps = torch.optim.SGD(task.model.parameters(), lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            loss = torch.nn.functional.cross_entropy(task.model(x), y)
            loss.backward()
            steps.step()
        task.send(loss=loss.detach())


class Deviating(Protocol):
    """What a site takes for its coordinator."""

    heard: list[tuple[str, Message]]
    """What the site said, by call."""
    uploads: list[tuple[Ask, dict[str, np.ndarray[Any, Any]]]]
    """What it uploaded, with what it was asked by."""


def told_to(
    liars: Sequence[Deviating], rules: Rules, data: Path, states: Path, joins: Joins = by_command
) -> Heard:
    """Let a site take part with each of some coordinators, and return what they heard."""
    ended = ""
    for liar in liars:
        server = grpc.server(ThreadPoolExecutor(6))
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(liar, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        ledger = states / "site.db" if rules.counts else None
        try:
            joins(address, data, states / "state", rules, ledger)
        except FedtideError as error:
            ended = str(error)
        finally:
            server.stop(None).wait()
    heard = [one for liar in liars for one in liar.heard]
    fields = dict[str, bytes]()
    for number, (call, message) in enumerate(heard):
        fields |= flat(f"{call} {number}", message)
    sent = [pair for liar in liars for pair in liar.uploads]
    calls = [call for call, _ in heard]
    lies = [ask.lie for ask, _ in sent]
    tasks = [int(ask.order.get("task", 0)) for ask, _ in sent]
    return Heard(fields, [found for _, found in sent], lies, tasks, ended, calls)


def flat(place: str, message: Any) -> Iterator[tuple[str, bytes]]:
    """Yield each field of a message by its place, with its bytes."""
    name = message.DESCRIPTOR.name
    for known, value in message.ListFields():
        path = f"{place}/{name}.{known.name}"
        inner = known.message_type
        if inner is not None and inner.GetOptions().map_entry:
            yield from ((f"{path}[{key}]", repr(value[key]).encode()) for key in sorted(value))
        elif inner is not None:
            several = value if known.is_repeated else [value]
            for number, each in enumerate(several):
                yield from flat(f"{path}[{number}]", each)
        else:
            yield path, repr([*value] if known.is_repeated else value).encode()


# --- what they know -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Something that leaves a site and should not, or is not paid for."""

    lie: str
    what: str


def leaks(sites: Mapping[tuple[int, int], Heard], told: Sequence[str]) -> list[Finding]:
    """Return what tells of data without noise, though no rule allows it.

    Args:
        sites: what was heard of each, by data set and secret; of sites without noise, one secret
            is enough.
        told: words by which the site's rules allow something.
    """
    found = []
    places = dict.fromkeys(place for one in sites.values() for place in one.fields)
    for place in places:
        values = {one.fields.get(place) for one in sites.values()}
        last = place.rpartition("/")[2]
        if len(values) == 1 or last in BY_CHANCE or _is_told(last, told):
            continue
        found.append(Finding("", place))
    for number, lie in enumerate(sites[0, 0].lies):
        for key in sites[0, 0].uploads[number]:
            of = {who: one.uploads[number].get(key) for who, one in sites.items()}
            if any(each is None for each in of.values()):
                found.append(Finding(lie, f"{key} is in some uploads"))
                continue
            differs = not np.array_equal(of[0, 0], of[1, 0])
            if differs and np.array_equal(of[0, 0], of.get((0, 1), of[0, 0])):
                found.append(Finding(lie, f"{key} tells of data without noise"))
    return found


def _is_told(name: str, told: Sequence[str]) -> bool:
    bare, message = name.partition("[")[0], name.partition(".")[0]
    return TELLS.get(bare, TELLS.get(message, "")) in {*told}


def releases_of(site: Heard) -> list[int]:
    """Return the numbers of the uploads that are no repetition of an earlier one."""
    known, found = set[str](), []
    for number, upload in enumerate(site.uploads):
        if not upload:
            continue
        made = hashlib.sha256(b"".join(upload[key].tobytes() for key in sorted(upload)))
        if made.hexdigest() not in known:
            known.add(made.hexdigest())
            found.append(number)
    return found


def noise_in(one: Heard, other: Heard, number: int) -> np.ndarray[Any, Any]:
    """Return the difference of the noise that two secrets put on one upload (P,)."""
    a, b = one.uploads[number], other.uploads[number]
    keys = [key for key in a if key.startswith("weights/") and a[key].dtype.kind == "f"]
    return np.concatenate([(a[key].astype(np.float64) - b[key]).ravel() for key in keys])


def epsilon_of(mu: float, delta: float = DELTA) -> float:
    """Return epsilon of Gaussian releases whose squared 1 / noise sum to mu^2; 0 of none.

    In closed form: Balle and Wang, ICML 2018, Theorem 8.
    """
    if not mu:
        return 0.0

    def chance(epsilon: float) -> float:
        def phi(x: float) -> float:
            return math.erfc(-x / math.sqrt(2)) / 2

        return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)

    low, high = 0.0, 600.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) > delta else (low, middle)
    return high


def unpaid(
    level: str, site: Heard, other: Heard, clips: Sequence[float], ledger: Path, steps: int = 1
) -> list[Finding]:
    """Return what a site's ledger does not count of what left.

    Args:
        level: whose noise it is.
        site: what was heard of the site.
        other: of one with the same data and another secret.
        clips: bound of each upload, by number.
        ledger: the site's.
        steps: with level=example, of one training.
    """
    new = releases_of(site)
    noise = {n: noise_in(site, other, n) for n in new}
    found = [
        Finding(site.lies[n], f"its noise is that of upload {m} as well")
        for n in new for m in new
        if m < n and abs(np.corrcoef(noise[n], noise[m])[0, 1]) > SIGMAS / math.sqrt(len(noise[n]))
    ] if level == "client" else []  # fmt: skip
    off = 0.0
    if level == "client":
        z = [float(noise[n].std()) / math.sqrt(2) / clips[n] for n in new]
        off = SIGMAS * math.sqrt(2 / sum(map(len, noise.values()))) if new else 0.0
    else:  # an example is of one task here, and all of its batches are whole
        most = max((sum(site.tasks[n] == task for n in new) for task in {*site.tasks}), default=0)
        z = [NOISE / math.sqrt(steps)] * most
    squares = sum(1 / one**2 for one in z)
    low, true, high = (epsilon_of(math.sqrt(squares * (1 + by))) for by in (-off, 0.0, off))
    with closing(PrivacyLedger(ledger, level)) as counted:  # type: ignore[arg-type]
        said = counted.epsilon(DELTA)
    if not 0.99 * low <= said <= 1.01 * high:
        found.append(Finding("", f"epsilon is {true:.4g}, and the ledger says {said:.4g}"))
    return found


def scored_more(site: Heard, most: int, ledger: Path) -> list[Finding]:
    """Return whether more models were scored than a site allows, or than its ledger says."""
    answers: dict[tuple[str, bytes], list[bytes]] = {}
    for place in site.fields:
        before, is_view, _ = place.partition("/Counts.view")
        if is_view:
            report = before.partition("/Report.counts")[0]
            numbers = [
                site.fields.get(f"{before}/Counts.{n}", b"") for n in ("correct", "loss_sum")
            ]
            answers.setdefault((report, site.fields[place]), []).extend(numbers)
    # the same numbers once more tell nothing, and may be free
    told = {(view, *numbers) for (_, view), numbers in answers.items()}
    said = 0
    if most and ledger.exists():
        with closing(sqlite3.connect(ledger)) as db:
            (said,) = db.execute("SELECT count(*) FROM scores").fetchone()
    if len(told) > most:
        return [Finding("own model", f"{len(told)} models were scored, and {most} may be")]
    if said != len(told):
        return [Finding("own model", f"{len(told)} models were scored, and {said} are counted")]
    return []


# --- the plays ------------------------------------------------------------------------------------


def floor_of(level: str) -> str:
    """Return what the sites require: enough for all that is ordered here."""
    return f"level={level},epsilon=1e6,delta={DELTA},clip={2 * CLIP}"


def play(level: str, data: Path, root: Path, *, told: Sequence[str] = (), most: int = 0,
         asks: Sequence[Ask] = (), joins: Joins = by_command) -> list[Finding]:  # fmt: skip
    """Tell all lies to four sites that have joined; return what is amiss.

    Args:
        level: whose noise the sites require.
        data: a partition.
        root: a directory for states and ledgers.
        told: words by which the sites allow something beside uploads.
        most: models that they let be scored.
        asks: the orders of the first session; all lies unless given.
        joins: how the sites take part.
    """
    rules = Rules.of(require_privacy=floor_of(level), tell=told, scores=most)
    places, sites = [data, other_data(data, root / "other")], dict[tuple[int, int], Heard]()
    views = {"evaluate": {"views": ["global", "after_downlink"] if most else []}}
    wider = {"privacy": {"clip": 2 * CLIP}, **views}
    for which, where in enumerate(places):
        for secret in range(2):
            liars = [
                Liar(config(level, **views), asks or script(most + 1)),
                Liar(config(level, **wider), [Ask("restart"), Ask("restart", {"trip": 1})]),
            ]
            states = root / f"{which}{secret}"
            states.mkdir()
            sites[which, secret] = told_to(liars, rules, where, states, joins)
    allowed = [*told, *(["scores"] if most else [])]
    one, ledger = sites[0, 0], root / "00" / "site.db"
    clips = [2 * CLIP if lie == "restart" else CLIP for lie in one.lies]
    found = [Finding("", one.ended)] if one.ended else []
    found += leaks(sites, allowed)
    found += unpaid(level, one, sites[0, 1], clips, ledger)
    return found + scored_more(one, most, ledger)


def early(level: str) -> dict[str, Liar]:
    """Return coordinators that a site has to stay away from before it tells anything."""
    honest, asks = config(level), [Ask("first")]
    bare = {"pfedgrp": ["generators"], "fedpac": []}
    liars = {
        "no privacy": Liar(tiny_experiment(), asks),
        "no run": Liar(honest, asks, prepared={"run_id": None}),
        "no config": Liar(honest, asks, prepared={"experiment": None}),
        "scores": Liar(config(level, evaluate={"views": ["global"]}), asks),
        "a wider bound": Liar(config(level, privacy={"clip": 3 * CLIP}), asks),
    }
    if level == "client":
        server = {"privacy": {"where": "server"}}
        liars["noise at the server"] = Liar(config(level, **server), asks)
        for name, more in bare.items():
            tables = {"method": name, "privacy": {"allow": [*ALLOW, "metrics", *more]}}
            liars[name] = Liar(config(level, **tables), asks)
    return liars


def play_early(level: str, data: Path, root: Path) -> list[Finding]:
    """Let a site meet coordinators that show what its rules refuse; return what it told them."""
    rules, found = Rules.of(require_privacy=floor_of(level)), []
    for lie, liar in early(level).items():
        states = root / lie.replace(" ", "-")
        states.mkdir()
        heard = told_to([liar], rules, data, states)
        if {*heard.calls} != {"Prepare"} or not heard.ended:
            found.append(Finding(lie, f"the site told {sorted({*heard.calls})}: {heard.ended!r}"))
    later = Liar(config(level), [Ask("first")], joined=tiny_experiment())
    states = root / "later"
    states.mkdir()
    heard = told_to([later], rules, data, states)
    if "Push" in heard.calls or not heard.ended:
        found.append(Finding("another config after the join", f"the site told {heard.calls}"))
    return found


def main() -> int:
    """Tell all lies at each level, with no scores and with some; return 1 if something leaks."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        data = digits_in(Path(made) / "data")
        for level in ("client", "example"):
            for most in (0, 4):
                root = Path(made) / f"{level}-{most}"
                root.mkdir()
                found[f"{level}, {most} models"] = play(level, data, root, most=most)
            root = Path(made) / f"{level}-early"
            root.mkdir()
            found[f"{level}, before the join"] = play_early(level, data, root)
    for name, findings in found.items():
        print(f"{name}: {'nothing' if not findings else ''}")
        for one in findings:
            print(f"  {one.lie or 'all'}: {one.what}")
    print(json.dumps({name: len(each) for name, each in found.items()}))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
