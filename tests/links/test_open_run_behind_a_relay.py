"""Open runs behind a relay: unlike classes, new ones, a refused task; buffers, and secure sums."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.growing import add_task
from fedcli.joining import host_of
from fedmodels.config.experiment import Experiment
from fedmodels.errors import FedtideError
from fedmodels.facts.run_classes import ClassChange
from fedplugins.relays.relaying import Upstream, serve_relay
from fedsrv.coordinator import Listen, serve
from fedsrv.identity.certificates import init_authority, issue
from fedsrv.identity.tls import caller_credentials
from fedsrv.parts.open_admission import REFUSED
from fedsrv.parts.stages import RunPaused
from fedsrv.progress.events import Event, EventLog
from fedsrv.progress.watching import steer
from fedsrv.state.decisions import CLASSES, decide
from fedsrv.transport import service
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedcli.data.test_growing import images
from tests.fedcli.data.test_own_data import own
from tests.integration.harness import until

SCHEDULE = {"open": True, "order": "tasks_outer", "rounds": 1, "clients": 2, "max_classes": 4}
EXPERIMENT = tiny_experiment(
    method="fedavg", net={"name": "mlp", "hidden": [4]}, schedule=SCHEDULE
).model_copy(update={"scenario": None, "data": None})
WEEKS = ((0, ("fox", "a")), (1, ("a", "b")))
"""Who gets another task, one after the other, and its classes."""
RENAMED = ClassChange("c", "cow")


class Listening:
    """Keeps the address of a coordinator or relay, and counts rests."""

    def __init__(self) -> None:
        self.address, self.rests = Future[str](), threading.Semaphore(0)

    def begin(self, address: str, events: EventLog) -> None:
        self.address.set_result(address)
        events.follow(self._take, "test")

    def _take(self, event: Event) -> None:
        if event.kind == "resting":
            self.rests.release()

    def wait_rest(self) -> None:
        assert self.rests.acquire(timeout=60)

    def forget_rests(self) -> None:
        while self.rests.acquire(blocking=False):
            pass


def tasks_learned(out: Path) -> list[dict[int, int]]:
    """Return each growth's number of tasks by client, where tasks came."""
    growths = [g for record in records_of(out) for g in record.get("growths", ())]
    return [dict(g["tasks"]) for g in growths if g["tasks"]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two clients that have one class in common, and what comes to them."""
    for client, names in enumerate((["a", "b"], ["c", "b"])):
        own(tmp_path / "data", client, class_names=names)
    for week, (_, classes) in enumerate(WEEKS):
        images(tmp_path / f"{week}", *classes)
    images(tmp_path / "far", "r", "s")
    return tmp_path / "data"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(5) as found:
        yield found


def in_one_process(data: Path, out: Path) -> Any:
    """Do the same run without a network."""
    for week, (client, _) in enumerate(WEEKS):
        with pytest.raises(RunPaused):
            run_in_process(EXPERIMENT, data, out, resume=True, at_rest="pause")
        if week == 0:
            decide(out, CLASSES, {"number": 0, **RENAMED._asdict()})
        add_task(data, client, data.parent / f"{week}")
    return run_in_process(EXPERIMENT, data, out, resume=True, at_rest="close")


def test_tasks_and_classes_come_through_a_relay_as_they_do_without_a_network(
    data: Path, tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BEAT_EVERY_S", 0.1)
    shutil.copytree(data, tmp_path / "other" / "data")
    for week in ("0", "1"):
        shutil.copytree(tmp_path / week, tmp_path / "other" / week)
    above, below, out = Listening(), Listening(), tmp_path / "run"
    end = pool.submit(serve, EXPERIMENT, out, Listen("127.0.0.1:0"), on_ready=above.begin)
    up = Upstream(above.address.result(60))
    relayed = pool.submit(serve_relay, range(2), up, Listen("127.0.0.1:0"), below)
    relay, cpu = below.address.result(60), torch.device("cpu")
    sites = [
        pool.submit(host_of([client], relay, data, tmp_path / "states", cpu).run)
        for client in range(2)
    ]
    above.wait_rest()
    steer(above.address.result(), classes=[RENAMED])
    with pytest.raises(FedtideError, match="this is a relay: ask the run's coordinator"):
        steer(relay, close=True)
    add_task(data, 0, tmp_path / "0")
    above.wait_rest()
    add_task(data, 0, tmp_path / "far")  # two classes beyond max_classes
    until(lambda: ClientData(data / "0").tasks[2].set_aside, "the refusal, which comes back")
    above.forget_rests()  # a task that is refused may make the run rest once more
    add_task(data, 1, tmp_path / "1")
    until(lambda: {1: 2} in tasks_learned(out), "the task, whose rounds begin")
    above.wait_rest()
    cow = steer(above.address.result(), classes=())[2]
    assert (cow.name, [*cow.earlier], cow.examples, cow.clients) == ("cow", ["c"], 12, 1)
    steer(above.address.result(), close=True)
    summary = end.result(60)
    for ended in (*sites, relayed):
        ended.result(60)
    growths = [g for record in records_of(out) for g in record.get("growths", ())]
    assert [g["classes"] for g in growths if g["classes"]] == [["a", "b", "c"], ["fox"]]
    assert tasks_learned(out) == [{0: 1, 1: 1}, {0: 2}, {1: 2}]
    ((client, task, why),) = [place for g in growths for place in g["set_aside"]]
    assert (client, task, why[: len(REFUSED)]) == (0, 2, REFUSED)
    alone = in_one_process(tmp_path / "other" / "data", tmp_path / "alone")
    assert summary["state_sha256"] == alone["state_sha256"]


class Papers:
    """The certificates of a run over mutual TLS; none of a run without."""

    def __init__(self, place: Path | None, *identities: str) -> None:
        self.place = place
        if place is not None:
            init_authority(place)
            for identity in identities:
                issue(place, identity)

    def of(self, name: str) -> tuple[Path | None, Path | None, Path | None]:
        """Return the authority, and somebody's certificate and key."""
        if self.place is None:
            return None, None, None
        return self.place / "ca.pem", self.place / f"{name}.pem", self.place / f"{name}.key"

    def listen(self, name: str) -> Listen:
        ca, cert, key = self.of(name)
        return Listen.given("127.0.0.1:0", cert, key, ca, False)

    def shown(self, name: str, option: str) -> Any:
        return caller_credentials(*self.of(name), option)


@pytest.mark.parametrize("is_masked", [False, True], ids=["asynchronous", "masked, mutual TLS"])
def test_a_run_that_grows_beside_and_behind_a_relay_has_the_bits_of_one_without_a_network(
    is_masked: bool, tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay passes on orders of several rounds, or masked uploads and what opens their sum."""
    monkeypatch.setattr(service, "BEAT_EVERY_S", 0.1)
    out, place = tmp_path / "run", tmp_path / "data"
    buffered = {} if is_masked else {"order": "asynchronous", "buffer": 1}

    def experiment(trust: str, **more: Any) -> Experiment:
        return tiny_experiment(
            method="fedavg", net={"name": "mlp", "hidden": [4]},
            schedule={**SCHEDULE, **buffered, "clients": 3, **more},
            **({"privacy": {"secure_sum": {"trust": trust}}} if is_masked else {}),
        ).model_copy(update={"scenario": None, "data": None})  # fmt: skip

    for client in range(3):
        own(place, client, class_names=["a", "b"])
    shutil.copytree(place, tmp_path / "other")
    images(tmp_path / "week", "fox", "a")
    everybody = "server", "relay:0-1", "0", "1", "2", "operator"
    papers = Papers(tmp_path / "certs" if is_masked else None, *everybody)
    above, below = Listening(), Listening()
    end = pool.submit(
        serve, experiment("certificates"), out, papers.listen("server"), on_ready=above.begin
    )
    up = above.address.result(60)
    upstream = Upstream(up, papers.shown("relay-0-1", "--up"))
    relayed = pool.submit(serve_relay, range(2), upstream, papers.listen("relay-0-1"), below)
    relay, states, cpu = below.address.result(60), tmp_path / "states", torch.device("cpu")
    sites = [
        pool.submit(host_of([c], to, place, states, cpu, tls=papers.of(f"client-{c}")).run)
        for c, to in enumerate((relay, relay, up))
    ]
    above.wait_rest()
    add_task(place, 0, tmp_path / "week")
    above.wait_rest()
    steer(up, papers.shown("operator", "--tls"), close=True)
    summary = end.result(60)
    for ended in (*sites, relayed):
        ended.result(60)
    alone = experiment("coordinator", **({} if is_masked else {"arrivals": str(out)}))
    with pytest.raises(RunPaused):
        run_in_process(alone, tmp_path / "other", tmp_path / "alone", at_rest="pause")
    add_task(tmp_path / "other", 0, tmp_path / "week")
    again = run_in_process(
        alone, tmp_path / "other", tmp_path / "alone", resume=True, at_rest="close"
    )
    assert summary["state_sha256"] == again["state_sha256"]
    records = records_of(out)
    grown = [g["classes"] for record in records for g in record.get("growths", ())]
    assert [classes for classes in grown if classes] == [["a", "b"], ["fox"]]
    assert not any(record.get("failed") for record in records)
    assert all(("secure_sum" in record) == is_masked for record in records)
