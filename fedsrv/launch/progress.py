"""What a launched run shows while it goes on: a live display, or plain lines without a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedmodels.printable import printable

MOST_CLIENTS = 16
"""Clients shown by name; the others are counted."""
_SHOWN = ("a_glo", "a_loc", "a_sel", "global_acc")


class Display:
    """Rounds and clients of a run, as events tell them."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.console = console or Console()
        self.clients: dict[str, str] = {}
        self.metrics: dict[str, float] = {}
        self.work = ""
        """What the server half does, while that takes long."""
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=self.console,
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=None)
        self._live: Live | None = None

    def __enter__(self) -> Display:
        """Begin showing, where there is a terminal."""
        if self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop showing."""
        if self._live is not None:
            self._live.update(self._bar)
            self._live.stop()

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the coordinator."""
        kind, client, detail = event["kind"], event.get("client", ""), event.get("detail", {})
        if kind == "beat":
            loss = f"{detail['loss']:.3f}"
            self.clients[client] = f"epoch {detail['epoch']}, batch {detail['batch']}, loss {loss}"
        elif kind in ("joined", "upload", "left"):
            self.clients[client] = {"upload": "waits"}.get(kind, kind)
        elif kind == "order":
            self.clients[client] = {1: "trains", 2: "scores", 3: "finishes"}[detail["order"]]
        elif kind == "failed":
            reason = printable(detail["reason"])
            self.clients[client] = f"failed: {reason}"
            self.say(f"client {client} failed: {reason}")
        elif kind == "waiting":
            self.say(printable(detail["line"]))
        elif kind == "server":
            self.work = f"{printable(detail['work'])}, step {detail['step']} of {detail['of']}"
        elif kind == "rollback":
            self.say(f"rolling back: {printable(detail['reason'])}")
        elif kind == "started-over":
            self.say(f"client {client} goes on from its initial private state")
        elif kind == "commit":
            self.work = ""
            self._bar.update(self._task, total=detail["of"], completed=event["interaction"] + 1)
        elif kind == "scores":
            self._scores(event["round"], detail["metrics"])
        if self._live is not None:
            self._live.update(self._render())

    def say(self, line: str) -> None:
        """Print a line above the display."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _scores(self, round: int, metrics: Mapping[str, float]) -> None:
        self.metrics = {key: metrics[key] for key in _SHOWN if key in metrics}
        if self._live is None and ("a_glo" in metrics or "a_loc" in metrics):
            shown = ", ".join(f"{key} {100 * value:.2f} %" for key, value in self.metrics.items())
            self.say(f"round {round}: loss {metrics.get('loss', float('nan')):.4f}, {shown}")

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for client in sorted(self.clients, key=lambda c: (len(c), c))[:MOST_CLIENTS]:
            table.add_row(Text(f"client {client}"), Text(self.clients[client]))
        if len(self.clients) > MOST_CLIENTS:
            table.add_row(f"and {len(self.clients) - MOST_CLIENTS} more", "")
        if self.work:
            table.add_row("server", self.work)
        scores = "   ".join(f"{key} {100 * value:.2f} %" for key, value in self.metrics.items())
        return Group(self._bar, scores, table)
