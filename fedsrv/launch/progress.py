"""What a launched run shows while it goes on: a live display, plain lines, or objects."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedmodels.console.printable import printable
from fedmodels.tensors.bundle import EVALUATOR
from fedsrv.progress.event_lines import FREQUENT, EventFormatter, level_of
from fedsrv.progress.events import DONE, Event
from fedsrv.progress.run_status import RunStatus, by_number, scores_text
from fedsrv.report.tables import final_table
from fedsrv.state.run_record import RunRecord

MAX_CLIENTS = 16
"""Clients shown by name; the others are counted."""


class PlainLines:
    """Says what happens in a run in plain lines."""

    def __init__(self, console: Console | None = None, level: int = logging.INFO) -> None:
        self.console, self.level = console or Console(), level
        self.formatter = EventFormatter()
        self.done: set[str] = set()
        """The clients that left because the run is over; :meth:`__exit__` counts them."""

    def __enter__(self) -> PlainLines:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End; say how many clients left a run that is over."""
        clients = len(self.done - {EVALUATOR})
        who = [f"{clients} client{'' if clients == 1 else 's'}"] if clients else []
        who += ["the evaluator"] if EVALUATOR in self.done else []
        if who:
            self.say(f"the run is over: {' and '.join(who)} left")

    @property
    def status(self) -> RunStatus:
        """Return where the run stands."""
        return self.formatter.status

    def take(self, event: Event) -> str:
        """Take in one event of the coordinator, say it where it matters enough; return the line.

        The line of a frequent event that is not said is empty.
        """
        if event.kind in FREQUENT and self.level > logging.DEBUG:  # no line of it is shown
            self.status.take(event)
            return ""
        known = self.status.joined
        line = self.formatter.line(event)
        if event.kind == "left" and event.detail.get("reason") == DONE:
            self.done.add(event.client)
        elif level_of(event) >= self.level and not self._is_one_of_many(known):
            self.say(line, level_of(event))
        return line

    def _is_one_of_many(self, known: int) -> bool:
        """Tell whether the event was a join that needs no line: a large run says each tenth part.

        ``known`` clients had joined before the event.
        """
        now, of = self.status.joined, self.status.expected
        return now > known and of > MAX_CLIENTS and 10 * now // of == 10 * known // of

    def say(self, line: str, level: int = logging.INFO) -> None:
        """Say a line, where it matters enough."""
        if level >= self.level:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def end(self, record: RunRecord) -> None:
        """Show a finished run's table."""
        if self.level <= logging.INFO:
            self.console.print(final_table(record))
            self.say(f"state digest: {record.summary.get('state_sha256')}")

    def say_page(self, page: Path) -> None:
        """Say where the page of a finished run is."""
        self.say(f"report: {page}")


class GivenLines(PlainLines):
    """Hands the plain lines to a function."""

    def __init__(self, give: Callable[[str], None]) -> None:
        super().__init__()
        self._give = give

    def say(self, line: str, level: int = logging.INFO) -> None:
        """Hand over a line, where it matters enough."""
        if level >= self.level:
            self._give(line)


class JsonProgress(PlainLines):
    """Says it as one JSON object a line, with the fields of an event."""

    def __exit__(self, *_: object) -> None:
        """End; every client that left had an object of its own."""

    def take(self, event: Event) -> str:
        """Print an event that matters enough; return it."""
        if level_of(event) >= self.level:
            self._print(event)
        return event.to_json()

    def say(self, line: str, level: int = logging.INFO) -> None:
        """Print a line of the launcher."""
        if level >= self.level:
            self._print(Event("launcher", detail={"line": line}, unix_time=time.time()))

    def end(self, record: RunRecord) -> None:
        """Print no table: the run's summary holds the same."""

    def say_page(self, page: Path) -> None:
        """Print where the page of a finished run is."""
        if self.level <= logging.INFO:
            self._print(Event("report", detail={"path": str(page)}, unix_time=time.time()))

    def _print(self, event: Event) -> None:
        self.console.file.write(event.to_json() + "\n")
        self.console.file.flush()


class Display(PlainLines):
    """Rounds and clients of a run on a terminal; lines that matter stand above them."""

    def __init__(
        self, title: str, console: Console | None = None, *, bar_alone: bool = False
    ) -> None:
        """Show nothing yet; with ``bar_alone``, one line holds all that is shown."""
        super().__init__(console, logging.WARNING)
        self._bar_alone = bar_alone
        self.last = ""
        """The last line that told of progress."""
        self._named: list[str] = []
        """The first clients by number; sorting all of them at each event would take too long."""
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=self.console,
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=None)
        self._live = Live(console=self.console, refresh_per_second=1 if bar_alone else 4)

    def __enter__(self) -> Display:
        """Begin showing."""
        self._live.start()
        self._live.update(self._render())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop showing."""
        self._live.update(self._bar)
        self._live.stop()

    def take(self, event: Event) -> str:
        """Take in one event of the coordinator; return its line."""
        if event.client and event.client not in self.status.clients:
            self._named = sorted([*self._named, event.client], key=by_number)[:MAX_CLIENTS]
        line, status = super().take(event), self.status
        if event.kind in ("commit", "listening"):
            self.last = line
        elif event.kind == "launcher":
            self.last = printable(str(event.detail.get("line", "")))
        elif event.kind in ("metrics", "dashboard", "forecast"):
            self.say(line)
        if event.kind == "commit":
            done = status.interaction + 1
            self._bar.update(self._task, total=status.interactions or None, completed=done)
        self._live.update(self._render())
        return line

    def say(self, line: str, level: int = logging.WARNING) -> None:
        """Print a line above the display."""
        super().say(line, level)

    def end(self, record: RunRecord) -> None:
        """Show a finished run's table."""
        self.level = logging.INFO
        super().end(record)

    def _render(self) -> Group:
        if self._bar_alone:
            return Group(self._bar)
        status, table = self.status, Table.grid(padding=(0, 2))
        for name in self._named:
            table.add_row(Text(f"client {name}"), Text(str(status.clients[name])))
        if len(status.clients) > MAX_CLIENTS:
            table.add_row(f"and {len(status.clients) - MAX_CLIENTS} more", "")
        if status.work:
            table.add_row("server", Text(status.work))
        scores = scores_text(status.metrics) if status.metrics else ""
        return Group(self._bar, Text(self.last), Text(scores), table)


def live_display(title: str) -> Display | None:
    """Return a live display where there is a terminal or a notebook; None elsewhere.

    A notebook without widgets writes a line anew, but goes back to none above it.
    """
    console = Console()
    if console.is_jupyter:
        plain = Console(force_jupyter=False, force_terminal=True, color_system=None)
        return Display(title, plain, bar_alone=True)
    return Display(title, console) if console.is_terminal else None


def display_of(title: str, level: int, *, as_json: bool = False) -> PlainLines:
    """Return what shows a run: objects, lines, or a live display where there is a terminal."""
    console = Console()
    if as_json:
        return JsonProgress(console, level)
    if console.is_terminal and level == logging.INFO:
        return Display(title, console)
    return PlainLines(console, level)
