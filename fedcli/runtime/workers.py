"""The clients of a process, opened when they are selected.

A process may own thousands of clients, of which few have an order at a time. So the clients that
worked last are held in memory, as many as there is room for, and no others. A client that was
closed goes on as after a restart of its process: from its data and its private state on the disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.opened_data import open_data, store_in
from fedcli.runtime.client_part import NOTHING, Brought
from fedcli.runtime.setups import SetUps
from fedcli.runtime.state import StateDirectory
from fedcli.runtime.worker import Worker
from fedmodels.config.combinations import part_at
from fedmodels.config.experiment import Experiment
from fedmodels.errors import LinkError
from fedmodels.host.devices import free_on, give_back
from fedmodels.host.guarded import Guarded
from fedmodels.host.machine import cores, free_bytes
from fedmodels.methods import make
from fedmodels.tensors.bundle import ClientId
from fedmodels.training.asked import load_ahead
from fedmodels.training.fault import name_faults
from fedmodels.training.hooks import init_client
from fedpb.tables import values_of
from fedpb.v1.table_pb2 import Table

KEEP_BYTES, KEEPING = 256 << 20, 64
"""Bytes of uploads that a process keeps until their commit, shared by so many clients at most."""
PROCESSES = 4
"""Processes that may share a GPU: each leaves room for the data of so many."""
log = logging.getLogger(__name__)


def room_for_idle() -> int:
    """Return the bytes that idle clients of a process may hold: half of what is free, by core."""
    return free_bytes() // (2 * cores())


class Workers:
    """The clients of one process.

    The thread that trains owns them once the process has joined. Others ask who is open, and what
    is safe on the disk.
    """

    _open: Guarded[dict[ClientId, Worker]] = Guarded("_lock")
    """The workers that are open; the client that worked last comes last."""
    _states: Guarded[dict[ClientId, StateDirectory]] = Guarded("_lock")

    def __init__(
        self,
        clients: Sequence[ClientId],
        data: Path,
        states: Path,
        device: torch.device,
        brought: Mapping[str, Brought] = NOTHING,
        *,
        deploys: bool = False,
    ) -> None:
        """Open nothing yet; data lie in a partition's root, states in one directory for all.

        ``brought`` is what the site brings for parts, by name. With ``deploys`` its models are kept
        live whatever the run says.
        """
        self.brought, self._deploys = brought, deploys
        self.clients = tuple(clients)
        self.root, self._states_root, self._device = data, states, device
        """Where clients' directories are."""
        self._store = store_in(data)
        self._lock = threading.RLock()
        self._states, self._open = {}, {}
        self._idle: dict[ClientId, int] = {}
        """The bytes that each open client holds, without the clients that worked last."""
        self._idle_bytes = 0
        self._room = min(room_for_idle(), free_on(device) / (2 * PROCESSES))
        self._experiment: Experiment | None = None
        """What the clients joined with."""
        self._now: Experiment | None = None
        """That with the settings of the last order."""
        self._settings = Table()
        self._classes: tuple[str, ...] = ()
        """Names of the classes that the run began with, where the server says them."""
        self._last = 2
        """How many clients that worked last stay open whatever they hold."""
        self._first: Worker | None = None
        """Holds what all share: the run's facts, and nets to work with."""

    def begin(self, experiment: Experiment, classes: Sequence[str] = ()) -> None:
        """Take the run's experiment; a process that joins again goes on with the first one.

        ``classes`` are those that an open run began with. Until the server names them, they are
        those that the first client has.

        Raises:
            LinkError: the server names other classes than before.
        """
        if self._experiment is not None:
            experiment = self._experiment
        if self._experiment is None or self._are_others(classes):
            self._experiment, self._classes = experiment, tuple(classes)
            self._now = self._at_present(experiment, self._settings)
            with self._lock:
                self._open, self._first = {}, None
            self._idle, self._idle_bytes = {}, 0
            table = experiment.method
            with name_faults(make(table.name, **table.hyper_parameters())):
                first = self.of(self.clients[0])  # what is wrong with the run shows at once
                assert first.set_up.payload_spec
                for net in sorted({*map(experiment.net.number_of, self.clients)}):
                    first.set_ups.of_net(net)
                load_ahead(table.name, "client")
                if experiment.net.weights_sha256 and isinstance(first.client, int):
                    init_client(first.method, first.run, first.client)

    @property
    def joined(self) -> Experiment | None:
        """What the clients joined with; None before they did."""
        return self._experiment

    def _at_present(self, experiment: Experiment, settings: Table) -> Experiment:
        """Return an experiment with other settings, and with what the site itself asks for."""
        if found := values_of(settings):
            experiment = part_at("fedmodels.config.open_changes:changed")(experiment, found)
        if not self._deploys or experiment.deploy is not None:
            return experiment
        return experiment.model_copy(update={"deploy": part_at("fedmodels.config.deploy:Deploy")()})

    def follow(self, settings: Table) -> None:
        """Go on as an order says that the config has changed since the clients joined.

        Clients are then as after a restart of their process.

        Raises:
            PayloadError: a setting cannot change, or cannot be this.
        """
        if settings == self._settings:
            return
        assert self._experiment is not None, "the process has joined"
        self._now = self._at_present(self._experiment, settings)
        self._settings = Table()
        self._settings.CopyFrom(settings)
        for worker in self.open().values():
            worker.close()
        self._idle, self._idle_bytes = {}, 0
        first = self._opened(self.clients[0], None)
        with self._lock:
            self._open, self._first = {self.clients[0]: first}, first

    def name(self, classes: Sequence[str]) -> None:
        """Take the classes that an open run began with; LinkError if they were others before."""
        if self._experiment is not None:
            self.begin(self._experiment, classes)

    def _are_others(self, classes: Sequence[str]) -> bool:
        """Tell whether clients were opened with other classes than the run began with."""
        if self._first is None:
            return True
        if not self._classes:
            wanted = tuple(classes) or self.data(self.clients[0]).file.classes
            if wanted != self.set_ups.classes:
                return True
            self._classes = tuple(classes)
        elif classes and tuple(classes) != self._classes:
            raise LinkError("the server names other classes than at the start of the run")
        return False

    def data(self, client: ClientId) -> ClientData:
        """Open a client's data; raise DataError if they are missing or damaged."""
        return open_data(self.root, client, self._store)

    def has_data(self, client: ClientId) -> bool:
        """Tell whether there are data of a client, maybe damaged ones."""
        in_store = self._store is not None and isinstance(client, int) and client < len(self._store)
        return in_store or (self.root / str(client)).is_dir()

    def versions(self, client: ClientId) -> list[int]:
        """Return the interactions after which a client holds a private state, ascending.

        Raises:
            ArchiveError: its state directory cannot be used.
        """
        with self._lock:
            known = client in self._states
        known = known or (self._states_root / str(client)).is_dir()
        return self._states_of(client).versions() if known else []

    def durable(self, client: ClientId) -> int:
        """Return the newest private state of a client that is safe on the disk; -1 for none."""
        with self._lock:
            known = self._states.get(client)
        return -1 if known is None else known.durable

    def all_durable(self) -> Mapping[ClientId, int]:
        """Return :meth:`durable` of each client that was selected; any thread may call it."""
        with self._lock:
            return {client: states.durable for client, states in self._states.items()}

    def of(self, client: ClientId) -> Worker:
        """Return a client's worker, and close those idle for the longest where there is no room."""
        self._idle_bytes -= self._idle.pop(client, 0)
        worker = self.open().get(client) or self._opened(client, self._first)
        with self._lock:
            self._open.pop(client, None)
            self._open[client] = worker
            idle = next(islice(reversed(self._open), self._last, None), None)
        self._first = self._first or worker
        worker.woken()
        if idle is not None and idle not in self._idle:
            self._idle[idle] = self.open()[idle].held_bytes()
            self._idle_bytes += self._idle[idle]
        while self._idle_bytes > self._room:
            first = next(iter(self._idle))
            self._idle_bytes -= self._idle.pop(first)
            with self._lock:
                closing = self._open.pop(first)
            closing.close()
            give_back(self._device)
        return worker

    def open(self) -> Mapping[ClientId, Worker]:
        """Return the workers that are open; any thread may call it."""
        with self._lock:
            return dict(self._open)

    @property
    def set_ups(self) -> SetUps:
        """What all clients share, by the classes of the run."""
        assert self._first is not None, "the process has joined"
        return self._first.set_ups

    def _opened(self, client: ClientId, sibling: Worker | None) -> Worker:
        assert self._now is not None, "the process has joined"
        return Worker(
            client,
            self.data(client),
            self._states_of(client),
            self._now,
            self._device,
            sibling=sibling,
            keep_bytes=KEEP_BYTES // min(len(self.clients), KEEPING),
            classes=self._classes,
            brought=self.brought,
        )

    def _states_of(self, client: ClientId) -> StateDirectory:
        with self._lock:
            if client not in self._states:
                self._states[client] = StateDirectory(self._states_root / str(client))
            return self._states[client]
