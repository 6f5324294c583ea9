"""The live page of a run: the page itself, and the state that the page asks for again and again."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path

from fedmodels.errors import ConfigError, FedtideError
from fedmodels.printable import printable
from fedsrv.dashboard.state import State
from fedsrv.events import Ending, EventLog
from fedsrv.monitor.page_server import POLICY, Answer, PageServer
from fedsrv.report.run_record import read_run

PAGE = Path(__file__).with_name("page.html")


def page_server(host: str, port: int, state: State) -> PageServer:
    """Return a server of a run's live page.

    Raises:
        ConfigError: the place cannot be used.
    """
    content, script = page()

    def answer(accept: str) -> Answer:
        try:
            return Answer(state.to_json().encode(), "application/json; charset=utf-8")
        except FedtideError as error:
            line = printable(str(error)).encode()
            return Answer(line, status=HTTPStatus.SERVICE_UNAVAILABLE)

    pages = {
        "/": lambda accept: Answer(content, "text/html; charset=utf-8"),
        "/state.json": answer,
    }
    allowed = f"script-src '{script}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    return PageServer(host, port, pages, f"{POLICY}; {allowed}")


@cache
def page() -> tuple[bytes, str]:
    """Return the page, and the digest of its script, which alone may run."""
    content = PAGE.read_bytes()
    script = content.split(b"<script>", 1)[1].split(b"</script>", 1)[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return content, f"sha256-{digest}"


def show(events: EventLog, run: Path, host: str, port: int) -> Ending:
    """Serve the live page of a run that goes on; return what ends that.

    Raises:
        ConfigError: the place cannot be used.
    """
    state = State(run)
    server = page_server(host, port, state)
    events.tell("dashboard", url=server.url)
    events.follow(state.take, "dashboard")
    stop = server.begin("dashboard")

    def end() -> None:
        events.close()
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
    with page_server(host, port, State(runs[0])) as server:
        say(f"live page: {server.url} (Ctrl-C ends it)")
        server.serve_forever()
