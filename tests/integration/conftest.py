"""Fixtures of the integration tests: data, the fork server, and a way to run over loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.facts.resolution import experiment_of
from tests.integration.harness import (
    PLUGINS,
    Client,
    Coordinator,
    ForkServer,
    Relay,
    join_arguments,
    summary_of,
    write_config,
)
from tests.runs import WholeRuns, assert_same

Sites = Callable[..., "Loopback"]


def tables(method: str, /, **more: Any) -> dict[str, Any]:
    """Return a tiny experiment: three clients with two tasks each on digits."""
    base: dict[str, Any] = {
        "seed": 3,
        "data": {"name": "digits", "max_per_class": 20},
        "scenario": {"kind": "per_class_shards", "shards": 5, "tasks": 2},
        "net": {"name": "digits-cnn"},
        "method": {"name": method},
        "schedule": {"rounds": 2, "clients": 3},
        "training": {"local_epochs": 1, "batch_size": 16, "lr": 0.05, "momentum": 0.5},
    }
    return {**base, **more}


@pytest.fixture(autouse=True, scope="session")
def _plugins() -> Iterator[None]:
    """Let this process find the third party's method too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGINS))
        yield


@pytest.fixture(scope="session")
def partition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a partition root of the tiny experiment."""
    from rich.console import Console

    from fedcli.data.store.commands import run_partition

    root = tmp_path_factory.mktemp("partition") / "data"
    e = experiment_of(tables("fedavg"))
    quiet = Console(quiet=True)
    run_partition(e.data, e.scenario, e.schedule.clients, e.seed, root, quiet)
    return root


class Loopback:
    """One run over loopback, whose processes a test may kill and start again."""

    def __init__(
        self,
        experiment: Experiment,
        root: Path,
        partition: Path,
        fork_server: ForkServer,
        whole_run: WholeRuns,
    ) -> None:
        self.experiment, self.root, self.partition = experiment, root, partition
        self.fork_server, self._whole_run = fork_server, whole_run
        self.out = root / "run"
        self.config = write_config(root / "config.toml", experiment)
        self.coordinator: Coordinator | None = None
        self.relays: list[Relay] = []
        self.port = 0
        self.device = "cpu"
        """Where clients train."""
        self.lease_s = 0.0
        """What the coordinator's lease is shortened to, if it is."""

    def serve(self, *more: str) -> Coordinator:
        """Start the coordinator, again on its port after the first time."""
        resume = ["--resume"] if self.out.exists() and "--resume" not in more else []
        self.coordinator = Coordinator(
            self.config, self.out, *resume, *more, port=self.port, forks=self.fork_server,
            lease_s=self.lease_s,
        )  # fmt: skip
        self.coordinator.listening()
        self.port = self.coordinator.port
        return self.coordinator

    def relay(self, clients: str, *more: str, port: int = 0) -> Relay:
        """Start a relay for a range of clients."""
        log = self.root / f"relay-{clients}.log"
        up = f"127.0.0.1:{self.port}"
        self.relays.append(Relay(self.fork_server, log, up, clients, *more, port=port))
        return self.relays[-1]

    def join(
        self,
        client: str,
        *more: str,
        data: Path | None = None,
        states: Path | None = None,
        port: int | None = None,
    ) -> Any:
        """Start one client process; it joins the coordinator unless another port is given."""
        arguments = join_arguments(
            client, f"127.0.0.1:{port or self.port}", data or self.partition,
            states or self.out / "clients", "--device", self.device, *more,
        )  # fmt: skip
        return self.fork_server.start(arguments, self.root / f"client-{client}.log")

    def run(self, *clients: str, serve: Sequence[str] = ()) -> dict[str, Any]:
        """Run undisturbed to the end; return the summary."""
        coordinator = self.serve(*serve)
        started = [self.join(client) for client in clients]
        return self.finish(coordinator, *started)

    def finish(self, coordinator: Coordinator, *clients: Any) -> dict[str, Any]:
        """Wait for everybody; return the summary. A client that fails is told of at once."""
        forks = [client for client in clients if isinstance(client, Client)]
        self.fork_server.wait_for(forks)
        for client in [*filter(Client.has_failed, forks), *clients]:
            assert client.wait() == 0, client.output()
        assert coordinator.wait() == 0, coordinator.log.read_text()
        return summary_of(self.out)

    @property
    def alone(self) -> dict[str, Any]:
        """The summary of the same run in one process, which nothing disturbs."""
        return self._whole_run(self.experiment, self.partition, device=self.device).summary

    def finish_as_alone(self, coordinator: Coordinator, *clients: Any) -> dict[str, Any]:
        """Wait for everybody; return the summary, which is that of the run in one process."""
        found = self.finish(coordinator, *clients)
        assert_same(found, self.alone)
        return found

    def close(self) -> None:
        for relay in self.relays:
            relay.process.close()
        if self.coordinator is not None:
            self.coordinator.close()


@pytest.fixture
def loopback(
    tmp_path: Path, partition: Path, fork_server: ForkServer, steer: Path, whole_run: WholeRuns
) -> Iterator[Sites]:
    """Return a maker of runs over loopback."""
    made: list[Loopback] = []

    def make(
        experiment: dict[str, Any] | Experiment, name: str = "one", partition: Path = partition
    ) -> Loopback:
        resolved = experiment if isinstance(experiment, Experiment) else experiment_of(experiment)
        root = tmp_path / name
        root.mkdir()
        made.append(Loopback(resolved, root, partition, fork_server, whole_run))
        return made[-1]

    for leftover in steer.iterdir():
        leftover.unlink()
    yield make
    for run in made:
        run.close()
