"""All processes of an open run stop and start again after it has grown, in each order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.dropping import drop_task
from fedcli.data.store.growing import add_task
from fedcli.joining import host_of
from fedcli.runtime.host import Host
from fedmodels.errors import LinkError, RunStopped
from fedmodels.facts.run_classes import RunClasses
from fedsrv.coordinator import Listen, serve
from fedsrv.parts.open_admission import REFUSED
from fedsrv.parts.stages import BY_HAND
from fedsrv.progress.events import Event, EventLog
from fedsrv.progress.watching import steer
from fedsrv.transport import service
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.spool import Spool
from tests.conftest import records_of, tiny_experiment
from tests.fedcli.data.test_growing import images
from tests.fedcli.data.test_own_data import own

SCHEDULE = {"open": True, "order": "tasks_outer", "rounds": 1, "clients": 3, "begin_with": 2}
SCHEDULE |= {"max_classes": 4}
ORDERS: list[list[str | int]] = [["server", 0, 1, 2], [0, "server", 1, 2], [1, 2, "server", 0]]
"""In which the processes start again."""


class Killed(LinkError):
    """A site's process ends without a word to the server."""


class Processes:
    """A coordinator and sites, each in a thread; a site does what ``fedcli join`` does."""

    def __init__(self, place: Path, pool: ThreadPoolExecutor, begin_with: int) -> None:
        self.place, self.pool, self.address = place, pool, "127.0.0.1:0"
        self.schedule = {**SCHEDULE, "begin_with": begin_with}
        self.sites: dict[int, tuple[Host, Future[None]]] = {}
        self.rests, self.again = threading.Semaphore(0), threading.Semaphore(0)
        """Rests after a round or a start, and those that came without one."""
        self.problems, self._has_moved = list[str](), True
        self.stop, self.end = threading.Event(), Future[dict[str, Any]]()

    def serve(self) -> None:
        experiment = tiny_experiment(
            method="fedper", net={"name": "mlp", "hidden": [4]}, schedule=self.schedule
        ).model_copy(update={"scenario": None, "data": None})
        ready, self.stop = Future[tuple[str, EventLog]](), threading.Event()
        self._has_moved = True
        self.end = self.pool.submit(
            serve, experiment, self.place / "run", Listen(self.address), stop=self.stop,
            resume=(self.place / "run").exists(),
            on_ready=lambda address, events: ready.set_result((address, events)),
            watchers=[self._follow],
        )  # fmt: skip
        self.address = ready.result(60)[0]

    def _follow(self, events: EventLog) -> Any:
        events.follow(self._take, "test")
        return lambda: None

    def _take(self, event: Event) -> None:
        if event.kind == "resting" and "has learned all" in str(event.detail):
            (self.rests if self._has_moved else self.again).release()
            self._has_moved = False
        if event.kind == "commit":
            self._has_moved = True
        if event.kind == "failed":
            self.problems.append(str(event))

    def join(self, client: int) -> None:
        states = self.place / "states"
        host = host_of(
            [client], self.address, self.place / "data", states, torch.device("cpu"),
            give_up_after=30.0,
        )  # fmt: skip
        self.sites[client] = host, self.pool.submit(host.run)

    def kill(self) -> None:
        """End all processes, each without a word to the others."""
        for host, ended in self.sites.values():
            host._orders.end(Killed("killed"))
            with pytest.raises(Killed):
                ended.result(60)
        self.stop.set()
        with pytest.raises(RunStopped):
            self.end.result(60)

    def start(self, order: Sequence[str | int]) -> None:
        """Start again those that take part, in an order."""
        there, self.sites = {*self.sites}, {}
        for one in order:
            if one == "server":
                self.serve()
            elif isinstance(one, int) and one in there:
                self.join(one)
        self.wait_rest()

    def wait_rest(self) -> None:
        """Wait until the run has learned all that it knows of."""
        assert self.rests.acquire(timeout=60), self.problems

    def learn(self, client: int, *classes: str) -> None:
        """Let a client have a new task, and wait until it is learned."""
        number = len([*(self.place / "data" / str(client)).glob("task-*")])
        add_task(self.place / "data", client, images(self.place / f"{client}-{number}", *classes))
        self.wait_rest()


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(service, "BEAT_EVERY_S", 0.1)
    for client in range(3):
        own(tmp_path / "data", client, class_names=["a", "b"])
    with ThreadPoolExecutor(8) as pool:
        made: list[Processes] = []

        def begin(begin_with: int) -> Processes:
            made.append(Processes(tmp_path, pool, begin_with))
            return made[-1]

        yield begin
        for one in made:
            one.stop.set()
            for host, _ in one.sites.values():
                with suppress(Exception):
                    host._orders.end(Killed("the test is over"))


def test_who_joined_with_other_classes_than_a_run_begins_with_joins_again(tmp_path: Path) -> None:
    cohort = RemoteCohort(3, Spool(tmp_path, 0), EventLog(), admission=None)
    texts = {}
    for client, names in enumerate((["a", "b"], ["a", "b"], ["a", "b", "c"])):
        place = own(tmp_path, client, class_names=names, num_classes=len(names))
        texts[client] = ClientData(place).announcement()
        cohort.join(client, texts[client], b"", ())
    cohort.sessions[1].client_json = texts[2]  # it has announced more since
    cohort.begin(RunClasses(("a", "b", "c")))
    assert cohort.sessions.keys() == {2}
    cohort.join(0, texts[0], b"", ())
    cohort.begin(RunClasses(("a", "b", "c")))
    assert cohort.sessions.keys() == {0, 2}


def test_everything_starts_again_after_each_kind_of_growth(
    processes: Callable[[int], Processes], tmp_path: Path
) -> None:
    run = processes(2)
    run.serve()
    run.join(0)
    run.join(1)
    run.wait_rest()

    def restarts() -> None:
        for order in ORDERS:
            run.kill()
            run.start(order)
            run.learn(1, "b")

    run.learn(0, "b")
    steer(run.address, set_aside=[("0", 1)])
    drop_task(tmp_path / "data", 1, 0, "a test")
    add_task(tmp_path / "data", 1, images(tmp_path / "far", "a", "r", "s", "t"))
    run.learn(1, "a")
    restarts()
    run.learn(0, "fox")
    restarts()
    run.join(2)
    run.wait_rest()
    restarts()
    while run.again.acquire(blocking=False):
        pass
    steer(run.address, retire=["2"])
    assert run.again.acquire(timeout=60), "whoever heard that it goes on hears that it rests"
    run.learn(0, "a")
    del run.sites[2]
    restarts()
    steer(run.address, close=True)
    summary, records = run.end.result(60), records_of(tmp_path / "run")
    assert summary["rounds"] == len(records)
    aside = [g["set_aside"] for record in records for g in record.get("growths", ())]
    told = [(client, task, why[:23]) for one in aside for client, task, why in one]
    assert told == [(0, 1, BY_HAND[:23]), (1, 0, "a test"), (1, 1, REFUSED[:23])]
    assert [row["clients"]["1"]["task"] for row in records[1:3]] == [0, 2]
    assert run.problems == []
