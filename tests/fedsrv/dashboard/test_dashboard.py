"""The live page: what it shows of a run, whom it answers, and what it never does."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fedmodels.errors import ArchiveError, ConfigError
from fedsrv.dashboard.clients import (
    MOST_CLIENTS,
    QUANTILES,
    ClientNow,
    few_of,
    phases_of,
    rows_of,
)
from fedsrv.dashboard.server import PAGE, page, page_server, serve_page, show
from fedsrv.dashboard.state import MOST_COLUMNS, MOST_POINTS, State, _cells, _curve, _of_few
from fedsrv.events import EventLog
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import tiny_experiment


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of a method whose clients mix each other's models."""
    out = tmp_path_factory.mktemp("dashboard") / "run"
    experiment = tiny_experiment(method={"name": "gldp"}, evaluate={"every": 1})
    (out / "summary.json").write_text(json.dumps(run_in_process(experiment, digits, out)))
    return out


@pytest.fixture
def going_on(run: Path) -> Iterator[tuple[EventLog, str]]:
    """Return the events and the address of a page whose run is told of."""
    events = EventLog()
    end = show(events, run, "127.0.0.1", 0)
    yield events, urlsplit(events._kept[0].detail["url"]).netloc
    end()


def asked(address: str, path: str = "/", method: str = "GET", **headers: str) -> Any:
    """Return status, headers and body of an answer."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def state_of(address: str) -> dict[str, Any]:
    status, _, body = asked(address, "/state.json")
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def test_committed_records_are_shown(going_on: Any, run: Path) -> None:
    _, address = going_on
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    found = state_of(address)
    assert found["finished"]
    assert found["interactions"] == len(rows)
    assert found["metrics"]["loss"][-1] == [rows[-1]["round"] + 1, rows[-1]["metrics"]["loss"]]
    sizes = [[row["interaction"] + 1, row["bytes"]["up"]] for row in rows]
    assert found["bytes"]["up"] == sizes
    views = rows[-1]["clients"]["0"]["views"]
    last = [cell for cell in found["tasks"]["after_local"] if cell[0] == len(rows)]
    assert [cell[1] for cell in last] == list(range(len(views["after_local"]["tasks"])))
    assert found["per_client"]["columns"]["down"].keys() == rows[-1]["clients"].keys()
    assert found["per_client"]["quantiles"] is None


def test_events_say_what_clients_do(going_on: Any) -> None:
    events, address = going_on
    place = {"interaction": 0, "round": 0}
    for client in ("0", "1"):
        events.tell("joined", client)
        events.tell("order", client, **place, order=1)
    events.tell("beat", "0", interaction=0, epoch=1, batch=2, loss=0.5)
    events.tell("upload", "1", **place)
    events.tell("commit", interaction=3, round=1, task=1, loss=0.5, of=8, bytes={}, seconds=1)
    events.tell("failed", "0", reason="<script>alert(1)</script>")
    events.tell("waiting", line="waiting for client 0", clients=["0"], seconds=3)
    found = until(address, lambda state: state["standing"]["waiting"])
    zero, one = found["clients"]
    assert (one["phase"], one["lag"], one["failures"]) == ("waits", 3, 0)
    assert (zero["phase"], zero["lag"]) == ("failed: <script>alert(1)</script>", None)
    assert found["standing"]["interactions"] == 8


def test_how_many_interactions_a_run_has_is_not_guessed(run: Path, tmp_path: Path) -> None:
    """A run that is gone on with has told nobody yet how many there are."""
    rows = (run / "rounds.jsonl").read_text()
    (tmp_path / "rounds.jsonl").write_text(rows)
    assert json.loads(State(tmp_path).to_json())["of"] == 0
    assert json.loads(State(run).to_json())["of"] == len(rows.splitlines())


def until(address: str, wanted: Any) -> dict[str, Any]:
    """Ask until a state is wanted: a thread of its own takes the events in."""
    for _ in range(1000):
        if wanted(found := state_of(address)):
            return found
    raise AssertionError(found)


def test_only_this_page_and_its_state_are_served(going_on: Any) -> None:
    _, address = going_on
    status, headers, body = asked(address)
    assert (status, body) == (200, PAGE.read_text())
    assert headers["Content-Security-Policy"].startswith(
        "default-src 'none'; frame-ancestors 'none';"
    )
    assert f"; script-src '{page()[1]}';" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(f"HEAD / HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
        head, _, body = b"".join(iter(lambda: line.recv(65536), b"")).partition(b"\r\n\r\n")
    assert f"Content-Length: {headers['Content-Length']}" in head.decode()
    assert (head.split()[1], body) == (b"200", b"")
    for path in ("/config.toml", "/../run.db", "/state.json?x", "*"):
        assert asked(address, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert asked(address, "/state.json", method)[0] == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:8080", 200), ("LOCALHOST:8", 200),
        ("evil.example", 421), ("localhost.evil.example:80", 421), ("", 421), ("127.0.0.1@x", 421),
        ("a:b:c", 421),
    ],
)  # fmt: skip
def test_a_name_that_points_here_is_not_answered(going_on: Any, host: str, status: int) -> None:
    """Else any site whose name is made to point to loopback could read the page."""
    for path in ("/", "/state.json"):
        assert asked(going_on[1], path, Host=host)[0] == status


def test_the_page_makes_no_markup_of_what_a_run_says() -> None:
    text = PAGE.read_text()
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http:/",
    ):
        assert way not in text.replace("http://www.w3.org/2000/svg", "")
    assert text.count("<script>") == text.count("</script>") == 1


def test_a_directory_that_is_no_run(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ArchiveError, match="is not a run directory"):
        serve_page([tmp_path / "none"], "127.0.0.1", 0, print)
    with pytest.raises(ConfigError, match="--serve shows one run"):
        serve_page([run, run], "127.0.0.1", 0, print)
    with (
        page_server("127.0.0.1", 0, State(run)) as server,
        pytest.raises(ConfigError, match=r"no page at 127\.0\.0\.1:\d+: "),
    ):
        page_server("127.0.0.1", server.server_port, State(run))
    with pytest.raises(ConfigError, match=r"no page at bü\.\.x:0: "):
        page_server("bü..x", 0, State(run))


def test_a_damaged_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text("nonsense\n")
    with page_server("127.0.0.1", 0, State(tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        status, _, body = asked(urlsplit(server.url).netloc, "/state.json")
        server.shutdown()
        thread.join()
    assert status == 503
    assert "rounds.jsonl line 1 is damaged" in body


def test_long_runs_are_thinned_out() -> None:
    curve = _curve(dict.fromkeys(range(10 * MOST_POINTS), 1.0))
    assert len(curve) == MOST_POINTS
    assert curve[-1][0] == 10 * MOST_POINTS - 1
    cells = _cells({(at, task): 1.0 for at in range(3 * MOST_POINTS) for task in (0, 1)})
    assert len(cells) == 2 * MOST_POINTS
    assert cells[-1] == (3 * MOST_POINTS - 1, 1, 1.0)


def test_of_many_clients_those_that_failed_or_spoke_last_have_rows() -> None:
    known = {str(c): ClientNow("waits", heard=float(c)) for c in range(10_000)}
    known["3"].failures = 1
    rows = rows_of(known, 0)
    assert [row["id"] for row in rows] == ["3", *map(str, range(10_001 - MOST_CLIENTS, 10_000))]
    assert phases_of(known) == {"waits": 10_000}
    figures = {"up": {c: float(c) for c in range(10_000)}, "accuracy": {9_999: 0.5}, "none": {}}
    found = few_of(figures, [row["id"] for row in rows])
    assert found["columns"]["up"].keys() == {row["id"] for row in rows}
    assert found["quantiles"]["up"]["median"] == 4999.5
    assert found["quantiles"]["accuracy"] == dict.fromkeys(QUANTILES, 0.5)
    assert "none" not in found["quantiles"]
    assert found["of"] == 10_000


def test_a_matrix_over_too_many_clients_is_not_sent() -> None:
    assert _of_few({(0, client): 1.0 for client in range(MOST_COLUMNS + 1)}) == []
    assert len(_of_few({(0, client): 1.0 for client in range(MOST_COLUMNS)})) == MOST_COLUMNS
