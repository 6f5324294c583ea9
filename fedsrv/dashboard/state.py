"""The state of a run as the live page needs it: from committed records, and from events."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmodels.log_lines import json_text
from fedmodels.numerics.metric_names import metric
from fedsrv.dashboard.clients import ClientNow, few_of, phases_of, rows_of
from fedsrv.events import Event
from fedsrv.narration import Pace, Standing
from fedsrv.report import quantities as q
from fedsrv.report.run_record import RunRecord, read_run

MOST_POINTS = 400
"""Points of a curve; of more, every n-th is sent."""
MOST_COLUMNS = 400
"""Clients in a matrix; one with more cannot be read, and is not sent."""
FRESH_S = 1.0
"""Records are read again after this time at the earliest."""


class State:
    """What is known of one run; safe between threads."""

    def __init__(self, run: Path) -> None:
        """Follow the run directory ``run``; events are added by :meth:`take`."""
        self.run = run
        self._lock = threading.Lock()
        self._standing, self._pace = Standing(), Pace()
        self._clients: dict[str, ClientNow] = {}
        self._read_at, self._size = 0.0, (-1, -1)
        self._committed: dict[str, Any] = {}

    def take(self, event: Event) -> None:
        """Take in one event."""
        with self._lock:
            self._standing.take(event)
            self._pace.take(event)
            if event.client:
                self._clients.setdefault(event.client, ClientNow()).take(event)

    def to_json(self) -> str:
        """Return the state as one JSON object.

        Raises:
            ArchiveError: the run directory is damaged.
        """
        with self._lock:
            self._read()
            rows = rows_of(self._clients, self._standing.interaction)
            found = {
                **self._committed,
                "standing": self._standing.to_dict(),
                "of": self._standing.interactions or self._in_all(),
                "seconds_left": self._pace.seconds_left(self._standing.interactions),
                "now": time.time(),
                "clients": rows,
                "phases": phases_of(self._clients),
                "per_client": few_of(
                    self._committed["per_client"], [*(row["id"] for row in rows), *self._clients]
                ),
            }
        return json_text(found)

    def _in_all(self) -> int:
        """Return how many interactions a finished run had; 0 of others: no record says so."""
        return int(self._committed["interactions"]) if self._committed["finished"] else 0

    def _read(self) -> None:
        """Read the records again where they have changed."""
        now = time.monotonic()
        if self._committed and now - self._read_at < FRESH_S:
            return
        self._read_at = now
        size = _size(self.run / "rounds.jsonl"), _size(self.run / "summary.json")
        if size != self._size:
            self._committed = committed(read_run(self.run))
            self._size = size


def committed(run: RunRecord) -> dict[str, Any]:
    """Return what committed records say, as values of JSON; curves by round or interaction."""
    matrices = q.weight_matrices(run)
    last = max(matrices, default=None)
    return {
        "title": run.title(),
        "finished": run.is_finished,
        "interactions": len(run.rows),
        "metrics": {name: _curve(q.metric_curve(run, name)) for name in q.metric_names(run)},
        "percentages": [name for name in q.metric_names(run) if metric(name).unit],
        "views": {view: _curve(q.view_curve(run, view)) for view in q.views_of(run)},
        "tasks": {view: _cells(q.task_accuracy(run, view)) for view in q.views_of(run)},
        "weights": None if last is None else {"at": last, "cells": _of_few(matrices[last])},
        "shares": _of_few(q.weight_vectors(run)),
        "bytes": {way: _curve(q.spent(run, "bytes", way)) for way in ("down", "up")},
        "per_client": {
            **{f"accuracy, {view}": q.client_accuracy(run, view) for view in q.views_of(run)},
            "training": q.seconds_of_client(run),
            "down": q.bytes_of_client(run, "down"),
            "up": q.bytes_of_client(run, "up"),
        },
    }


def _curve(values: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the points of a curve, thinned out where there are many; the last one stays."""
    points = sorted(values.items())
    step = -(-len(points) // MOST_POINTS) or 1
    return points[::-1][::step][::-1]


def _cells(values: Mapping[tuple[int, int], float]) -> list[tuple[int, int, float]]:
    """Return the cells of a matrix; of many rows, every n-th and the last."""
    rows = sorted({row for row, _ in values})
    kept = {row for row, _ in _curve(dict.fromkeys(rows, 0.0))}
    return [(row, column, value) for (row, column), value in sorted(values.items()) if row in kept]


def _of_few(values: Mapping[tuple[int, int], float]) -> list[tuple[int, int, float]]:
    """Return the cells of a matrix over clients; nothing where it has too many columns."""
    too_many = len({column for _, column in values}) > MOST_COLUMNS
    return [] if too_many else _cells(values)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
