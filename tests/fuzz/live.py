"""A live coordinator and honest clients in this process, for a liar to call, or for speed."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fedcli.runtime.host import Host
from fedcli.runtime.link import Link
from fedmodels.config.experiment import Experiment
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.run import RunFacts
from fedsrv.coordinator import Listen, serve
from fedsrv.progress.events import EventLog
from tests.fuzz.liar import Liar


class Live:
    """One run; ``address`` is a socket in its directory, which must have a short name, or a port.

    Further arguments are those of ``serve``.
    """

    def __init__(
        self, experiment: Experiment, data: Path, root: Path, listen: str = "", **served: Any
    ) -> None:
        self.experiment, self.data, self.root = experiment, data, root
        self.address = listen or f"unix:{root}/s"
        self._ready = threading.Event()
        self._threads = ThreadPoolExecutor(4)
        self.events: EventLog | None = None
        self.run: Future[dict[str, Any]] = self._threads.submit(
            serve,
            experiment,
            root / "run",
            Listen(self.address),
            on_ready=self._listening,
            **served,
        )
        self.run.add_done_callback(lambda _: self._ready.set())
        self._ready.wait(30)
        self.hosts: list[Future[None]] = []

    def _listening(self, address: str, events: EventLog) -> None:
        self.address, self.events = address, events
        self._ready.set()

    def join(self, *clients: int, address: str = "") -> None:
        """Let honest clients take part, in one host; at a relay's address, if one is given."""
        link = Link(address or self.address, give_up_after_s=10.0)
        host = Host(clients, link, self.data, self.root / "states", torch.device("cpu"))
        assert self.events is not None
        seen = self.events.listen(from_start=True)
        self.hosts.append(self._threads.submit(host.run))
        missing = {str(client) for client in clients}
        while missing:
            event = next(seen)
            missing -= {event.client} if event.kind == "joined" else set()
        seen.close()

    def liar(self, client: str, about: str = "0") -> Liar:
        """Return a liar with a client's id, which describes its data as another does."""
        description = (self.data / about / "client.json").read_text()
        return Liar(self.address, client, description, honest_upload(self.experiment))

    def summary(self) -> dict[str, Any]:
        """Wait for the end of the run; return its summary."""
        found = self.run.result(60)
        for host in self.hosts:
            host.result(30)
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def honest_upload(experiment: Experiment) -> Bundle:
    """Return an upload of fedavg as a client without data would send it."""
    weights = RunFacts(experiment, Problem((1, 8, 8), 10)).initial_weights
    return Bundle(weights=dict(weights), scalars={"num_examples": 5.0})


def complaints_with_traceback(records: list[logging.LogRecord]) -> list[str]:
    """Return what was logged with a traceback."""
    return [r.getMessage() for r in records if r.exc_info or "Traceback" in r.getMessage()]
