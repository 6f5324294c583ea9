"""``fedcli join --stay``: a site that takes part in the runs that are served at one address.

This process stays small: it imports no torch. It asks now and then which run is served at the
address, and starts ``fedcli join`` for each new one, with a state directory of the run's own. What
a site allows is for that process to check, which alone learns of data.

The front of a queue says behind which of its ports runs are served. A site stays at each of them.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import grpc

from fedcli.data.kept_runs import make_room
from fedcli.data.settled import stamps_in
from fedcli.gate.rules import Rules
from fedmodels.config.privacy import LEDGER
from fedmodels.console.options import words_of
from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.host.guarded import Guarded
from fedmodels.host.machine import end_on_sigterm
from fedmodels.host.processes import run_program
from fedmodels.host.staying import NewRuns, Outcome, pauses
from fedmodels.times import OVER_S, SITE_LOOK_S
from fedpb import PROTOCOL, SERVICE
from fedpb.channels import channel_options, place_after
from fedpb.told import Door, Passed
from fedpb.unreachable import in_words
from fedpb.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:
    import typer

AT_ONCE, MAX_PLACES = 4, 16
"""In how many runs that are served side by side a site takes part unless it says otherwise; and at
how many ports behind a front it stays at most."""
Join = Callable[[str, str, Collection[str], Callable[[], bool]], Outcome]
"""Takes part in a run, given its address and id, and those of runs in which the site takes part
meanwhile; as long as that is wanted."""
LEFT = 1000
"""Runs that this site takes no part in any more, of which it knows so."""
log = logging.getLogger(__name__)


@dataclass
class Address:
    """Where runs are served, one after the other."""

    server: str
    client: str
    credentials: Callable[[], grpc.ChannelCredentials | None] = lambda: None
    """Reads those of now: certificates are renewed while a site stays."""
    on_places: Callable[[Sequence[int]], None] = lambda places: None
    """Told where runs are served, if the address is that of a queue's front."""
    told: str = field(default="", init=False)
    """What was last said of an address at which no run is served."""

    def run(self) -> str | None:
        """Return the id of the run that is served now; None where none is, and say why once."""
        asked = rpc.PrepareRequest(client_id=self.client, protocol=PROTOCOL, has_cut=True)
        try:
            opened = self._channel()
        except ConfigError as error:  # as while a key is renewed, and its certificate is not yet
            self._tell(str(error))
            return None
        with opened as channel:
            call = channel.unary_unary(
                f"/{SERVICE}/Prepare",
                Passed.encoded,
                rpc.PrepareResponse.FromString,
            )
            try:
                reply = call(Door().passed(asked), timeout=SITE_LOOK_S)
            except grpc.RpcError as error:
                self._tell(in_words(printable(error.details() or error.code().name)))
                return None
        if reply.places:
            self._tell("its runs are served at ports behind this one")
            self.on_places(reply.places)
            return None
        found: str = reply.run_id
        if not re.fullmatch(r"[0-9a-z-]{8,64}", found):  # it names a directory here
            self._tell("the server does not say which run it serves: is it older?")
            return None
        self.told = ""
        return found

    def _channel(self) -> grpc.Channel:
        options = channel_options(self.server)
        if (credentials := self.credentials()) is None:
            return grpc.insecure_channel(self.server, options)
        return grpc.secure_channel(self.server, credentials, options)

    def _tell(self, why: str) -> None:
        if why != self.told:
            log.info("waiting for a run at %s: %s", self.server, why)
        self.told = why


def each_run(
    runs: Callable[[], str | None],
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
    files: Callable[[], object] = lambda: None,
) -> Generator[str, Outcome, NoReturn]:
    """Yield each run that is served, for good, and be sent how taking part in it ended.

    :class:`Outcome` says whether and when a run is joined again. New runs are joined at once as
    long as there are few of them: after ``NEW_RUNS`` one each ``A_NEW_RUN_S``.

    Args:
        runs: returns the id of the run that is served now, or None.
        wait: waits so many seconds.
        now: the time, in seconds.
        files: returns what changes when the site's files do: a run that it stays out of is then
            joined again, at most once in ``OVER_S``.
    """
    last, left_s, after_faults, seen = "", 0.0, pauses(), files()
    look_s = OVER_S
    left, allowed = dict[str, None](), NewRuns(now)
    while True:
        run = runs()
        is_left = run in left or (run == last and left_s > 0)
        if run is None or is_left or (run != last and not allowed.take()):
            left_s = left_s - SITE_LOOK_S if run else 0.0
            look_s -= SITE_LOOK_S
            if look_s <= 0 and left_s > 0:
                look_s = OVER_S
                left_s = left_s if files() == seen else 0.0
            wait(SITE_LOOK_S)
            continue
        if run != last:
            after_faults = pauses()
        log.info("run %s: joins", run)
        seen, look_s = files(), OVER_S
        outcome, last = (yield run), run
        if outcome is Outcome.LATER:
            left_s = next(after_faults)
            log.warning("run %s: %s; again in %g s", run, outcome.value, left_s)
            continue
        level = logging.INFO if outcome is Outcome.OVER else logging.WARNING
        log.log(level, "run %s: %s", run, outcome.value)
        left_s = OVER_S if outcome is Outcome.OVER else math.inf
        if outcome is Outcome.FOR_GOOD:
            left[run] = None
            for old in [*left][:-LEFT]:
                del left[old]


def stay(context: typer.Context, address: Address, rules: Rules) -> None:
    """Take part in each run that is served at an address, by the options of ``fedcli join``.

    ``rules`` are what these options say of the site's conditions.

    Raises:
        ConfigError: an option belongs to one run.
    """
    given = dict(context.params)
    for name in ("dry_run", "start_over", "ask"):
        if given[name]:
            raise ConfigError(
                f"--stay takes part in many runs, and --{name.replace('_', '-')} is for one"
            )
    end_on_sigterm()
    named = (given[name] for name in ("data", "recipe", "rules"))
    paths = [path for path in named if path is not None]
    join = partial(_joined, context, rules)
    places = Places(address, join, given["at_once"], files=lambda: [*map(stamps_in, paths)])
    try:
        places.stay(address)
    finally:
        places.leave()


class _Left(Exception):
    """The site leaves: a thread that stays at a port ends."""


class Places:
    """The ports behind that of a queue's front: a thread stays at each."""

    _under_way: Guarded[tuple[str, ...]] = Guarded("_lock")
    """Runs in which the site takes part."""
    _unnamed: Guarded[dict[str, float]] = Guarded("_lock")
    """Since when the front names other ports and not this one, by address; monotonic."""

    def __init__(
        self,
        front: Address,
        join: Join,
        at_once: int,
        now: Callable[[], float] = time.monotonic,
        files: Callable[[], object] = lambda: None,
    ) -> None:
        """Stay nowhere yet; ``join`` takes part in a run, in ``at_once`` runs at a time.

        ``files`` are those of :func:`each_run`.
        """
        self._front, self._join, self._now, self._files = front, join, now, files
        self._room = threading.BoundedSemaphore(at_once)
        self._leaving = threading.Event()
        self._lock = threading.RLock()
        self._under_way, self._unnamed = (), {}
        self._threads: dict[int, threading.Thread] = {}
        """Of the thread that looks at the front, which alone begins others."""
        front.on_places = self._stay_at

    def _stay_at(self, places: Sequence[int]) -> None:
        """Stay at further ports, of which there are few."""
        named = {place_after(self._front.server, place) for place in places}
        with self._lock:
            at = {place_after(self._front.server, place) for place in self._threads} - named
            self._unnamed = {one: self._unnamed.get(one, self._now()) for one in at}
        for place in places:
            stays = self._threads.get(place)
            if place > MAX_PLACES or (stays is not None and stays.is_alive()):
                continue
            server = place_after(self._front.server, place)
            address = Address(server, self._front.client, self._front.credentials)
            self._threads[place] = thread = threading.Thread(
                target=self._stay_until_left, args=(address,), name=f"place-{place}", daemon=True
            )
            thread.start()

    def _stay_until_left(self, address: Address) -> None:
        with suppress(_Left):
            self.stay(address)

    def stay(self, address: Address) -> NoReturn:
        """Take part in one run after the other at an address."""

        def run() -> str | None:
            if self._leaving.is_set():
                raise _Left
            return address.run()

        def wait(seconds: float) -> None:
            self._leaving.wait(seconds)

        each = each_run(run, wait, files=self._files)
        found = next(each)
        while True:
            while not self._room.acquire(timeout=SITE_LOOK_S):
                run()
            try:
                outcome = self._take_part(address.server, found)
            finally:
                self._room.release()
            found = each.send(outcome)

    def _take_part(self, server: str, run: str) -> Outcome:
        """Take part in a run, until it ends or is served there no more."""

        def is_wanted() -> bool:
            with self._lock:
                since = self._unnamed.get(server, math.inf)
            return not self._leaving.is_set() and self._now() - since < OVER_S

        with self._lock:
            beside = self._under_way
            self._under_way = (*beside, run)
        try:
            return self._join(server, run, beside, is_wanted)
        finally:
            with self._lock:
                self._under_way = tuple(one for one in self._under_way if one != run)

    def leave(self) -> None:
        """End the part in all runs, and wait for that."""
        self._leaving.set()
        for thread in self._threads.values():
            thread.join()


_MAKING_ROOM = threading.Lock()


def _joined(
    context: typer.Context,
    rules: Rules,
    server: str,
    run: str,
    beside: Collection[str],
    is_wanted: Callable[[], bool],
) -> Outcome:
    """Take part in one run by a process of its own; return how that ended."""
    given = context.params
    shown, states = given["show_uploads"], given["state_dir"]
    now = {"stay": False, "at_once": AT_ONCE, "state_dir": states / run, "run_id": run}
    now |= {"server": server}
    if given["ledger"] is None and rules.counts:  # one for all runs
        now["ledger"] = states.absolute().parent / LEDGER
    if shown not in (None, "-"):
        now["show_uploads"] = Path(shown) / run
    try:
        with _MAKING_ROOM:
            make_room(states, run, under_way=beside, incoming=given["watch"])
        return Outcome.of(run_program("fedcli", ["join", *words_of(context, **now)], is_wanted))
    except (ArchiveError, OSError) as error:
        log.error("%s", error)
        return Outcome.LATER
