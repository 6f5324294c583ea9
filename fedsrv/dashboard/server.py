"""The server of a run's live page, which asks for itself again and keeps the last state."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path

from fedmodels.errors import ConfigError, FedtideError
from fedmodels.page_server import POLICY, Answer, PageServer
from fedmodels.printable import printable
from fedsrv.dashboard.live import TEMPLATE, LivePage
from fedsrv.events import Ending, EventLog
from fedsrv.report.run_record import read_run

LAST_LOOK_S = 3.0
"""Time for a page that is open to ask for the last state of a run that has ended."""


def page_server(host: str, port: int, page: LivePage) -> PageServer:
    """Return a server of a run's live page.

    Raises:
        ConfigError: the place cannot be used.
    """

    def answer(content: Callable[[], str], kind: str) -> Answer:
        try:
            return Answer(content().encode(), f"{kind}; charset=utf-8")
        except FedtideError as error:
            line = printable(str(error)).encode()
            return Answer(line, status=HTTPStatus.SERVICE_UNAVAILABLE)

    pages = {
        "/": lambda accept: answer(page.html, "text/html"),
        "/state.json": lambda accept: answer(page.to_json, "application/json"),
    }
    allowed = (
        f"script-src '{script()}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    )
    return PageServer(host, port, pages, f"{POLICY}; {allowed}")


@cache
def script() -> str:
    """Return the digest of the page's script, which alone may run."""
    source = TEMPLATE.read_bytes().split(b"<script>", 1)[1].split(b"</script>", 1)[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(source).digest()).decode()}"


def show(events: EventLog, run: Path, host: str, port: int) -> Ending:
    """Serve the live page of a run that goes on; return what ends that.

    Raises:
        ConfigError: the place cannot be used.
    """
    page = LivePage(run)
    server = page_server(host, port, page)
    events.tell("dashboard", url=server.url)
    told = events.follow(page.take, "dashboard")
    stop = server.begin("dashboard")

    def end() -> None:
        events.close()
        told.join()
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
    with page_server(host, port, LivePage(runs[0])) as server:
        say(f"live page: {server.url} (Ctrl-C ends it)")
        server.serve_forever()
