"""An open run over gRPC: a folder is watched, tasks and classes come, and a client comes again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcli.data import settled
from fedcli.data.store.growing import add_task
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.site import cut
from fedcli.runtime.announcer import Watched
from fedcli.runtime.host import Host
from fedcli.runtime.link import Link
from fedmodels.nets.trained import TrainedModel
from fedsrv.coordinator import Listen, serve
from fedsrv.progress.events import Event, EventLog
from fedsrv.progress.watching import steer
from fedsrv.transport import service
from tests.conftest import records_of, tiny_experiment
from tests.fedcli.data.test_growing import images
from tests.fedcli.data.test_own_data import own


class Stopped(Exception):
    """The coordinator ended before it was ready."""


class Served:
    """A coordinator in a thread of this process, and hosts in others."""

    def __init__(
        self, place: Path, pool: ThreadPoolExecutor, resume: bool = False, **tables: Any
    ) -> None:
        schedule = {"open": True, "order": "tasks_outer", "rounds": 1, "clients": 2}
        experiment = tiny_experiment(
            method="fedper",
            net={"name": "mlp", "hidden": [4]},
            schedule={**schedule, "begin_with": 1},
            **tables,
        )
        kept = experiment.data if tables else None
        experiment = experiment.model_copy(update={"scenario": None, "data": kept})
        ready = Future[tuple[str, EventLog]]()
        self.place, self.pool, self.stop = place, pool, threading.Event()
        self.end: Future[dict[str, Any]] = pool.submit(
            serve, experiment, place / "run", Listen("127.0.0.1:0"), stop=self.stop,
            resume=resume,
            on_ready=lambda address, events: ready.set_result((address, events)),
        )  # fmt: skip
        self.end.add_done_callback(lambda end: ready.done() or ready.set_exception(Stopped()))
        self.address, events = ready.result(60)
        self._commits = threading.Semaphore(0)
        events.follow(self._take, "test")

    def _take(self, event: Event) -> None:
        if event.kind == "commit":
            self._commits.release()

    def wait_commit(self) -> None:
        assert self._commits.acquire(timeout=60)

    def join(
        self, client: int, incoming: Path | None = None, data: Path | None = None
    ) -> tuple[Host, Future[None]]:
        states, link = self.place / "states", Link(self.address, give_up_after_s=10.0)
        cpu = torch.device("cpu")
        brought = {} if incoming is None else {"watched": Watched(incoming)}
        host = Host([client], link, data or self.place / "data", states, cpu, brought=brought)
        return host, self.pool.submit(host.run)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(service, "BEAT_EVERY_S", 0.1)
    for client in range(2):
        own(tmp_path / "data", client, class_names=["a", "b"])
    with ThreadPoolExecutor(3) as pool:
        made = Served(tmp_path, pool)
        yield made
        made.stop.set()


def test_tasks_and_classes_come_into_a_watched_folder(served, tmp_path, monkeypatch):
    """The second client joins late; its classes are in another order than those of the run."""
    monkeypatch.setattr(settled, "SETTLE_S", 0.0)
    data, incoming = tmp_path / "data", tmp_path / "incoming"
    first, first_ended = served.join(0, incoming)
    served.wait_commit()
    images(incoming / "month.part", "fox", "b").rename(incoming / "month")
    served.wait_commit()
    for path in (data / "0" / "task-0").glob("train*"):
        path.unlink()
    add_task(data, 1, images(tmp_path / "week", "elk", "fox"))
    late, late_ended = served.join(1)
    served.wait_commit()
    served.wait_commit()
    steer(served.address, close=True)
    summary = served.end.result(60)
    for ended in (first_ended, late_ended):
        ended.result(60)
    records = records_of(tmp_path / "run")
    grown = [(g["tasks"], g["classes"]) for record in records for g in record.get("growths", ())]
    assert [tasks for tasks, _ in grown] == [[[0, 1]], [[0, 2]], [[1, 1]], [[1, 2]]]
    assert [name for _, names in grown for name in names] == ["a", "b", "fox", "elk"]
    assert summary["rounds"] == 4
    assert open_data(data, 1).file.class_names == ("a", "b", "elk", "fox")
    assert late.workers.of(1).data.counts(1, "train") == [0, 0, 2, 2]
    for client, host in enumerate((first, late)):
        model = TrainedModel.load(host.workers.of(client).states.path / "personal.safetensors")
        assert [*model.class_names] == ["a", "b", "fox", "elk"]
    assert (incoming / "taken" / "month").is_dir()


def test_weekly_numbers_come_into_a_watched_folder(tmp_path, monkeypatch):
    """A site's own files, cut as the coordinator's config says; the second one is another week."""
    monkeypatch.setattr(settled, "SETTLE_S", 0.0)
    monkeypatch.setattr(service, "BEAT_EVERY_S", 0.1)
    columns = {"features": ["a"], "target": "price", "target_mean": [5.0], "target_std": [3.0]}
    data = {"name": "table", "columns": columns}

    def week(place: Path, first: int) -> Path:
        place.parent.mkdir(exist_ok=True)
        rows = [f"{at},{at % 10}" for at in range(first, first + 30)]
        place.write_text("\n".join(["a,price", *rows]) + "\n")
        return place

    own_data = cut(week(tmp_path / "first.csv", 0), data, 0, 0, tmp_path / "data")
    tables = {"data": data, "evaluate": {"prequential": True}, "deploy": {}}
    with ThreadPoolExecutor(3) as pool:
        served = Served(tmp_path, pool, scenario={"kind": "natural"}, **tables)
        try:
            host, ended = served.join(0, tmp_path / "incoming", own_data)
            served.wait_commit()
            week(tmp_path / "incoming" / "week.csv.part", 100).rename(
                tmp_path / "incoming" / "week.csv"
            )
            served.wait_commit()
            steer(served.address, close=True)
            summary = served.end.result(60)
            ended.result(60)
        finally:
            served.stop.set()
    assert summary["rounds"] == 2
    assert summary["metrics"]["prequential_mae"] > 0
    grown = [g["tasks"] for r in records_of(tmp_path / "run") for g in r.get("growths", ())]
    assert grown == [[[0, 1]], [[0, 2]]]
    assert (tmp_path / "incoming" / "taken" / "week.csv").is_file()
    model = TrainedModel.load(host.workers.of(0).states.path / "personal.safetensors")
    assert [*model.class_names] == ["price"]
