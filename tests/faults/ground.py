"""Where runs are struck: an experiment for each method, its data, and its undisturbed run."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.config.experiment import Experiment
from fedmodels.methods import method_class
from fedmodels.resolution import experiment_of
from tests.faults.plans import Draw, Plan
from tests.faults.playing import PATIENCE_S, Played, Player
from tests.faults.processes import Nursery, Site
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.integration.harness import write_config

CLIENTS = {"client-0": "0", "client-1,2": "1-2", "client-evaluator": "evaluator"}
"""One client on its own, two in one process, and the evaluator."""
PORTS = range(20_000, 32_000)
"""Below those that the system hands out: a coordinator must get its own again."""


@dataclass
class Ground:
    """Plays runs, each in a directory of its own, and remembers the undisturbed ones."""

    nursery: Nursery
    data: Path
    root: Path
    patience_s: float = PATIENCE_S
    _undisturbed: dict[tuple[str, bool], Played] = field(default_factory=dict)
    _made: int = 0

    def undisturbed(self, method: str, launched: bool = False) -> Played:
        """Return the run of a method that nothing happens to."""
        if (method, launched) not in self._undisturbed:
            played = self.play(method, Plan(), launched)
            assert not played.troubles, f"{method} fails undisturbed: {played.troubles}"
            self._undisturbed[method, launched] = played
        return self._undisturbed[method, launched]

    def drawn(self, method: str, seed: int, launched: bool = False, faults: int = 3) -> Plan:
        """Return the plan that a seed draws for a method."""
        return Draw(self.undisturbed(method, launched).census(), launched).plan(seed, faults)

    def play(self, method: str, plan: Plan, launched: bool = False) -> Played:
        """Play a plan."""
        self._made += 1
        root = self.root / f"{self._made}-{method}"
        root.mkdir(parents=True)
        made = experiment(method)
        needs_server_data = method_class(method).needs_server_data
        site = Site(
            write_config(root / "config.toml", made),
            root / "run",
            None if launched and made.method.pools_data else self._partition(made),
            free_port(),
            {} if launched else CLIENTS,
            self.data / "server" if needs_server_data else None,
        )
        return Player(self.nursery, site, plan).play(self.patience_s)

    def _partition(self, made: Experiment) -> Path:
        """Return a run's data: dealt out to the clients, or pooled with the first of them."""
        if not made.method.pools_data:
            return self.data
        assert made.data
        assert made.scenario
        pooled, clients = self.root / "pooled", made.schedule.clients
        quiet = Console(quiet=True)
        run_partition(made.data, made.scenario, clients, made.seed, pooled, quiet, gather=True)
        return pooled


def experiment(method: str) -> Experiment:
    """Return the tiny experiment of a method: every way results take, and no pictures."""
    tables = experiment_for((method, {})).to_dict()
    tables["evaluate"]["pictures"] = 0
    tables["server"]["upload_memory_mb"] = 0  # uploads are added up as they come, and spooled
    return experiment_of(tables)


def free_port() -> int:
    """Return a port that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
