"""Where a run and its clients stand, as its events tell.

The terminal, the live page and ``fedsrv status`` show this one account.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmodels.console.printable import moment_text, printable, text_of
from fedmodels.errors import RunFailed
from fedmodels.facts.position import Interaction, Round
from fedmodels.numerics.metric_tables import metric
from fedsrv.progress.events import DONE, Event
from fedsrv.state.record import MAX_GONE, change_text, of_parts, some_text
from fedsrv.state.run_directory import refuse_in_use
from fedsrv.state.run_record import interaction_of, number, read_run

OF_TARGETS = ("mae_glo", "mae_loc", "r2_loc", "auroc_glo", "auroc_loc", "average_precision_loc")
SHOWN = ("a_glo", "a_loc", "a_sel", "a_glo_balanced")
"""The metrics that lines show, where a run has them."""
MAX_NOTES = 10
"""Notes that are shown."""
PHASES = {
    1: "trains", 2: "scores", 3: "finishes",
    4: "tells a key", 5: "shares secrets", 6: "opens a sum",
}  # fmt: skip
"""What a client does with an order, by its kind."""


class Pace:
    """How long a run still takes, by its last commits; the rests of an open run do not count."""

    def __init__(self) -> None:
        self._steps = deque[tuple[int, float]](maxlen=19)
        """From one commit to the next: interactions and seconds."""
        self._last: tuple[int, float] | None = None
        """The last commit and its time; None where a rest came since."""

    def take(self, event: Event) -> None:
        """Take in an event; a roll-back begins the count anew."""
        if event.kind == "rollback":
            self._steps.clear()
            self._last = None
        elif event.kind in ("resting", "growth"):
            self._last = None
        elif event.kind == "commit":
            at, now = event.interaction, event.unix_time
            if self._last is not None:
                before, then = self._last
                if at > before and math.isfinite(now - then):  # a server may say anything
                    self._steps.append((at - before, now - then))
            self._last = at, now

    def seconds_left(self, of: int) -> float | None:
        """Return the time that a run of so many interactions still needs.

        None where it is not known yet, and of the last one that is known: an open run may go on.
        """
        if self._last is None or not self._steps or self._last[0] + 1 >= of:
            return None
        steps, seconds = map(sum, zip(*self._steps, strict=True))
        return seconds / steps * (of - self._last[0] - 1)


@dataclass
class ClientStatus:
    """One client, by the last events about it."""

    phase: str = "unknown"
    detail: str = ""
    """How far its training is, or why it failed."""
    heard: float = 0.0
    """Unix time of the last event."""
    answered: int = -1
    """The last interaction that it answered."""
    failures: int = 0
    since: float = 0.0
    """Unix time since when it is away, or out of the run; 0 where it is neither."""
    refused: str = ""
    """Why what it brought last was refused."""

    def take(self, event: Event) -> None:
        """Take in an event about this client."""
        facts = event.detail
        self.heard, self.detail = event.unix_time, ""
        if event.kind == "beat":
            self.phase = "trains"
            self.detail = f"epoch {facts['epoch'] + 1}, batch {facts['batch'] + 1}"
        elif event.kind == "order":
            self.phase = PHASES.get(facts.get("order", 0), "works")
        elif event.kind == "upload":
            self.phase, self.answered = "waits", max(self.answered, event.interaction)
        elif event.kind == "failed":
            self.phase, self.detail = "failed", printable(str(facts.get("reason", "")))
            self.failures += 1
        elif event.kind in ("joined", "left", "gone", "back"):
            self.detail = printable(str(facts.get("reason") or ""))
            self.phase = "joined" if event.kind == "back" else event.kind
            is_away = event.kind in ("left", "gone") and self.detail != DONE
            self.since = event.unix_time if is_away else 0.0

    def stands(self, standing: Mapping[str, Any]) -> None:
        """Take in how the client stands by the roster."""
        state, self.refused = (
            str(standing.get("state")),
            printable(str(standing.get("refused") or "")),
        )
        self.phase = {"away": "gone", "out": "out"}.get(state, self.phase)
        self.since = number(standing.get("since"), 0.0) if state in ("away", "out") else 0.0
        self.detail = printable(str(standing.get("why") or self.detail))

    def __str__(self) -> str:
        """Return what it does."""
        return f"{self.phase}: {self.detail}" if self.detail else self.phase

    def lag(self, committed: int) -> int | None:
        """Return how many committed interactions it has not answered; None before its first."""
        return None if self.answered < 0 else max(committed - self.answered, 0)


@dataclass
class RunStatus:
    """Where a run stands; interactions, rounds and tasks count from zero, and -1 is none."""

    interaction: int = -1
    """The last committed one."""
    round: int = -1
    task: int = -1
    interactions: int = 0
    """How many are planned so far; 0 while nothing says so."""
    whole: int = 0
    """How many there are in all; 0 while nothing says so, and of a run without a last one."""
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    expected: int = 0
    """Clients of the run; 0 while nothing says so."""
    clients: dict[str, ClientStatus] = field(default_factory=dict)
    joined: int = 0
    """How many of them have joined, the evaluator aside."""
    work: str = ""
    """What the server computes for the method at this moment."""
    here: set[str] = field(default_factory=set)
    """Those that are connected."""
    waiting: str = ""
    """The last line about a wait; empty once all whom it names have come or answered."""
    resting: str = ""
    """What an open run waits for that has learned all it has; empty while it learns."""
    awaited: set[str] = field(default_factory=set)
    scored: int = 0
    """How many clients the metrics are means over; 0 while nothing says so."""
    unscored: list[str] = field(default_factory=list)
    """The clients that should be in these means, and are not."""
    means: dict[str, int] = field(default_factory=dict)
    """Over how many clients each accuracy is a mean."""
    changed: str = ""
    """From which round on means are over other clients, and who left and came, in words."""
    privacy: dict[str, float] = field(default_factory=dict)
    """What was spent of the clients' privacy, where noise hides them."""
    finished: bool = False
    digest: str = ""
    """Of a finished run's final state: equal where two runs end with the same bytes."""
    knows_clients: bool = True
    """Whether the run itself tells who is there: its directory does not."""
    head: str = ""
    """The newest head of the run's history that is safe: NUMBER:LINK."""
    notes: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The last notes: each tells of something that may be a mistake, and stops nothing; with the
    unix time when it came last, and the round committed by then."""
    pace: Pace = field(default_factory=Pace)

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunStatus:
        """Take in events, the oldest first."""
        found = cls()
        for event in events:
            found.take(event)
        return found

    @classmethod
    def of_directory(cls, run: Path) -> RunStatus:
        """Return where a run stands by what is committed; ArchiveError if it is none or damaged."""
        record = read_run(run)
        found = cls(finished=record.is_finished, knows_clients=False)
        if record.rows:
            row = record.rows[-1]
            found.interaction, found.round, found.task = last_place(record.rows)
            found.interactions = found.whole = len(record.rows) if found.finished else 0
            found.privacy = dict(of_parts(row).get("privacy") or {})
        rows = [*(row.get("metrics") or {} for row in record.rows), record.summary.get("metrics")]
        found.metrics = next((dict(one) for one in reversed(rows) if one), {})
        found.scored, found.unscored = record.in_means
        found.means = record.means
        found.changed = change_text(*record.population[-1]) if record.population else ""
        for client, standing in record.roster().items():
            found._client(client).stands(standing)
        found.loss = number(found.metrics.get("loss"))
        found.digest = str(record.summary.get("state_sha256") or "")
        if not found.finished:
            found.waiting = _who_works(run)
        return found

    def take(self, event: Event) -> None:
        """Take in one event."""
        facts = event.detail
        self.pace.take(event)
        if event.client:
            self._client(event.client).take(event)
        self._note_presence(event)
        if event.kind == "waiting":
            self.waiting = printable(str(facts.get("line", "")))
            self.awaited = {*map(str, facts.get("clients", ()))}
        elif event.kind in ("joined", "upload", "failed") and event.client in self.awaited:
            self.awaited.discard(event.client)
            self.waiting = self.waiting if self.awaited else ""
        if event.kind == "head":
            self.head = printable(str(facts.get("head", "")))
        if event.kind in ("note", "refused"):
            self._note(printable(str(facts.get("line", ""))), event.unix_time)
        if event.kind == "listening":
            self.expected = int(facts["clients"])
        elif event.kind == "rollback":
            self.interaction = event.interaction
        elif event.kind == "server":
            step = f"step {facts.get('step')} of {facts.get('of')}"
            self.work = printable(f"{facts.get('work')}, {step}")
        elif event.kind == "resting":
            self.resting, self.waiting = printable(str(facts.get("line", ""))), ""
            self.interactions = self.interaction + 1
        elif event.kind == "growth":
            self.resting, self.interactions = "", 0
        elif event.kind == "resumed":
            self.interaction, self.round = event.interaction, event.round
            self.task, self.loss = int(facts.get("task", -1)), facts.get("loss")
            self._take_means(facts)
        elif event.kind == "commit":
            self.interaction, self.round = event.interaction, event.round
            self.waiting = self.work = self.resting = ""
            self.task = int(facts.get("task", -1))
            self.interactions, self.loss = int(facts.get("of") or 0), facts.get("loss")
            self.whole = 0 if facts.get("open") else self.interactions
            self.privacy = dict(facts.get("privacy") or {})
        elif event.kind in ("scores", "finished"):
            if event.kind == "scores":
                self._take_means(facts)
            self.metrics = dict(facts.get("metrics") or {})
            self.finished = event.kind == "finished"
            self.digest = str(facts.get("state_sha256") or "")

    def _take_means(self, facts: Mapping[str, Any]) -> None:
        """Take mean scores, with how many clients they cover and which are missing."""
        self.metrics = dict(facts.get("metrics") or {})
        self.scored = int(facts.get("scored") or 0)
        self.unscored = [*map(str, facts.get("unscored", ()))]
        self.means, self.changed = dict(facts.get("means") or {}), str(facts.get("changed") or "")

    def _note_presence(self, event: Event) -> None:
        """Note who came, went, or is there."""
        if event.kind in ("gone", "back", "present"):
            named = [*map(str, event.detail.get("clients", ()))]
            if event.kind == "present":
                self.here = {*named}
                for name, standing in (event.detail.get("roster") or {}).items():
                    self._client(name).stands(standing)
                return
            for name in named:
                self._client(name).take(event)
            (self.here.difference_update if event.kind == "gone" else self.here.update)(named)
        elif event.kind == "left":
            self.here.discard(event.client)
        elif event.kind in ("joined", "order", "beat", "upload"):
            self.here.add(event.client)

    def _client(self, name: str) -> ClientStatus:
        """Return what is known of a client."""
        if name not in self.clients:
            self.clients[name] = ClientStatus()
            self.joined += name.isdigit()
        return self.clients[name]

    def _note(self, line: str, now: float) -> None:
        """Keep a line once, and the last ones of many."""
        self.notes.pop(line, None)
        self.notes[line] = now, self.round
        for old in [*self.notes][:-MAX_NOTES]:
            del self.notes[old]

    @property
    def present(self) -> list[str]:
        """Return the clients that are connected, by number."""
        return sorted(self.here, key=by_number)

    @property
    def num_present(self) -> int:
        """Return how many clients are connected, the evaluator aside."""
        return sum(name.isdigit() for name in self.here)

    @property
    def members(self) -> list[str]:
        """Return the clients that were ever there and still belong to the run, by number."""
        out = {name for name, client in self.clients.items() if client.phase == "out"}
        there = {*self.clients, *self.here} - out
        return sorted(filter(str.isdigit, there), key=by_number)

    @property
    def gone(self) -> list[str]:
        """Return the clients that belong to the run, were there, and are not, by number."""
        away = {name for name, client in self.clients.items() if client.since} - self.here
        return [] if self.finished else [name for name in self.members if name in away]

    @property
    def place(self) -> str:
        """Return what is committed; empty before the first commit."""
        if self.interaction < 0:
            return ""
        return place_text(self.interaction, self.round, self.task, self.whole)

    @property
    def is_at_the_end(self) -> bool:
        """Whether nothing is left to do of what is known of the run."""
        ends = 0 < self.interactions <= self.interaction + 1
        return self.finished or bool(self.resting) or ends

    @property
    def seconds_left(self) -> float | None:
        """Return the time that the run still needs; None where that is not known."""
        return self.pace.seconds_left(self.interactions)

    def to_dict(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        plain = (
            "interaction", "round", "task", "interactions", "loss", "metrics", "waiting", "resting",
            "privacy",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in plain},
            "work": self.work,
            "notes": self.dated_notes(),
            "head": self.head,
            "finished": self.finished,
            "state_sha256": self.digest,
            "seconds_left": self.seconds_left,
            "present": self.present,
            "gone": self.gone,
            "scored": self.scored,
            "unscored": self.unscored,
            "means": self.means,
            "changed": self.changed,
            "failures": {name: c.failures for name, c in self.clients.items() if c.failures},
            "clients": {
                name: {**vars(self.clients[name]), "lag": self.clients[name].lag(self.interaction)}
                for name in sorted(self.clients, key=by_number)
            },
        }

    def _gone_line(self, name: str) -> str:
        """Return since when a client is away, and why."""
        client = self.clients[name]
        why = f" ({client.detail})" if client.detail else ""
        return f"gone: client {name} since {moment_text(client.since)}{why}"

    def dated_notes(self) -> list[str]:
        """Return the notes, each with when it came."""
        return [
            f"{moment_text(at)}{f', after round {round + 1}' if round >= 0 else ''}: {line}"
            for line, (at, round) in self.notes.items()
        ]

    def lines(self) -> list[str]:
        """Return it as plain lines."""
        state = "finished" if self.finished else "waiting" if self.waiting else "going on"
        state = "resting" if self.resting and state == "going on" else state
        done = f"{self.place}, loss {number_text(self.loss)}" if self.place else "nothing yet"
        found = [
            f"state: {state}",
            f"committed: {done}",
            f"scores: {scores_text(self.metrics)}{means_text(vars(self))}",
        ]
        of = len(self.members)
        never = max(0, self.expected - len([*filter(str.isdigit, {*self.clients, *self.here})]))
        counts = f"{self.num_present} of {of}{f', {never} never seen' if never else ''}"
        found += [f"clients present: {counts}"] if self.knows_clients else []
        found += [self._gone_line(name) for name in self.gone[:MAX_GONE]]
        found += [f"gone: {len(self.gone) - MAX_GONE} more"] if len(self.gone) > MAX_GONE else []
        told = {name: client.refused for name, client in self.clients.items() if client.refused}
        found += [f"refused of client {c}: {why}" for c, why in sorted(told.items())[:MAX_GONE]]
        found += [f"privacy spent: {spent_text(self.privacy)}"] if self.privacy else []
        found += [f"waiting: {self.waiting}"] if self.waiting else []
        found += [f"resting: {self.resting}"] if self.resting else []
        found += [f"server: {self.work}"] if self.work else []
        found += [f"history: {self.head}"] if self.head else []
        found += [f"state digest: {self.digest}"] if self.digest else []
        found += [f"note: {line}" for line in self.dated_notes()]
        failed = {name: c.failures for name, c in self.clients.items() if c.failures}
        found += [f"failures of client {c}: {n}" for c, n in sorted(failed.items())]
        return [printable(line) for line in found]


def _who_works(run: Path) -> str:
    """Return what a run that has not finished waits for; nothing where a process works on it."""
    try:
        refuse_in_use(run)
    except RunFailed:
        return ""
    return "no process on this machine works on it; its command continues it with --resume"


def by_number(client: str) -> tuple[int, str]:
    """Return what sorts clients by their number, and the evaluator last."""
    return len(client), client


def last_place(rows: Sequence[Mapping[str, Any]]) -> tuple[Interaction, Round, int]:
    """Return the interaction, round and task of the last row; 0 for what a row does not say."""
    round, task = (int(number(rows[-1].get(key), 0)) for key in ("round", "task"))
    return Interaction(interaction_of(rows[-1], len(rows) - 1) - 1), Round(round), task


def place_text(interaction: int, round: int, task: int | None, of: int = 0) -> str:
    """Return a place in a run as people read it: interactions and rounds count from one."""
    whole = f" of {of}" if of else ""
    where = "" if task is None or task < 0 else f", task {task}"
    return f"interaction {interaction + 1}{whole}: round {round + 1}{where}"


def scores_text(metrics: object) -> str:
    """Return the metrics that lines show."""
    known = metrics if isinstance(metrics, Mapping) else {}
    found = [f"{key} {_score(key, known[key])}" for key in (*SHOWN, *OF_TARGETS) if key in known]
    return ", ".join(found) or "nothing to show"


def means_text(facts: Mapping[str, Any]) -> str:
    """Return over how many clients means are, and who is not among them; empty if unknown.

    ``facts`` are those of an event with scores, or a status.
    """
    scored, unscored = int(facts.get("scored") or 0), [*map(str, facts.get("unscored") or ())]
    if not scored:
        return ""
    without = f", without {some_text(unscored)}" if unscored else ""
    means = facts.get("means") or {}
    others = [f", {key} over {means[key]}" for key in SHOWN if means.get(key, scored) != scored]
    since = f"; {printable(str(facts['changed']))}" if facts.get("changed") else ""
    more = "".join([*others, without, since])
    return f" (mean over {scored} client{'' if scored == 1 else 's'}{more})"


def spent_text(privacy: Mapping[str, object]) -> str:
    """Return what was spent of the clients' privacy."""
    epsilon, delta = (number_text(privacy.get(key)) for key in ("epsilon", "delta"))
    if "epsilon_renyi" in privacy:
        epsilon += f" ({number_text(privacy['epsilon_renyi'])} by Renyi accounting)"
    releases = privacy.get("releases")  # of examples, each client counts its own
    counted = "" if releases is None else f", {number_text(releases)} releases"
    return f"epsilon {epsilon} at delta {delta}{counted}"


def _score(name: str, value: object) -> str:
    if isinstance(value, int | float) and metric(name).unit:
        return text_of(value, "percent")
    return number_text(value)


def number_text(value: object) -> str:
    """Return a number for a line; ``unknown`` where there is none."""
    return f"{value:.4g}" if isinstance(value, int | float) else "unknown"
