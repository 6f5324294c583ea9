"""Events of a run as plain lines, and who tells them: the log, and the launcher's pipe."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping

from fedmodels.console.printable import bytes_text, duration, printable
from fedmodels.plugins import OURS
from fedmodels.times import LAST_WORDS_S, LINES_WITHIN_S
from fedsrv.progress.events import Event, EventLog
from fedsrv.progress.run_status import RunStatus, means_text, number_text, place_text, scores_text

FREQUENT = frozenset({"order", "beat", "upload", "head", "present"})
"""Kinds that come for every client in every interaction, and those that tell a watcher alone."""
ENDED = "ended"
"""The kind that tells watchers why a run ends before its end; the command's last line says it."""
COMINGS = frozenset({"joined", "left"})
"""Kinds of events that a client brings about as often as it likes."""
MAX_COMINGS = 20
"""Lines about one client's coming and going in any minute."""
GRAVE = frozenset(
    {
        "failed",
        "gone",
        "waiting",
        "rollback",
        "started-over",
        "missed",
        "draining",
        "note",
        "refused",
    }
)
"""Kinds that a user may have to act on."""


def level_of(event: Event) -> int:
    """Return how much an event matters, as a level of ``logging``."""
    if event.kind in FREQUENT or event.kind == ENDED:
        return logging.DEBUG
    if event.kind == "resting" and event.detail.get("clients"):  # somebody has to come back
        return logging.WARNING
    if event.kind == "log":
        return logging.getLevelNamesMapping().get(str(event.detail.get("level")).upper(), 0)
    return logging.WARNING if event.kind in GRAVE else logging.INFO


class EventFormatter:
    """Makes lines of events, and keeps the status that they tell of."""

    def __init__(self) -> None:
        self.status = RunStatus()

    def line(self, event: Event) -> str:
        """Take in an event and return it as one line."""
        is_known = event.client in self.status.clients
        self.status.take(event)
        if event.kind == "joined":
            return printable(self._joined(event, is_known))
        if event.kind == "commit":
            return printable(self._commit(event))
        return printable(_LINES.get(event.kind, _any)(event))

    def _joined(self, event: Event, is_known: bool) -> str:
        status, who = self.status, f"client {event.client} joined"
        if is_known:
            return f"{who} again"
        so_far = event.client.isdigit() and status.expected
        return f"{who} ({status.joined} of {status.expected})" if so_far else who

    def _commit(self, event: Event) -> str:
        facts, left = event.detail, self.status.seconds_left
        sizes = facts.get("bytes") or {}
        spent = [f"{bytes_text(sizes[way])} {way}" for way in ("down", "up") if way in sizes]
        of = "" if self.status.whole else " of this stage"  # the run has no last interaction
        spent += [] if left is None else [f"about {duration(left)} left{of}"]
        loss = f"loss {number_text(facts.get('loss'))}"
        return ", ".join([f"{self.status.place} committed", loss, *spent])


def _listening(event: Event) -> str:
    facts, clients = event.detail, int(event.detail["clients"])
    enough = "" if facts["needed"] == clients else f" ({facts['needed']} suffice)"
    whom = f"{clients} client{'' if clients == 1 else 's'}"
    return f"waiting for {whom} to join{enough} at {facts['address']}"


def _finished(event: Event) -> str:
    metrics = event.detail.get("metrics")
    return "the run has finished" + (f": {scores_text(metrics)}" if metrics else "")


def _server(event: Event) -> str:
    facts = event.detail
    place = place_text(event.interaction, event.round, facts.get("task"))
    return f"{place}: {facts.get('work')}, step {facts.get('step')} of {facts.get('of')}"


def _rollback(event: Event) -> str:
    reason = event.detail.get("reason", "")
    return f"rolling back to interaction {event.interaction + 1}: {reason}"


def _said(event: Event) -> str:
    return str(event.detail.get("line", event.kind))


def _any(event: Event) -> str:
    more = ", ".join(f"{key} {value}" for key, value in event.detail.items())
    whose = f"client {event.client} " if event.client else ""
    return f"{whose}{event.kind}{': ' if more else ''}{more}"


def _place(event: Event) -> str:
    return place_text(event.interaction, event.round, event.detail.get("task"))


_LINES: Mapping[str, Callable[[Event], str]] = {
    "listening": _listening,
    "finished": _finished,
    "server": _server,
    "rollback": _rollback,
    "scores": lambda e: (
        f"{_place(e)} scored: {scores_text(e.detail.get('metrics'))}" + means_text(e.detail)
    ),
    "ended": lambda e: str(e.detail.get("reason", "")),
    "failed": lambda e: f"client {e.client} failed: {e.detail.get('reason', '')}",
    "left": lambda e: f"client {e.client} left: {e.detail.get('reason', '')}",
    "missed": lambda e: f"{e.detail.get('events')} events were missed",
    "metrics": lambda e: f"metrics for Prometheus: {e.detail['url']}",
    "dashboard": lambda e: f"live page: {e.detail['url']}",
    "waiting": _said,
    "forecast": lambda e: f"forecast: {e.detail.get('line', '')}",
    "gone": _said,
    "back": _said,
    "resting": _said,
    "refused": _said,
    "growth": lambda e: f"the run continues: {e.detail.get('line', '')}",
    "resumed": lambda e: f"the run continues after {_place(e)}",
    "launcher": _said,
    "log": _said,
    "report": lambda e: f"report: {e.detail.get('path')}",
    "note": lambda e: f"note: {e.detail.get('line', '')}",
    "draining": lambda e: str(e.detail.get("line", "the coordinator stops")),
}


_COMMITTED = re.compile(r"interaction (\d+) of (\d+): .* committed")


def committed_in(line: str) -> tuple[int, int] | None:
    """Return how many interactions are committed, and of how many, where a line says so."""
    found = _COMMITTED.search(line)
    return (int(found[1]), int(found[2])) if found else None


LOGGERS = ("fedsrv", OURS)
"""Of the coordinator and of its plugins: what they warn of is shown by a launcher."""


class EventPrinter:
    """Tells what happens in a run, once clients can join."""

    def __init__(self, *, names_address: bool, prints: bool) -> None:
        """Choose whether to print the address, and each event, for the launcher."""
        self._names_address, self._prints = names_address, prints
        self._notes = WarningsAsNotes(logging.WARNING)
        self.has_begun = False

    def begin(self, address: str, events: EventLog) -> None:
        """Tell events from now on, in a thread."""
        if self._names_address:
            print(f"listening on {address}", flush=True)
        if self._prints:
            for name in LOGGERS:
                logging.getLogger(name).addHandler(self._notes)
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
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._notes)


class WarningsAsNotes(logging.Handler):
    """Prints warnings that are no events for the launcher, which shows no log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning as a note."""
        if not hasattr(record, "event"):
            line = {"line": record.getMessage()}
            sys.stdout.write(Event("note", detail=line, unix_time=record.created).to_json() + "\n")
            sys.stdout.flush()


class ComingsLimit:
    """Keeps a client that joins and leaves all the time from filling the log."""

    def __init__(self) -> None:
        self._told: dict[str, deque[float]] = {}
        self._silenced: set[str] = set()

    def limited(self, event: Event, line: str) -> str:
        """Return the line to log: the event's, a last word about its client, or nothing."""
        if event.kind not in COMINGS:
            return line
        told = self._told.setdefault(event.client, deque(maxlen=MAX_COMINGS))
        if len(told) < MAX_COMINGS or event.unix_time - told[0] > LINES_WITHIN_S:
            told.append(event.unix_time)
            self._silenced.discard(event.client)
            return line
        if event.client in self._silenced:
            return ""
        self._silenced.add(event.client)
        return f"client {event.client} keeps leaving and returning: this is not reported again"


def tell(log: EventLog, prints: bool = False) -> None:
    """Log what happens, as far as the log level lets it through; print it for the launcher."""
    formatter, comings = EventFormatter(), ComingsLimit()
    logger = logging.getLogger("fedsrv")
    for event in log.listen(from_start=True):
        if prints:
            sys.stdout.write(event.to_json() + "\n")
            sys.stdout.flush()
        if not logger.isEnabledFor(level_of(event)):
            formatter.status.take(event)
        elif line := comings.limited(event, formatter.line(event)):
            logger.log(level_of(event), "%s", line, extra={"event": event.__dict__})
