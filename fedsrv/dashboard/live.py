"""The live page of a run: its status by events, charts of what is committed, and its server.

The page asks for itself again, and keeps the last state.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from http import HTTPStatus
from pathlib import Path

import jinja2
import numpy as np

from fedmodels.console.charts import Chart, Spread, svg
from fedmodels.console.printable import Unit, bytes_text, duration, json_text, printable, text_of
from fedmodels.errors import ConfigError, FedtideError
from fedmodels.host.guarded import Guarded
from fedmodels.host.http_server import POLICY, PageServer, Response
from fedmodels.numerics.metric_tables import metric
from fedmodels.times import FRESH_S, LAST_LOOK_S, WATCHED_S
from fedsrv.progress.events import Ending, Event, EventLog, Hear
from fedsrv.progress.run_status import (
    SHOWN,
    RunStatus,
    by_number,
    last_place,
    means_text,
    place_text,
)
from fedsrv.report import quantities as q
from fedsrv.report.comparison import one_column
from fedsrv.report.frame import group_runs
from fedsrv.report.page import template
from fedsrv.report.panels import (
    cells_of,
    lines_of_plugins,
    of_plugins,
    of_uploads,
    telling,
    unit_of,
    weights_of,
)
from fedsrv.report.quantities import view_name
from fedsrv.report.sites import sites_table
from fedsrv.report.table import Name, Table
from fedsrv.state.record import change_text
from fedsrv.state.run_record import RunRecord, read_run

log = logging.getLogger(__name__)
TEMPLATE = Path(__file__).with_name("live.html.j2")
MAX_MOVED = 8
"""Lines on data that moved."""
MAX_CLIENTS = 200
"""Clients that have a row of their own; of more, quantiles over all are shown besides."""
QUANTILES = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}
SHARE = 0.1
"""Records are read again after this time at the earliest, and reading them takes no more than this
share of it."""
Columns = Mapping[str, Mapping[int, float]]
DOES = ("doing", "heard", "behind", "failures")
"""Columns on what a client does now."""
FORMS = {"training": duration, "down": bytes_text, "up": bytes_text, "stood out": "{:.0f}".format,
         "mae": "{:.4g}".format}  # fmt: skip
"""How columns of the clients' table are written, by the first word; the others are percentages."""
OF_TARGETS = {"mae": "mae_of_mean", "r2": "", "pinball": "", "auroc": "",
              "average_precision": "base_rate"}  # fmt: skip
"""The figures of targets that have a chart, and that of answers that know nothing."""


class LivePage:
    """The page of one run; safe between threads."""

    _status: Guarded[RunStatus] = Guarded("_lock")
    _looks: Guarded[int] = Guarded("_lock")
    _last_look: Guarded[float] = Guarded("_lock")
    _next: Guarded[float] = Guarded("_lock")
    _sizes: Guarded[tuple[int, int]] = Guarded("_lock")
    _record: Guarded[RunRecord] = Guarded("_lock")
    _sites: Guarded[Table | None] = Guarded("_lock")
    _charts: Guarded[list[tuple[str, str]]] = Guarded("_lock")
    """Caption and drawing of each chart."""

    def __init__(self, run: Path) -> None:
        """Follow the run directory ``run``; events are added by :meth:`take`."""
        self.run = run
        self._lock = threading.Condition()
        self._status = RunStatus()
        self._looks, self._last_look = 0, -math.inf
        """How often the page was asked for, and when last."""
        self._next, self._sizes = 0.0, (-1, -1)
        self._sites, self._charts = None, []

    def take(self, event: Event) -> None:
        """Take in one event."""
        with self._lock:
            self._status.take(event)

    def to_json(self) -> str:
        """Return the status as one JSON object."""
        with self._lock:
            return json_text(self._status.to_dict())

    def html(self) -> str:
        """Return the whole page as it is now.

        Raises:
            ArchiveError: the run directory is damaged.
        """
        with self._lock:
            self._read()
            status, run = self._status, self._record
            table, told = clients_table(status, run, time.time())
            if self._sites:
                table = with_sites(table, self._sites)
            left = status.seconds_left
            of = "" if status.whole else " of this stage"  # the run has no last interaction
            self._looks, self._last_look = self._looks + 1, time.monotonic()
            self._lock.notify_all()
            return page_template().render(
                title=run.title(),
                finished=run.is_finished,
                place=self._place(),
                share=self._share(),
                left="" if run.is_finished or left is None else f"about {duration(left)} left{of}",
                status=status,
                is_known=run.is_finished or status.whole > 0,
                are_sites=self._sites is not None,
                charts=self._charts,
                moved=[printable(line) for line in lines_of_plugins(run)[:MAX_MOVED]],
                clients=table,
                told=told,
                metrics=one_column(run),
                over=over_text(run),
            )

    def await_last_look(self, within_s: float) -> None:
        """Wait until a page that is open has the state of this moment."""
        with self._lock:
            self._next, seen = 0.0, self._looks
            if time.monotonic() - self._last_look < WATCHED_S:
                self._lock.wait_for(lambda: self._looks > seen, within_s)

    def _place(self) -> str:
        """Return what is committed, by events; before any came, by the records."""
        if self._status.place or not self._record.rows:
            return self._status.place
        rows = self._record.rows
        return place_text(*last_place(rows), len(rows) if self._record.is_finished else 0)

    def _share(self) -> float:
        """Return how much of the run is done; how long it is, no record says."""
        of = self._status.interactions
        return 1.0 if self._record.is_finished else len(self._record.rows) / of if of else 0.0

    def _read(self) -> None:
        """Read the records again, and draw them, where they have changed."""
        now = time.monotonic()
        if now < self._next:
            return
        sizes = _size(self.run / "rounds.jsonl"), _size(self.run / "summary.json")
        if sizes != self._sizes:
            self._record = read_run(self.run)
            self._sites = sites_table(group_runs([self._record]))
            self._charts = [(c.caption, svg(c)) for c in telling(charts_of(self._record))]
            self._sizes = sizes
        took = time.monotonic() - now
        self._next = now + max(FRESH_S, took / SHARE)


def over_text(run: RunRecord) -> str:
    """Return over how many clients the last means are, and since when over others; empty before."""
    means = run.means
    changed = change_text(*run.population[-1]) if run.population else ""
    scored = means.get("a_loc") or max(means.values(), default=0)
    return means_text({"scored": scored, "means": means, "changed": changed}).strip(" ()")


def charts_of(run: RunRecord) -> Iterator[Chart]:
    """Yield charts of accuracies, loss, tasks, weights and bytes."""

    def whole(curve: Mapping[int, float]) -> dict[int, float]:
        """Return a curve by rounds without a round of which some tasks have not come yet."""
        return {at: value for at, value in curve.items() if at != run.open_round}

    named = dict[str, dict[int, float]]()
    for name in SHOWN:
        if (curve := whole(q.metric_curve(run, name))) not in named.values():
            named[metric(name).title] = curve
    yield _lines("Accuracy by round", named, "round", "accuracy", "percent")
    views = {view_name(view): whole(q.view_curve(run, view)) for view in q.views_of(run)}
    yield _lines("Accuracy by view", views, "round", "accuracy", "percent")
    for figure, beside in OF_TARGETS.items():
        lines = {view_name(v): whole(q.view_curve(run, v, figure)) for v in q.views_of(run)}
        if beside:
            known = (whole(q.view_curve(run, v, beside)) for v in q.views_of(run))
            lines[metric(beside).title] = next(filter(None, known), {})
        title = metric(figure).title
        yield _lines(f"{title[0].upper()}{title[1:]} by view", lines, "round", title,
                     unit_of(figure))  # fmt: skip
    yield _lines("Training loss", {"": whole(q.metric_curve(run, "loss"))}, "round", "loss")
    for view in q.views_of(run):
        if ":" not in view:  # by the usual rule of prediction
            cells = {(task, at): v for (at, task), v in q.task_accuracy(run, view).items()}
            text = f"Accuracy by task, {view_name(view)}"
            yield cells_of(text, cells, "interaction", "task", "percent")
    if matrices := q.weight_matrices(run):
        at = max(matrices)
        yield weights_of(f"Aggregation weights, interaction {at}", run, matrices[at])
    shares = {(client, at): weight for (at, client), weight in q.weight_vectors(run).items()}
    names = run.client_names
    yield cells_of("Who contributed", shares, "interaction", "client", y_names=names)
    yield from of_plugins(run)
    yield from of_uploads(run)
    moved = {way: q.spent(run, "bytes", way) for way in ("down", "up")}
    yield _lines("Bytes by interaction", moved, "interaction", "bytes", "bytes")


def _lines(caption: str, lines: Columns, x: str, y: str, unit: Unit = "") -> Chart:
    values = {
        label: {at: Spread(value) for at, value in line.items()}
        for label, line in lines.items()
        if line
    }
    return Chart(caption, "lines", values, x, y, unit)


def clients_table(status: RunStatus, run: RunRecord, now: float) -> tuple[Table, str]:
    """Return what each client does and how it fares, and a line on those who have no row.

    Of many clients, those that failed or were heard last have rows.
    """
    numbers = columns_of(run)
    known = dict(status.clients)
    spoke = heapq.nlargest(
        MAX_CLIENTS, known, key=lambda name: (known[name].failures > 0, known[name].heard)
    )
    everybody = list(
        dict.fromkeys([*spoke, *known, *(str(c) for column in numbers.values() for c in column)])
    )
    heads = [*DOES, *numbers]
    rows, cells = list[Name](), list[list[str]]()
    if len(everybody) > MAX_CLIENTS:
        for name, share in QUANTILES.items():
            values = [
                _form(head, float(np.quantile([*column.values()], share))) if column else ""
                for head, column in numbers.items()
            ]
            rows.append(Name(name, "of all"))
            cells.append(["", "", "", "", *values])
    for name in sorted(everybody[:MAX_CLIENTS], key=by_number):
        called = run.client_names.get(int(name), "") if name.isdecimal() else ""
        rows.append(Name(name, called))
        cells.append([*_doing(status, name, run.is_finished, now), *_numbers(numbers, name)])
    table = Table([*map(Name, heads)], rows, cells, corner="client")
    if len(everybody) <= MAX_CLIENTS:
        return table, ""
    phases = Counter(client.phase for client in known.values()).most_common()
    counts = ", ".join(f"{count} {phase}" for phase, count in phases)
    told = f"{MAX_CLIENTS} of {len(everybody)} clients: those that failed, then those heard last"
    return table, f"{told}. All: {counts}" if counts else told


def with_sites(clients: Table, sites: Table) -> Table:
    """Return the table of clients with what each has as a site in place of its accuracies."""
    own = {name.text: cells for name, cells in zip(sites.rows, sites.cells, strict=True)}
    none = ["–"] * len(sites.columns)
    heads = [name.text for name in clients.columns]
    does = [at for at, head in enumerate(heads) if head in DOES]
    costs = [at for at, head in enumerate(heads) if head in FORMS]
    cells = [
        [
            *(row[at] for at in does),
            *own.get(f"client {name.note or name.text}", none),
            *(row[at] for at in costs),
        ]
        for name, row in zip(clients.rows, clients.cells, strict=True)
    ]
    columns = [*(clients.columns[at] for at in does), *sites.columns]
    columns += [clients.columns[at] for at in costs]
    return Table(columns, clients.rows, cells, captions=sites.captions, corner="site")


def columns_of(run: RunRecord) -> Columns:
    """Return numbers of clients by the heading of their column; those without any are left out."""
    views = [view for view in q.views_of(run) if ":" not in view]
    found: Columns = {
        **{view_name(view): q.client_accuracy(run, view) for view in views},
        **{
            f"{figure} {view_name(view)}": q.client_accuracy(run, view, figure)
            for figure in ("mae", "auroc")
            for view in views
        },
        "training": q.seconds_of_client(run),
        "down": q.bytes_of_client(run, "down"),
        "up": q.bytes_of_client(run, "up"),
        "stood out": q.warnings_of_client(run),
    }
    return {head: column for head, column in found.items() if column}


def _doing(status: RunStatus, name: str, finished: bool, now: float) -> list[str]:
    client = status.clients.get(name)
    if client is None or finished:
        failures = str(client.failures) if client else ""
        return ["finished" if finished else "not heard of", "", "", failures]
    lag = client.lag(status.interaction)
    heard = f"{duration(max(now - client.heard, 0))} ago"
    if name in status.here:  # its call is open: silence is rest
        heard = "connected"
    return [str(client), heard, "" if lag is None else str(lag), str(client.failures)]


def _numbers(columns: Columns, name: str) -> list[str]:
    found = [
        (head, column.get(int(name)) if name.isdecimal() else None)
        for head, column in columns.items()
    ]
    return ["" if value is None else _form(head, value) for head, value in found]


def _form(head: str, value: float) -> str:
    form = FORMS.get(head) or FORMS.get(head.partition(" ")[0])
    return form(value) if form else text_of(value, "percent")


@cache
def page_template() -> jinja2.Template:
    """Return the template of the page, which holds its one script."""
    return template(TEMPLATE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def page_server(
    host: str, port: int, shown: Mapping[str, LivePage], names: tuple[str, ...] = ()
) -> PageServer:
    """Return a server of the live pages of runs, each at its path: ``/`` of one run alone.

    Raises:
        ConfigError: the place cannot be used.
    """

    def answer(path: str, content: Callable[[LivePage], str], kind: str) -> Response:
        if (page := shown.get(path)) is None:
            return Response(b"the queue has no such run under way", status=HTTPStatus.NOT_FOUND)
        try:
            return Response(content(page).encode(), f"{kind}; charset=utf-8")
        except FedtideError as error:
            line = printable(str(error)).encode()
            return Response(line, status=HTTPStatus.SERVICE_UNAVAILABLE)

    def first(accept: str) -> Response:
        if "/" in shown:
            return answer("/", LivePage.html, "text/html")
        links = (f'<li><a href="{p}">{p.strip("/")}</a></li>' for p in map(escape, [*shown]))
        body = f"<!doctype html><title>runs of a queue</title><ul>{''.join(links)}</ul>"
        return Response(body.encode(), "text/html; charset=utf-8")

    def json_of(accept: str, run: str = "") -> Response:
        return answer(f"/{run}/" if run else "/", LivePage.to_json, "application/json")

    answers: dict[str, Callable[..., Response]] = {
        "/": first,
        "/state.json": json_of,
        "/{run}/": lambda accept, run: answer(f"/{run}/", LivePage.html, "text/html"),
        "/{run}/state.json": json_of,
    }
    allowed = (
        f"script-src '{script()}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    )
    return PageServer(host, port, answers, f"{POLICY}; {allowed}", names)


def show_several(
    host: str, port: int, allowed_hosts: tuple[str, ...] = ()
) -> tuple[Callable[[str, Path | None], Hear], Ending]:
    """Serve the live pages of a queue's runs, each at ``/NAME/``; return what follows a run.

    Raises:
        ConfigError: the place cannot be used.
    """
    pages = dict[str, LivePage]()
    server = page_server(host, port, pages, allowed_hosts)
    log.info("live pages: %s", server.url)

    def follow(name: str, run: Path | None) -> Hear:
        if run is None:
            pages.pop(f"/{name}/", None)
            return lambda event: None
        pages[f"/{name}/"] = page = LivePage(run)
        return page.take

    return follow, server.begin("dashboard")


@cache
def script() -> str:
    """Return the digest of the page's script, which alone may run."""
    source = TEMPLATE.read_bytes().split(b"<script>", 1)[1].split(b"</script>", 1)[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(source).digest()).decode()}"


def show(
    events: EventLog, run: Path, host: str, port: int, allowed_hosts: tuple[str, ...] = ()
) -> Ending:
    """Serve the live page of a run that goes on; return what ends that.

    Raises:
        ConfigError: the place cannot be used.
    """
    page = LivePage(run)
    server = page_server(host, port, {"/": page}, allowed_hosts)
    events.tell("dashboard", url=server.url)
    end_telling = events.follow(page.take, "dashboard")
    stop = server.begin("dashboard")

    def end() -> None:
        end_telling()
        page.await_last_look(LAST_LOOK_S)
        stop()

    return end


def serve_page(runs: Sequence[Path], host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of one run directory until Ctrl-C.

    Raises:
        ConfigError: there is not one run, or nothing can listen there.
        ArchiveError: the directory is no run's, or damaged.
    """
    if len(runs) != 1:
        raise ConfigError("--serve shows one run; name one directory")
    read_run(runs[0])
    server = page_server(host, port, {"/": LivePage(runs[0])})
    say(f"live page: {server.url} (Ctrl-C ends it)")
    server.serve()
