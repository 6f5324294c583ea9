"""Events of a run as plain lines, and where a run stands as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmodels.printable import printable
from fedsrv.events import Event

_FIGURES = ("a_glo", "a_loc", "a_sel", "global_acc")
QUIET = frozenset({"order", "beat", "upload"})
"""Kinds that come for every client in every interaction."""


def line_of(event: Event) -> str | None:
    """Return an event as one line; None for a kind that comes too often to be read."""
    if event.kind in QUIET:
        return None
    facts = event.detail
    if event.kind == "commit":
        text = f"{_place(event)} committed, loss {_number(facts.get('loss'))}"
    elif event.kind == "scores":
        text = f"{_place(event)} scored: {_figures(facts.get('metrics'))}"
    elif event.kind == "finished":
        text = f"the run has finished: {_figures(facts.get('metrics'))}"
    elif event.kind == "waiting":
        text = str(facts.get("line", "waiting"))
    elif event.kind == "failed":
        text = f"client {event.client} failed: {facts.get('reason', '')}"
    elif event.kind == "missed":
        text = f"{facts.get('events')} events were missed"
    else:
        more = ", ".join(f"{key} {value}" for key, value in facts.items())
        whose = f"client {event.client} " if event.client else ""
        text = f"{whose}{event.kind}{': ' if more else ''}{more}"
    return printable(text)


def _place(event: Event) -> str:
    task, of = event.detail.get("task"), event.detail.get("of")
    where = f"round {event.round}" + ("" if task is None else f", task {task}")
    return f"{where}, interaction {event.interaction}" + (f" (of {of})" if of else "")


def _figures(metrics: object) -> str:
    known = metrics if isinstance(metrics, Mapping) else {}
    found = [f"{key} {_number(known[key])}" for key in _FIGURES if key in known]
    return ", ".join(found) or "nothing to show"


def _number(value: object) -> str:
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
        elif event.kind == "left":
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
        return {
            **vars(self),
            "present": sorted(self.present, key=lambda c: (len(c), c)),
            "failures": dict(self.failures),
        }

    def lines(self) -> list[str]:
        """Return it as plain lines."""
        done = f"interaction {self.interaction + 1} of {self.interactions or '?'}"
        where = f"{done}: round {self.round}, task {self.task}, loss {_number(self.loss)}"
        state = "finished" if self.finished else "waiting" if self.waiting else "going on"
        found = [
            f"state: {state}",
            f"committed: {where if self.interaction >= 0 else 'nothing yet'}",
            f"scores: {_figures(self.metrics)}",
            f"clients seen lately: {len(self.present)}",
        ]
        found += [f"waiting: {self.waiting}"] if self.waiting else []
        found += [f"failures of client {c}: {n}" for c, n in sorted(self.failures.items())]
        return [printable(line) for line in found]
