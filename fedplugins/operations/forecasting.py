"""How long a run will take, by a trial: a client's work and the coordinator's, kept nowhere.

The trial is the first training of one client, from the initial state, in a directory that goes
away. All random numbers are those of seeds, so the run itself comes to the same bits. What is too
long to be done is done with all lengths (epochs, steps, images to draw) at 1; as it is, where that
takes less than twice as long; and else with each of them larger: the time of the whole follows from
how it grows.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedcli.runtime.workers import Workers
from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import data_and_scenario
from fedmodels.config.privacy import masks_of
from fedmodels.console.printable import bytes_text, duration, text_of
from fedmodels.errors import ConfigError, DataError, FedtideError, reason_of
from fedmodels.facts.resolution import experiment_of
from fedmodels.host.devices import is_gpu
from fedmodels.host.machine import cores, peak_rss_bytes
from fedmodels.methods import make
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId
from fedmodels.tensors.uploads import Uploads
from fedmodels.times import LONG_S
from fedmodels.training.asked import most_recalled
from fedmodels.training.contexts import START, ServerContext
from fedmodels.training.hooks import broadcast, evaluation, init_server, learns_at_task_end, reduce
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import SharedSettings, to_table
from fedpb.codec import merged
from fedpb.v1 import coordinator_pb2 as rpc

WHOLE, PART, ALL, CLOCK = 0.5, 10.0, 40.0, 180.0
"""Seconds that a whole training may take here; that one with short lengths may take; after which
no further length is looked at; and that all may take on the clock, as of a class that sleeps."""
AGAIN = 1.0
"""Seconds until what takes too long is told so again: an error in a finalizer is lost."""
STEP, SHARE, LEAP = 0.1, 0.25, 16
"""Seconds that a length has to add before the time of the whole is concluded from them; the share
of the shortest trial that they have to be as well, which varies by itself; and by how much a length
that adds nothing grows at most from one trial to the next."""
LOOKED_AT = 20
"""Clients whose examples are counted."""
CLIENT, BYTES = 0.005, 1e9
"""What a trip costs beside all work: seconds for each client, and bytes a second."""
PRIVACY = "[privacy]"
LENGTHS = re.compile(r"(epochs|iterations|steps|evaluations|volume|n_check)$")
Lengths = Mapping[tuple[str, str], int]
"""Keys of a config that say how often something is done, and how often."""


@dataclass(frozen=True)
class Work:
    """Seconds of what an interaction consists of."""

    client: float
    """A client's training."""
    server: float
    """What the coordinator makes of all uploads."""

    @property
    def seconds(self) -> float:
        """Return the seconds of both."""
        return self.client + self.server

    def __add__(self, other: Work) -> Work:
        return Work(self.client + other.client, self.server + other.server)

    def __mul__(self, times: float) -> Work:
        return Work(self.client * times, self.server * times)


@dataclass(frozen=True)
class Forecast:
    """What a run will take."""

    interaction: float
    """Seconds, on this machine."""
    client: float
    """Of these a client's training."""
    interactions: int
    """0 of an open run."""
    memory: int
    """What the trial took of it, beside what is imported."""
    least: bool = False
    """Whether a part was too long to be tried: it takes longer than told."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """By key, the share of the work that follows it."""
    without: tuple[str, ...] = ()
    """What comes to it, and could not be tried."""

    @property
    def run(self) -> float:
        """Return the seconds of all interactions."""
        return self.interaction * self.interactions

    def lines(self) -> Iterator[str]:
        """Yield what is said of it."""
        about = "more than" if self.least else "about"
        line = f"an interaction takes {about} {_time(self.interaction)} on this machine"
        line += f", of which a client trains {_time(self.client)}"
        if self.interactions:
            line += f"; all {self.interactions} take {about} {_time(self.run)}"
        line += f", without {' and '.join(self.without)}" if self.without else ""
        yield f"{line}; a client takes {bytes_text(float(f'{self.memory:.2g}'))} of memory"
        if max(self.run, self.interaction) > LONG_S:
            keys = [f"{key} ({share:.0%})" for key, share in self.shares.items()]
            yield f"less of these makes it shorter: {', '.join([*keys, '[schedule] rounds'])}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**vars(self), "run": self.run, "lines": [*self.lines()]}


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else text_of(float(f"{seconds:.2g}"), "seconds")


def of_config(
    experiment: Experiment, data: Path | None, device: torch.device, place: Path | None = None
) -> Forecast:
    """Return the forecast of a run on its data; unless they are given, they are dealt out for it.

    Raises:
        FedtideError: as :func:`forecast`.
    """
    if data is not None:
        return forecast(experiment, data, device, place=place)
    how, seed = experiment.schedule, experiment.seed
    with _directory(place) as root:
        dealt = data_and_scenario(experiment, "--data")
        run_partition(*dealt, how.clients, seed, root, Console(quiet=True))
        return forecast(experiment, root, device, place=place)


def forecast(
    experiment: Experiment,
    data: Path,
    device: torch.device,
    tried_s: float = WHOLE,
    at_once: int | None = None,
    place: Path | None = None,
) -> Forecast:
    """Try a client's work and the coordinator's; say how long the run will take.

    Args:
        experiment: what is to run.
        data: the clients' data.
        device: what clients train on.
        tried_s: seconds that a whole training is tried for.
        at_once: how many clients train side by side; by default one a core.
        place: where directories for a while lie; by default where the system has them.

    Raises:
        FedtideError: the config or the data do not fit, or the trial failed; one line says why.
    """
    threads = torch.get_num_threads()
    with _directory(place) as own:
        torch.set_num_threads(experiment.training.threads)  # as a client does that joins
        try:
            with _within(CLOCK, "SIGALRM", "ITIMER_REAL", _OutOfTime):
                return _Trial(experiment, data, device, own, at_once).forecast(tried_s)
        except _OutOfTime:
            raise FedtideError(f"a trial takes longer than {duration(CLOCK)}") from None
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _directory(place: Path | None) -> Iterator[Path]:
    """Yield a directory that goes away."""
    try:
        made = tempfile.TemporaryDirectory(prefix="fedtide-forecast-", dir=place)
    except OSError as error:
        raise FedtideError(f"no directory for a trial can be made: {reason_of(error)}") from None
    with made:
        yield Path(made.name)


class _TooLong(BaseException):
    """A trial takes too long; nothing of a client may catch it."""


class _OutOfTime(BaseException):
    """All trials together take too long."""


@contextmanager
def _within(
    seconds: float,
    number: str = "SIGPROF",
    timer: str = "ITIMER_PROF",
    error: type[BaseException] = _TooLong,
) -> Iterator[None]:
    """End what takes longer than so many seconds, by default of this process's work.

    Windows has no such timers: there a trial takes as long as it takes.
    """
    if not hasattr(signal, timer):
        yield
        return
    signal_number, which = getattr(signal, number), getattr(signal, timer)

    def ring(number: int, frame: Any) -> None:
        raise error

    handler = signal.signal(signal_number, ring)
    before = signal.setitimer(which, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(which, 0)
        signal.signal(signal_number, handler)
        signal.setitimer(which, *before)


class _Trial:
    """The trial of a run."""

    def __init__(
        self,
        experiment: Experiment,
        data: Path,
        device: torch.device,
        place: Path,
        at_once: int | None,
    ) -> None:
        self.asked, self.data, self.device, self.place = experiment, data, device, place
        self.without = dict[str, None]()
        """What comes to the work, and cannot be tried."""
        self.experiment = self._unmasked()
        self.at_once, self.began = at_once or cores(), peak_rss_bytes()
        self._number, self.moved = 0, 0
        self.clock = time.perf_counter if is_gpu(device) else time.process_time
        self.began_at = self.clock()
        looked = Workers([0], data, place / "looked", device)
        some = [c for c in range(experiment.schedule.clients) if looked.has_data(c)]
        kept = some[:: max(1, math.ceil(len(some) / LOOKED_AT))]
        method = make(experiment.method.name, **experiment.method.hyper_parameters())
        recalled = most_recalled(method, experiment)
        found = {c: _examples(looked, c, recalled) for c in kept}
        self.examples = {c: row for c, row in found.items() if row}
        """Examples that a training takes, by client and task."""
        if not self.examples:
            raise DataError(f"{data} holds no client's data")
        self.mean = float(np.mean([n for row in self.examples.values() for n in row]))
        self.client = min(self.examples, key=lambda c: abs(self.examples[c][0] - self.mean))
        self.tasks = max(map(len, self.examples.values()))
        self.least = False
        """Whether it takes longer than what could be tried."""
        self.has_evaluator = (data / "global-test").is_dir()

    def forecast(self, tried_s: float) -> Forecast:
        """Do the trial."""
        lengths = self._lengths()
        ones = dict.fromkeys(lengths, 1)
        try:
            self._begin(ones)
            try:
                work, shares = self._tried({}, tried_s), dict[str, float]()
            except _TooLong:
                work, shares = self._grown(lengths, ones)
            scores, masks = self._scores(), self._masks()
        except _TooLong:
            work, shares, scores, self.least = Work(PART, 0), {}, 0.0, True
            masks = Work(0, 0)
        how, cohort = self.experiment.schedule, self.experiment.at_once
        scale = self.mean / max(1, self.examples[self.client][0])
        turns = math.ceil(cohort / self.at_once)
        trips = 1 + 1 / self._scored + self._more_trips
        one = turns * (work.client * scale + masks.client) + work.server + masks.server + scores
        one += trips * cohort * (CLIENT + self.moved / BYTES)
        if self.experiment.evaluate.trained == "all":  # others train for the score
            beside = math.ceil((how.clients - cohort) / self.at_once)
            one += beside * work.client * scale / self._scored
        whole = 0 if how.open else how.rounds * self.tasks
        memory = peak_rss_bytes() - self.began
        told = shares, (*self.without,)
        return Forecast(one, work.client * scale + masks.client, whole, memory, self.least, *told)

    def _begin(self, ones: Lengths) -> None:
        """Do what is done once in a process; find out whether a client's work needs others'."""
        logging.disable(logging.ERROR)  # what fails here is told, or left out and named
        try:
            self._tried(ones)
        except FedtideError:
            if self.experiment.privacy is None:
                raise
            self.without[PRIVACY] = None
            self._tried(ones)
        finally:
            logging.disable(logging.NOTSET)

    # --- secure sums ------------------------------------------------------------------------------

    def _unmasked(self) -> Experiment:
        """Return the experiment without a secure sum: its masks take peers, who are not here."""
        tables = self.asked.to_dict()
        if masks_of(self.asked.privacy) is None:
            return self.asked
        del tables["privacy"]["secure_sum"]
        with suppress(ConfigError):
            return experiment_of(tables)
        self.without[PRIVACY] = None  # what is left of it needs a secure sum
        del tables["privacy"]
        return experiment_of(tables)

    def _masks(self) -> Work:
        """Return the work of the masks of a secure sum, by a mask and a key agreed on.

        A client adds a mask of its own and one for each peer of its group, with whom it agrees on
        two keys. The coordinator takes all own masks off, where all uploads come.
        """
        if (rules := masks_of(self.asked.privacy)) is None:
            return Work(0, 0)
        from fedmodels.secure_sum.keys import Attempt, Secrets, pair_key, private_key
        from fedmodels.secure_sum.masks import add_mask
        from fedmodels.training.secure_upload import SecureUpload

        worker, cohort = self.workers.of(self.client), self.experiment.at_once
        form = SecureUpload.of(worker.method, RunFacts(self.asked, worker.run.problem))
        vector = np.zeros(form.length, form.numbers(cohort, 1).dtype)
        attempt, own, other = Attempt(bytes(16), 0), Secrets.fresh(), Secrets.fresh()
        private, public = private_key(attempt, 0, own.pair), other.public(attempt, 1)
        begun = self.clock()
        key = pair_key(attempt, 0, private, 1, public)
        agreed = self.clock() - begun
        begun = self.clock()
        add_mask(vector, key, 1)
        mask = self.clock() - begun
        group = math.ceil(cohort / rules.groups)
        return Work(group * mask + 2 * (group - 1) * agreed, cohort * mask)

    @property
    def _more_trips(self) -> int:
        """How many trips a secure sum adds: keys and shares, signatures, and what opens masks."""
        rules = masks_of(self.asked.privacy)
        return 0 if rules is None else 2 + rules.signs

    # --- lengths ----------------------------------------------------------------------------------

    def _lengths(self) -> dict[tuple[str, str], int]:
        """Return the keys that say how often something is done."""
        begun = Workers([self.client], self.data, self.place / "begun", self.device)
        begun.begin(self.experiment)
        worker = begun.of(self.client)
        values = to_table(worker.method)
        for part in vars(worker.method).values():
            if isinstance(part, SharedSettings) and values.get("generator_epochs") == 0:
                values["generator_epochs"] = part.of(worker.run).family.usual()[1]  # type: ignore[attr-defined]
        if values.get("generator_arch") != "ddpm":
            values.pop("generator_evaluations", None)  # of diffusion models alone
        found = {("method", key): n for key, n in values.items() if LENGTHS.search(key)}
        found["training", "local_epochs"] = self.experiment.training.local_epochs
        return {key: n for key, n in found.items() if isinstance(n, int) and n > 1}

    def _with(self, lengths: Lengths) -> Experiment:
        """Return the experiment with other lengths."""
        tables = self.experiment.to_dict()
        for (table, key), value in lengths.items():
            tables[table] = {**tables.get(table, {}), key: value}
        if PRIVACY in self.without:
            tables.pop("privacy", None)
        return experiment_of(tables)

    def _grown(self, lengths: Lengths, ones: Lengths) -> tuple[Work, dict[str, float]]:
        """Return the work of the whole, and the share of each key in it, from short trials."""
        base = work = self._tried(ones)
        if 2 * base.seconds < PART:
            with suppress(_TooLong):  # lengths may add less than all that is done once
                return self._tried({}, 2 * base.seconds), {}
        parts = dict[str, float]()
        enough = max(STEP, SHARE * base.seconds)
        for key, value in sorted(lengths.items(), key=lambda one: -one[1]):
            times, more = 4, Work(0, 0)
            try:
                while True:
                    if self.clock() - self.began_at > ALL:
                        raise _TooLong
                    times = min(value, times)
                    more = self._tried({**ones, key: times}) + base * -1
                    if more.seconds >= enough or times == value:
                        break
                    times *= math.ceil(min(LEAP, enough / max(more.seconds, enough / LEAP)))
            except _TooLong:
                self.least, self.without[f"[{key[0]}] {key[1]} = {value}"] = True, None
                continue
            each = more * (1 / (times - 1))
            each = Work(max(0.0, each.client), max(0.0, each.server)) * (value - 1)
            work += each
            parts[f"[{key[0]}] {key[1]} = {value}"] = each.seconds
        whole = work.seconds
        shares = {key: part / whole for key, part in parts.items() if part > whole / 10}
        return work, dict(sorted(shares.items(), key=lambda one: -one[1]))

    # --- a trial ----------------------------------------------------------------------------------

    def _tried(self, lengths: Lengths, within_s: float = PART) -> Work:
        """Let the client train once and the coordinator reduce; return how long each took."""
        experiment = self._with(lengths) if lengths or self.without else self.experiment
        self._number += 1
        clients: list[ClientId] = [self.client, *([EVALUATOR] if self.has_evaluator else [])]
        self.workers = Workers(clients, self.data, self.place / str(self._number), self.device)
        self.workers.begin(experiment)
        worker = self.workers.of(self.client)
        method, run = worker.method, worker.run
        self.state = init_server(method, run)
        others = [c for c in range(experiment.schedule.clients) if c != self.client]
        cohort = tuple(sorted([self.client, *others[: experiment.at_once - 1]]))
        worker.stream.open(0)
        labels = tuple(sorted({*worker.stream.train(0)[1].tolist()}))
        self.ctx = ServerContext(
            run, START, cohort, labels=dict.fromkeys(cohort, labels),
            limits=worker.stream.limits(),
        )  # fmt: skip
        common, personal = broadcast(method, self.ctx, self.state)
        sent = worker.set_up.wire.sent(common)
        payload = merged({"common": sent, "personal": personal.get(self.client, Bundle())})
        order = self._order(rpc.ORDER_KIND_TRAIN, ())
        with _within(within_s):
            begun = self.clock()
            result = worker.execute(order, payload)
            client = self.clock() - begun
            assert result is not None, "nobody abandons a trial"
            if result.failure:
                raise FedtideError(f"a trial of a client's training failed: {result.failure}")
            self.moved = payload.num_bytes() + result.upload.num_bytes()
            upload = worker.set_up.wire.restored(result.upload, common)
            sent_by, server = dict.fromkeys(cohort, upload), 0.0
            for ctx, share in self._moments(method):
                begun = self.clock()
                uploads = Uploads(sent_by, method.count, method.reduction)
                try:
                    reduce(method, ctx, self.state, uploads)
                except Exception:  # such as a method's that reads data of the server
                    self.without["the coordinator's part"] = None
                server += share * (self.clock() - begun)
            return Work(client, server)

    def _moments(self, method: Method) -> list[tuple[ServerContext, float]]:
        """Return where the coordinator's work differs, with the share of interactions each is."""
        how = self.experiment.schedule
        last = 1 / how.rounds if how.order == "tasks_outer" else 1.0
        if self.tasks == 1 or how.open or not learns_at_task_end(method):
            return [(self.ctx, 1.0)]
        found = [(self.ctx, 1 - last), (replace(self.ctx, ends_task=True), last)]
        return [(ctx, share) for ctx, share in found if share]

    def _order(self, kind: rpc.OrderKind, views: Any, client: ClientId | None = None) -> rpc.Order:
        seen, least = (self.tasks + 1) // 2, 1
        return rpc.Order(
            kind=kind, client_id=str(self.client if client is None else client), base=-1,
            committed=-1, views=sorted(views),
            global_test=self.experiment.evaluate.generalization,
            tasks_seen=seen if kind == rpc.ORDER_KIND_EVALUATE else least,
        )  # fmt: skip

    def _scores(self) -> float:
        """Return the seconds of scores in an interaction, by the last trial's clients."""
        worker = self.workers.of(self.client)
        method, how = worker.method, self.experiment.evaluate
        common, personal = evaluation(method, self.ctx, self.state)
        sent = worker.set_up.wire.sent(common)
        payload = merged({"common": sent, "personal": personal.get(self.client, Bundle())})
        wanted = {*method.views} & {*how.views}
        views = wanted - {"after_local"}

        def seconds(client: ClientId, views: Any) -> float:
            begun = self.clock()
            with suppress(Exception), _within(PART):
                asked = self._order(rpc.ORDER_KIND_EVALUATE, views, client)
                self.workers.of(client).execute(asked, payload)
            return self.clock() - begun

        one = seconds(self.client, views or {"global"})
        many = math.ceil((how.clients or self.experiment.schedule.clients) / self.at_once)
        each = many * one if views else 0.0
        if "after_local" in wanted:  # on the same examples as another view
            each += math.ceil(self.experiment.at_once / self.at_once) * one / max(1, len(views))
        if self.has_evaluator and "global" in views:
            each += seconds(EVALUATOR, {"global"})
        return each / self._scored

    @property
    def _scored(self) -> int:
        """Return how many interactions there are for each that is scored."""
        inner = self.tasks if self.experiment.schedule.order == "rounds_outer" else 1
        return (self.experiment.evaluate.every or self.experiment.schedule.rounds) * inner


def _examples(workers: Workers, client: int, recalled: float) -> list[int]:
    """Return how many examples a client trains on, by task: so many of earlier ones at most."""
    own = [sum(task.train) for task in workers.data(client).tasks]
    return [n + int(min(recalled, sum(own[:task]))) for task, n in enumerate(own)]
