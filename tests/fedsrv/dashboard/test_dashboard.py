"""The live page: what it shows of a run, whom it answers, and what it never does."""

from __future__ import annotations

import base64
import hashlib
import html
import http.client
import json
import re
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fedmodels.console.charts import svg
from fedmodels.console.printable import bytes_text
from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.numerics.metric_tables import metric
from fedsrv.dashboard.live import (
    MAX_CLIENTS,
    QUANTILES,
    TEMPLATE,
    LivePage,
    charts_of,
    clients_table,
    page_server,
    script,
    serve_page,
    show,
    show_several,
)
from fedsrv.progress.events import Event, EventLog
from fedsrv.progress.run_status import ClientStatus, RunStatus
from fedsrv.state.run_record import read_run
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import tiny_experiment
from tests.conftest import records_of


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of a method whose clients mix each other's models."""
    out = tmp_path_factory.mktemp("dashboard") / "run"
    experiment = tiny_experiment(method={"name": "gldp", "t": 1, "s": 1}, evaluate={"every": 1})
    (out / "summary.json").write_text(json.dumps(run_in_process(experiment, digits, out)))
    return out


@pytest.fixture
def going_on(run: Path) -> Iterator[tuple[EventLog, str]]:
    """Return the events and the address of a page whose run is told of."""
    events = EventLog()
    end = show(events, run, "127.0.0.1", 0, ("*.svc.example",))
    yield events, urlsplit(events._kept[0].detail["url"]).netloc
    end()


def asked(address: str, path: str = "/", method: str = "GET", **headers: str) -> Any:
    """Return status, headers and body of an answer."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def page_of(address: str) -> str:
    status, _, body = asked(address)
    assert status == 200, body
    return html.unescape(body)


def until(address: str, wanted: str) -> str:
    """Ask until the page says something: a thread of its own takes the events in."""
    for _ in range(1000):
        if wanted in (found := page_of(address)):
            return found
    raise AssertionError(found)


@pytest.mark.parametrize("damaged", [{"round": None}, {"round": "x", "task": "y"}])
def test_the_place_of_a_damaged_record_is_shown(run, tmp_path, damaged):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    *rows, last = records_of(run)
    lines = [json.dumps(row) + "\n" for row in (*rows, {**last, **damaged})]
    (tmp_path / "rounds.jsonl").write_text("".join(lines))
    place = RunStatus.of_directory(tmp_path).place
    assert place.startswith(f"interaction {len(lines)} of {len(lines)}: round 1, task ")
    assert f"<p>{place} · finished</p>" in html.unescape(LivePage(tmp_path).html())


def test_committed_records_are_shown(going_on, run):
    _, address = going_on
    rows = records_of(run)
    found = page_of(address)
    last = rows[-1]
    place = (
        f"interaction {len(rows)} of {len(rows)}: round {last['round'] + 1}, task {last['task']}"
    )
    assert f"<p>{place} · finished</p>" in found
    assert "<main data-finished>" in found
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", found)
    assert captions[:3] == ["Accuracy by round", "Accuracy by view", "Training loss"]
    assert "Accuracy by task, after local training" in captions
    label = re.escape(metric("a_loc").label)
    assert re.search(rf">{label}\s*<small>chance .*?</small></th>", found)
    up = sum(row["bytes"]["per_client"]["0"]["up"] for row in rows)
    assert f"<td>{bytes_text(up)}</td>" in found


def test_events_say_what_clients_do(going_on):
    events, address = going_on
    place = {"interaction": 0, "round": 0}
    for client in ("0", "1"):
        events.tell("joined", client)
        events.tell("order", client, **place, order=1)
    events.tell("beat", "0", interaction=0, epoch=1, batch=2)
    events.tell("upload", "1", **place)
    events.tell("commit", interaction=3, round=1, task=1, loss=0.5, of=8, bytes={}, seconds=1)
    events.tell("failed", "0", reason="<script>alert(1)</script>")
    while (found := json.loads(asked(address, "/state.json")[2]))["interaction"] < 3:
        pass
    zero, one = found["clients"]["0"], found["clients"]["1"]
    assert (one["phase"], one["lag"], one["failures"]) == ("waits", 3, 0)
    assert (zero["phase"], zero["lag"]) in (("trains", None), ("failed", None))
    assert found["interactions"] == 8


def test_what_a_run_says_stays_text_and_its_start_is_no_alarm(run, tmp_path):
    """A run that is gone on with has told nobody yet how many interactions there are."""
    (tmp_path / "rounds.jsonl").write_text((run / "rounds.jsonl").read_text())
    page = LivePage(tmp_path)
    rows = len((run / "rounds.jsonl").read_text().splitlines())
    assert f"<p>interaction {rows}: round " in page.html()
    forged = "<script>alert(1)</script>"
    page.take(Event("joined", "0", unix_time=time.time()))
    page.take(Event("failed", "0", detail={"reason": forged}, unix_time=time.time()))
    page.take(Event("waiting", detail={"line": f"waiting for client 1 {forged}"}))
    found = page.html()
    assert found.count("<script") == 1
    assert '<p class="soft" role="status">waiting for client 1 &lt;script&gt;' in found
    assert "<td>failed: &lt;script&gt;alert(1)&lt;/script&gt;</td>" in found
    assert 'class="grave"' not in found


def test_there_is_no_bar_where_nothing_says_how_long_a_run_is(run, tmp_path):
    """The page of a directory had an empty bar, and the time of a stage was that of the run."""
    lines = (run / "rounds.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    (tmp_path / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    page = LivePage(tmp_path)
    assert "<progress" not in page.html()
    page.take(Event("commit", "", 0, 0, {"of": 8}, unix_time=0.0))
    assert "<progress" in page.html()
    rows[-1]["clients"] = {"0": {"task": 2}}
    (tmp_path / "rounds.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = LivePage(tmp_path)
    assert "<progress" not in page.html()
    for number in range(2):
        facts = {"of": 8, "open": True}
        page.take(Event("commit", "", number, number, facts, unix_time=10.0 * number))
    assert " · about 1 min 0 s left of this stage</p>" in page.html()
    assert "<progress" not in page.html()


def test_the_last_state_stays_when_a_run_ends(run):
    """An open page gets the state after the last event, and nobody waits for a closed one."""
    page = LivePage(run)
    began = time.monotonic()
    page.await_last_look(60.0)
    assert time.monotonic() - began < 30, "nobody looked"
    page.html()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(page.await_last_look, 60.0)
        while not page._lock._waiters:  # type: ignore[attr-defined]
            pass
        assert not waiting.done()
        page.html()
        waiting.result(30)
    assert "this is its last state" in TEMPLATE.read_text()


def test_only_this_page_and_its_state_are_served(going_on):
    _, address = going_on
    status, headers, body = asked(address)
    assert (status, body[:20]) == (200, "<!doctype html>\n<htm")
    assert headers["Content-Security-Policy"].startswith(
        "default-src 'none'; frame-ancestors 'none';"
    )
    assert f"; script-src '{script()}';" in headers["Content-Security-Policy"]
    source = body.split("<script>", 1)[1].split("</script>", 1)[0].encode()
    assert base64.b64encode(hashlib.sha256(source).digest()).decode() in script()
    assert headers["X-Content-Type-Options"] == "nosniff"
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(f"HEAD / HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
        head, _, body = b"".join(iter(lambda: line.recv(65536), b"")).partition(b"\r\n\r\n")
    assert f"content-length: {headers['Content-Length']}" in head.decode()
    assert (head.split()[1], body) == (b"200", b"")
    for path in ("/config.toml", "/../run.db", "/state.json/x", "*"):
        assert asked(address, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert asked(address, "/state.json", method)[0] == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:8080", 200), ("LOCALHOST:8", 200),
        ("evil.example", 421), ("localhost.evil.example:80", 421), ("", 421), ("127.0.0.1@x", 421),
        ("a:b:c", 421), ("run.svc.example:80", 200),
    ],
)  # fmt: skip
def test_a_name_that_points_here_is_not_answered(going_on, host, status):
    """Else any site whose name is made to point to loopback could read the page."""
    for path in ("/", "/state.json"):
        assert asked(going_on[1], path, Host=host)[0] == status


def test_the_page_runs_nothing_that_a_run_says():
    text = TEMPLATE.read_text()
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http:/",
    ):
        assert way not in text
    assert text.count("<script>") == text.count("</script>") == 1
    assert text.count("safe }}") == 1, "charts alone, which escape their texts themselves"


def test_a_directory_that_is_no_run(tmp_path, run):
    with pytest.raises(ArchiveError, match="is not a run directory"):
        serve_page([tmp_path / "none"], "127.0.0.1", 0, print)
    with pytest.raises(ConfigError, match="--serve shows one run"):
        serve_page([run, run], "127.0.0.1", 0, print)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"no page at 127\.0\.0\.1:\d+: "),
    ):
        page_server("127.0.0.1", taken.getsockname()[1], {"/": LivePage(run)})
    with pytest.raises(ConfigError, match=r"no page at bü\.\.x:0: "):
        page_server("bü..x", 0, {"/": LivePage(run)})


def test_a_damaged_run_is_one_line(tmp_path):
    (tmp_path / "rounds.jsonl").write_text("nonsense\n")
    server = page_server("127.0.0.1", 0, {"/": LivePage(tmp_path)})
    end = server.begin("page")
    status, _, body = asked(urlsplit(server.url).netloc)
    end()
    assert status == 503
    assert "rounds.jsonl line 1 is damaged" in body


def test_an_accuracy_map_of_many_interactions_has_a_row_for_each_task(tmp_path):
    rows = [
        {
            **{"interaction": at, "round": at, "task": at // 60},
            "clients": {"0": {"views": {"global": {"accuracy": 0.5, "tasks": [at / 120, 0.25]}}}},
        }
        for at in range(120)
    ]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = {chart.caption: chart for chart in charts_of(read_run(tmp_path))}
    chart = charts["Accuracy by task, global model"]
    assert {row for row, _ in chart.cells} == {0, 1}
    assert {column for _, column in chart.cells} == set(range(1, 121))
    found = svg(chart)
    ticks = [text for text in re.findall(r">(\d+)</text>", found) if int(text) > 1]
    assert len(ticks) <= 12, "of 120 interactions"


def test_a_round_that_goes_on_is_in_no_curve_by_rounds(tmp_path):
    """Its first task's clients alone would look like a leap of everybody."""
    rows = [{"interaction": at, "round": at // 2, "metrics": {"a_loc": at / 10}} for at in range(5)]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (chart,) = [c for c in charts_of(read_run(tmp_path)) if c.caption == "Accuracy by round"]
    (line,) = chart.values.values()
    assert {at: spread.mean for at, spread in line.items()} == {1: 0.1, 2: 0.3}
    (tmp_path / "summary.json").write_text('{"rounds": 3}')
    (chart, *_) = charts_of(read_run(tmp_path))
    assert [max(line) for line in chart.values.values()] == [3]


def test_figures_of_targets_have_charts_and_columns_beside_who_knows_nothing(tmp_path):
    rows = [
        {"round": at, "clients": {"0": {"views": {"global": {
            "loss": 1.0, "mae": 9.0 - at, "mae_of_mean": 20.0, "r2": 0.1 * at, "rmse": 3.0}}}}}
        for at in range(2)
    ]  # fmt: skip
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    found = {chart.caption: chart for chart in charts_of(run)}
    lines = found["Mean absolute error by view"].values
    assert {name: {at: each.mean for at, each in line.items()} for name, line in lines.items()} == {
        "global model": {1: 9.0, 2: 8.0},
        "mean absolute error of the mean predictor": {1: 20.0, 2: 20.0},
    }
    assert found["R² by view"].values["global model"][2].mean == 0.1
    assert not found["Area under the ROC curve by view"].values
    table, _ = clients_table(RunStatus(), run, 0.0)
    assert dict(zip([c.text for c in table.columns], table.cells[0], strict=True))[
        "mae global model"
    ] == "8"  # fmt: skip


def test_a_run_on_own_data_has_one_table_of_sites(tmp_path):
    """State, accuracy, recall and live model of a site stood in two tables."""
    views = {"global": {"accuracy": 0.75, "classes": [0.5, 1.0]}}
    row = {
        "round": 0,
        "metrics": {"a_loc": 0.75},
        "clients": {"0": {"views": views}, "1": {"views": views}},
    }
    (tmp_path / "rounds.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "data.json").write_text(
        json.dumps({"clients": {"1": "Ost"}, "classes": ["a", "b"]})
    )
    (tmp_path / "clients/1/model").mkdir(parents=True)
    (tmp_path / "clients/1/model/status.json").write_text('{"last": "live is round 1"}')
    page = LivePage(tmp_path)
    page.take(Event("joined", "1"))
    page.take(Event("note", detail={"line": "of the guard"}))
    found = html.unescape(page.html())
    assert "<h2>Sites</h2>" in found
    assert len(re.findall(r'<th scope="row">(?:0|1 <small>Ost</small>)</th>', found)) == 2
    ost = found.partition("<small>Ost</small>")[2].partition("</tr>")[0]
    assert [cell in ost for cell in ("75.0", "50.0", "100.0", "live is round 1")] == [True] * 4
    before, _, after = found.partition("<details><summary>1 note</summary>")
    assert "of the guard" not in before
    assert "of the guard" in after


def test_of_many_clients_those_that_failed_or_spoke_last_have_rows(tmp_path):
    moved = {str(c): {"down": 0, "up": 1000 * c} for c in range(10_000)}
    row = {"interaction": 0, "clients": {}, "bytes": {"per_client": moved}}
    (tmp_path / "rounds.jsonl").write_text(json.dumps(row) + "\n")
    status = RunStatus()
    status.clients = {str(c): ClientStatus("waits", heard=float(c)) for c in range(10_000)}
    status.clients["3"].failures = 1
    table, told = clients_table(status, read_run(tmp_path), 10_000.0)
    names = [name.text for name in table.rows]
    expected = ["3", *map(str, range(10_001 - MAX_CLIENTS, 10_000))]
    assert names == [*QUANTILES, *expected]
    up = [name.text for name in table.columns].index("up")
    assert table.cells[names.index("median")][up] == "5 MB"
    assert table.cells[names.index("3")] == ["waits", "2 h 46 min ago", "", "1", "0 B", "3 kB"]
    assert told.startswith(f"{MAX_CLIENTS} of 10000 clients: those that failed, then")
    assert told.endswith("All: 10000 waits")


def test_each_run_of_a_queue_has_a_page(run, caplog):
    caplog.set_level("INFO")
    follow, end = show_several("127.0.0.1", 0)
    (address,) = re.findall(r"http://([^ ]*)/\s", caplog.text)
    try:
        follow("0001-a", run)(Event("note", detail={"line": "a site is slow"}))
        assert '<a href="/0001-a/">0001-a</a>' in asked(address)[2]
        assert "finished" in asked(address, "/0001-a/")[2]
        state = json.loads(asked(address, "/0001-a/state.json")[2])
        assert "a site is slow" in state["notes"][0]
        follow("0001-a", None)
        assert asked(address, "/0001-a/")[0] == 404
    finally:
        end()
