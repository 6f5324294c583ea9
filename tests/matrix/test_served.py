"""Relay and stay × parts, by threads of this process that talk gRPC over a socket."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcli.joining import host_of
from fedcli.runtime.staying import Address, Outcome, each_run
from fedmodels.config.experiment import Experiment
from fedplugins.relays.relaying import Upstream, serve_relay
from fedsrv.coordinator import Listen, serve
from fedsrv.progress.event_lines import EventPrinter
from fedsrv.progress.events import Event, EventLog
from fedsrv.progress.watching import steer
from fedsrv.transport import service
from fedtide.inprocess import run_in_process
from tests.conftest import records_of
from tests.matrix.rows import Row, dealt
from tests.matrix.test_alone import EACH, check_lineage
from tests.matrix.witness import watching
from tests.runs import assert_same

pytestmark = pytest.mark.whole
CPU = torch.device("cpu")
BY_TIME = {"over-selection"}
"""Parts whose cohorts hang on who answers first."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BEAT_EVERY_S", 0.1)


@pytest.fixture
def socket() -> Iterator[Path]:
    """Return a directory for sockets, whose names must be short."""
    root = Path(tempfile.mkdtemp(prefix="mx-"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    found = ThreadPoolExecutor(8)
    yield found
    found.shutdown(wait=False, cancel_futures=True)


class Begun(EventPrinter):
    """Tells that a coordinator or a relay listens; an open run is closed where it rests."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(names_address=False, prints=False)
        self.pool, self.at = pool, Future[str]()

    def begin(self, address: str, events: EventLog) -> None:
        events.follow(self._take, "test")
        self.at.set_result(address)

    def _take(self, event: Event) -> None:
        if event.kind == "resting":
            self.pool.submit(steer, self.at.result(), close=True)


def begun(
    pool: ThreadPoolExecutor, experiment: Experiment, out: Path, data: Path, at: Path
) -> Future[dict[str, Any]]:
    """Serve a run at a socket; return its end, once clients can join."""
    telling = Begun(pool)
    end = pool.submit(
        serve, experiment, out, Listen(f"unix:{at}"), server_data=data / "server",
        on_ready=telling.begin,
    )  # fmt: skip
    end.add_done_callback(lambda done: telling.at.done() or telling.at.set_exception(
        done.exception() or AssertionError("it ended")
    ))  # fmt: skip
    telling.at.result(200)
    return end


def takes_part(
    experiment: Experiment, at: Path, data: Path, states: Path, place: Path, run_id: str = ""
) -> None:
    """Take part in a run with all clients, in one host."""
    clients = range(experiment.schedule.clients)
    weights = [Path(experiment.net.weights)] if experiment.net.weights else []
    host = host_of(
        [*clients], f"unix:{at}", data, states, CPU, code=[place / "net.py"], weights=weights,
        give_up_after=150.0, run_id=run_id, announce=experiment.announced,
    )  # fmt: skip
    host.run()


def alone(experiment: Experiment, row: Row, data: Path, out: Path, served: Path) -> dict[str, Any]:
    """Return the summary of the same run without a network."""
    if experiment.schedule.is_asynchronous:
        schedule = experiment.schedule.model_copy(update={"arrivals": str(served)})
        experiment = experiment.model_copy(update={"schedule": schedule})
    return run_in_process(experiment, data, out, facts=True)


@EACH
def test_a_run_through_a_relay_has_the_bits_of_one_without(row, place, socket, pool, tmp_path):
    out = tmp_path / "run"
    experiment = row.experiment(place, out)
    data, below = dealt(experiment, place), Begun(pool)
    with watching(data) as seen:
        end = begun(pool, experiment, out, data, socket / "s")
        clients, up = range(experiment.schedule.clients), Upstream(f"unix:{socket / 's'}")
        listen = Listen(f"unix:{socket / 'r'}")
        relayed = pool.submit(serve_relay, clients, up, listen, below, [place / "net.py"])
        below.at.result(200)
        states = tmp_path / "states"
        site = pool.submit(takes_part, experiment, socket / "r", data, states, place)
        summary = end.result(250)
        for each in (site, relayed):
            each.result(200)
    assert not any(record.get("failed") for record in records_of(out))
    if not experiment.schedule.is_asynchronous:
        check_lineage(out, seen, experiment.privacy is not None)
    if row.part.name not in BY_TIME:
        assert_same(summary, alone(experiment, row, data, tmp_path / "alone", out))


@EACH
def test_a_site_that_stays_takes_part_in_two_runs(row, place, socket, pool, tmp_path):
    """The second learns at another rate; nothing of the first is left in it."""
    runs, outs = [], [tmp_path / "first", tmp_path / "second"]
    for out, lr in zip(outs, (0.05, 0.1), strict=True):
        more = {"training": {"lr": lr}}
        out.mkdir()
        runs.append(row.experiment(place, out, **more))
        out.rmdir()
    data = dealt(runs[0], place)
    states, wait = tmp_path / "states", threading.Event().wait

    def stays() -> None:
        each = each_run(Address(f"unix:{socket / 's'}", "0").run, lambda seconds: wait(0.05))
        run = next(each)
        for experiment in runs:
            takes_part(experiment, socket / "s", data, states / run, place, run_id=run)
            if experiment is not runs[-1]:
                run = each.send(Outcome.OVER)

    site, found = pool.submit(stays), list[dict[str, Any]]()
    for experiment, out in zip(runs, outs, strict=True):
        end = begun(pool, experiment, out, data, socket / out.name)
        (socket / "s").unlink(missing_ok=True)
        (socket / "s").symlink_to(socket / out.name)  # the first may go late, and only its own
        found.append(end.result(250))
    site.result(200)
    assert found[0]["state_sha256"] != found[1]["state_sha256"]
    if row.part.name not in BY_TIME:
        for experiment, out, summary in zip(runs, outs, found, strict=True):
            again = alone(experiment, row, data, tmp_path / f"alone-{out.name}", out)
            assert_same(summary, again)
