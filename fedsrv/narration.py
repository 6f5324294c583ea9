"""Events of a run as plain lines, and where a run stands as one."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmodels.printable import printable
from fedmodels.units import bytes_text, duration
from fedsrv.events import Event, EventLog

LAST_WORDS_S = 5.0
"""Time for what is left to say when a run has ended."""
FIGURES = ("a_glo", "a_loc", "a_sel", "a_glo_balanced")
"""The metrics that lines show, where a run has them."""
DOING = {1: "trains", 2: "scores", 3: "finishes"}
"""What a client does with an order, by its kind."""
FREQUENT = frozenset({"order", "beat", "upload"})
"""Kinds that come for every client in every interaction."""
ENDED = "ended"
"""The kind that tells monitors why a run ends before its end; the command's last line says it."""
COMINGS = frozenset({"joined", "left"})
"""Kinds of events that a client brings about as often as it likes."""
MOST_COMINGS, WITHIN_S = 20, 60.0
"""Lines about one client's coming and going in any minute."""
GRAVE = frozenset({"failed", "waiting", "rollback", "started-over", "missed", "draining", "note"})
"""Kinds that a user may have to act on."""


def level_of(event: Event) -> int:
    """Return how much an event matters, as a level of ``logging``."""
    if event.kind in FREQUENT or event.kind == ENDED:
        return logging.DEBUG
    return logging.WARNING if event.kind in GRAVE else logging.INFO


class Pace:
    """How long a run still takes, by its last commits."""

    def __init__(self) -> None:
        self._commits = deque[tuple[int, float]](maxlen=20)

    def take(self, event: Event) -> None:
        """Take in an event; a roll-back begins the count anew."""
        if event.kind == "rollback":
            self._commits.clear()
        elif event.kind == "commit":
            self._commits.append((event.interaction, event.unix_time))

    def seconds_left(self, of: int) -> float | None:
        """Return the time that a run of so many interactions still needs; None: not known yet."""
        if len(self._commits) < 2:
            return None
        (first, begun), (last, now) = self._commits[0], self._commits[-1]
        if last <= first or not math.isfinite(now - begun):  # a server may say anything
            return None
        return (now - begun) / (last - first) * max(of - last - 1, 0)


class Narrator:
    """Says events in plain lines; remembers who joined, and the run's pace."""

    def __init__(self) -> None:
        self.expected = 0
        """Clients of the run."""
        self.here = 0
        """How many of them have joined, the evaluator aside."""
        self._joined: set[str] = set()
        self.pace = Pace()

    def line(self, event: Event) -> str:
        """Take in an event and return it as one line."""
        self.pace.take(event)
        say = getattr(self, f"_say_{event.kind}", None)
        return printable(say(event) if say else _any(event))

    def _say_listening(self, event: Event) -> str:
        facts = event.detail
        self.expected = int(facts["clients"])
        enough = "" if facts["needed"] == self.expected else f" ({facts['needed']} suffice)"
        whom = f"{_count(self.expected, 'client')} to join{enough}"
        return f"waiting for {whom} at {facts['address']}"

    def _say_joined(self, event: Event) -> str:
        if event.client in self._joined:
            return f"client {event.client} joined again"
        self._joined.add(event.client)
        if not event.client.isdigit():
            return f"client {event.client} joined"
        self.here += 1
        so_far = f" ({self.here} of {self.expected})" if self.expected else ""
        return f"client {event.client} joined{so_far}"

    def _say_commit(self, event: Event) -> str:
        facts = event.detail
        sizes = facts.get("bytes") or {}
        spent = [f"{bytes_text(sizes[way])} {way}" for way in ("down", "up") if way in sizes]
        left = self.pace.seconds_left(int(facts.get("of") or 0))
        spent += [] if left is None else [f"about {duration(left)} left"]
        what = [f"{_place(event)} committed", f"loss {number_text(facts.get('loss'))}", *spent]
        return ", ".join(what)

    def _say_scores(self, event: Event) -> str:
        return f"{_place(event)} scored: {figures_text(event.detail.get('metrics'))}"

    def _say_finished(self, event: Event) -> str:
        metrics = event.detail.get("metrics")
        return "the run has finished" + (f": {figures_text(metrics)}" if metrics else "")

    def _say_ended(self, event: Event) -> str:
        return str(event.detail.get("reason", ""))

    def _say_failed(self, event: Event) -> str:
        return f"client {event.client} failed: {event.detail.get('reason', '')}"

    def _say_left(self, event: Event) -> str:
        return f"client {event.client} left: {event.detail.get('reason', '')}"

    def _say_missed(self, event: Event) -> str:
        return f"{event.detail.get('events')} events were missed"

    def _say_server(self, event: Event) -> str:
        facts = event.detail
        return (
            f"{_place(event)}: {facts.get('work')}, step {facts.get('step')} of {facts.get('of')}"
        )

    def _say_rollback(self, event: Event) -> str:
        return f"rolling back to interaction {event.interaction}: {event.detail.get('reason', '')}"

    def _say_metrics(self, event: Event) -> str:
        return f"metrics for Prometheus: {event.detail['url']}"

    def _say_dashboard(self, event: Event) -> str:
        return f"live page: {event.detail['url']}"

    def _say_waiting(self, event: Event) -> str:
        return str(event.detail.get("line", "waiting"))

    def _say_note(self, event: Event) -> str:
        return f"note: {event.detail.get('line', '')}"

    def _say_draining(self, event: Event) -> str:
        return str(event.detail.get("line", "the coordinator stops"))


def _any(event: Event) -> str:
    more = ", ".join(f"{key} {value}" for key, value in event.detail.items())
    whose = f"client {event.client} " if event.client else ""
    return f"{whose}{event.kind}{': ' if more else ''}{more}"


def _place(event: Event) -> str:
    task, of = event.detail.get("task"), event.detail.get("of")
    where = f"round {event.round}" + ("" if task is None else f", task {task}")
    return f"{where}, interaction {event.interaction}" + (f" (of {of})" if of else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def figures_text(metrics: object) -> str:
    """Return the metrics that lines show."""
    known = metrics if isinstance(metrics, Mapping) else {}
    found = [f"{key} {number_text(known[key])}" for key in FIGURES if key in known]
    return ", ".join(found) or "nothing to show"


def number_text(value: object) -> str:
    """Return a number for a line; ``unknown`` where there is none."""
    return f"{value:.4g}" if isinstance(value, int | float) else "unknown"


@dataclass
class Standing:
    """Where a run stands, as its last events tell."""

    interaction: int = -1
    round: int = -1
    task: int = -1
    interactions: int = 0
    """How many there are in all; 0 while nothing says so."""
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)
    waiting: str = ""
    """The last line about a wait; empty once all whom it names have come or answered."""
    awaited: set[str] = field(default_factory=set)
    finished: bool = False

    @classmethod
    def of(cls, events: Iterable[Event]) -> Standing:
        """Take in events, the oldest first."""
        found = cls()
        for event in events:
            found.take(event)
        return found

    def take(self, event: Event) -> None:
        """Take in one event."""
        facts = event.detail
        if event.client and event.kind in ("joined", "order", "beat", "upload"):
            self.present.add(event.client)
        if event.kind == "waiting":
            self.waiting = str(facts.get("line", ""))
            self.awaited = {*map(str, facts.get("clients", ()))}
        elif event.kind in ("joined", "upload", "failed") and event.client in self.awaited:
            self.awaited.discard(event.client)
            self.waiting = self.waiting if self.awaited else ""
        if event.kind == "left":
            self.present.discard(event.client)
        elif event.kind == "failed":
            self.failures[event.client] += 1
        elif event.kind == "commit":
            self.interaction, self.round, self.waiting = event.interaction, event.round, ""
            self.task = int(facts.get("task", -1))
            self.interactions, self.loss = int(facts.get("of") or 0), facts.get("loss")
        elif event.kind in ("scores", "finished"):
            self.metrics = dict(facts.get("metrics") or {})
            self.finished = event.kind == "finished"

    def to_dict(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        found = {key: value for key, value in vars(self).items() if key != "awaited"}
        return {
            **found,
            "present": sorted(self.present, key=lambda c: (len(c), c)),
            "failures": dict(self.failures),
        }

    def lines(self) -> list[str]:
        """Return it as plain lines."""
        done = f"interaction {self.interaction + 1} of {self.interactions or '?'}"
        where = f"{done}: round {self.round}, task {self.task}, loss {number_text(self.loss)}"
        state = "finished" if self.finished else "waiting" if self.waiting else "going on"
        found = [
            f"state: {state}",
            f"committed: {where if self.interaction >= 0 else 'nothing yet'}",
            f"scores: {figures_text(self.metrics)}",
            f"clients seen lately: {len(self.present)}",
        ]
        found += [f"waiting: {self.waiting}"] if self.waiting else []
        found += [f"failures of client {c}: {n}" for c, n in sorted(self.failures.items())]
        return [printable(line) for line in found]


class Telling:
    """Tells what happens in a run, once clients can join."""

    def __init__(self, *, names_address: bool, prints: bool) -> None:
        """Choose whether to print the address, and each event, for the launcher."""
        self._names_address, self._prints = names_address, prints
        self.has_begun = False

    def begin(self, address: str, events: EventLog) -> None:
        """Tell events from now on, in a thread."""
        if self._names_address:
            print(f"listening on {address}", flush=True)
        self._thread = threading.Thread(target=tell, args=(events, self._prints), daemon=True)
        self._thread.start()
        self.has_begun = True

    def fail(self, why: str) -> None:
        """Tell the launcher why the run failed: the log may be on a disk that is full."""
        if self._prints:
            sys.stdout.write(f"error: {why}\n")
            sys.stdout.flush()

    def end(self) -> None:
        """Wait until the last event is told."""
        self._thread.join(LAST_WORDS_S)


class Chatter:
    """Keeps a client that joins and leaves all the time from filling the log."""

    def __init__(self) -> None:
        self._told: dict[str, deque[float]] = {}
        self._hushed: set[str] = set()

    def hushed(self, event: Event, line: str) -> str:
        """Return the line to log: the event's, a last word about its client, or nothing."""
        if event.kind not in COMINGS:
            return line
        told = self._told.setdefault(event.client, deque(maxlen=MOST_COMINGS))
        if len(told) < MOST_COMINGS or event.unix_time - told[0] > WITHIN_S:
            told.append(event.unix_time)
            self._hushed.discard(event.client)
            return line
        if event.client in self._hushed:
            return ""
        self._hushed.add(event.client)
        return f"client {event.client} comes and goes all the time: no more of it is told"


def tell(log: EventLog, prints: bool = False) -> None:
    """Log what happens, as far as the log level lets it through; print it for the launcher."""
    narrator, chatter = Narrator(), Chatter()
    for event in log.listen(from_start=True):
        if prints:
            sys.stdout.write(event.to_json() + "\n")
            sys.stdout.flush()
        facts = {"event": event.__dict__}
        if line := chatter.hushed(event, narrator.line(event)):
            logging.getLogger("fedsrv").log(level_of(event), "%s", line, extra=facts)
