"""A client that is excluded or retired is told so, and its process ends; also behind a relay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fedcli.runtime.host import Host
from fedcli.runtime.link import Link
from fedmodels.errors import LinkError, RunStopped, SetOut
from fedplugins.relays.relaying import Upstream, serve_relay
from fedsrv.coordinator import Listen, serve
from fedsrv.progress.events import EventLog
from fedsrv.progress.watching import steer
from fedsrv.state.audit import AUDIT, read
from fedsrv.state.verification import verified_log
from fedsrv.transport import service
from tests.conftest import records_of, tiny_experiment
from tests.fedcli.data.test_own_data import own
from tests.links.test_growing_over_the_wire import Served

OUT = r"^client 1 takes no part in this run any more: an operator {} it\. What it learned stays"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(service, "BEAT_EVERY_S", 0.1)
    for client in range(4):
        own(tmp_path / "data", client, class_names=["a", "b"])
    return tmp_path


def test_a_retired_client_is_told_and_told_again_after_a_restart(place):
    with ThreadPoolExecutor(3) as pool:
        served = Served(place, pool)
        host, first = served.join(0)
        served.wait_commit()
        with pytest.raises(LinkError, match="client 1 has never joined this run"):
            steer(served.address, retire=["1"])
        _, second = served.join(1)
        served.wait_commit()
        steer(served.address, retire=["1"])  # the run rests, and no round is due
        with pytest.raises(SetOut, match=OUT.format("retired")) as told:
            second.result(60)
        assert told.value.exit_code == 3
        for wanted in ({"retire": ["1"]}, {"exclude": ["1"]}):
            with pytest.raises(LinkError, match="client 1 takes no part in this run any more"):
                steer(served.address, **wanted)
        served.stop.set()
        with pytest.raises(RunStopped):
            served.end.result(60)
        host.link._give_up_after_s = 0.1  # the next coordinator has another port
        again = Served(place, pool, resume=True)
        _, second = again.join(1)
        with pytest.raises(SetOut, match=OUT.format("retired")):
            second.result(60)
        again.stop.set()
        with pytest.raises(RunStopped):
            again.end.result(60)
        with pytest.raises(LinkError, match="gave up"):
            first.result(60)


class Telling:
    """Waits until somebody listens, and counts who has joined there."""

    def __init__(self) -> None:
        self.address, self._joined = Future[str](), threading.Semaphore(0)

    def begin(self, address: str, events: EventLog) -> None:
        self.address.set_result(address)
        events.follow(lambda e: self._joined.release() if e.kind == "joined" else None, "test")

    def wait_joined(self, clients: int) -> None:
        for _ in range(clients):
            assert self._joined.acquire(timeout=60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(5) as found:
        yield found


def test_whoever_is_excluded_behind_a_relay_is_told_and_others_of_its_process_go_on(place, pool):
    """The relay's log has who called it, and holds."""
    schedule = {"clients": 4, "rounds": 2}
    experiment = tiny_experiment(method="fedavg", net={"name": "mlp", "hidden": [4]})
    experiment = type(experiment).model_validate(
        {**experiment.to_dict(), "schedule": schedule, "scenario": None, "data": None}
    )
    above, below = Telling(), Telling()
    end = pool.submit(
        serve, experiment, place / "run", Listen("127.0.0.1:0"), on_ready=above.begin
    )  # fmt: skip
    address = above.address.result(60)
    relayed = pool.submit(
        serve_relay, range(4), Upstream(address), Listen("127.0.0.1:0"), below, (), place / "log"
    )

    def joined(*clients: int) -> Future[None]:
        link = Link(below.address.result(60), give_up_after_s=60.0)
        host = Host(clients, link, place / "data", place / "states", torch.device("cpu"))
        return pool.submit(host.run)

    several, alone = joined(0, 1), joined(2)
    above.wait_joined(3)
    steer(address, exclude=["1", "2"])
    last = joined(3)  # now the run begins
    summary = end.result(60)
    assert summary["clients_set_aside"] == [1, 2]
    assert [record["cohort"] for record in records_of(place / "run")] == [[0, 3]] * 2
    with pytest.raises(SetOut, match=OUT.replace("1", "2", 1).format("excluded")):
        alone.result(60)
    for ended in (several, last, relayed):
        ended.result(60)
    found = [entry.facts for entry in read(place / "log" / AUDIT)]
    assert {f["client"] for f in found if f["what"] == "joined"} == {0, 1, 2, 3}
    assert {f["client"] for f in found if f["what"] == "sent"} == {0, 3}
    refused = [f["line"] for f in found if f["what"] == "refused" and "any more: an" in f["line"]]
    assert {line.split()[1] for line in refused} == {"1", "2"}
    assert verified_log(place / "log").wrong == []
