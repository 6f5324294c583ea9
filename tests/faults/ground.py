"""Where runs are struck: an experiment for each setting, its data, and its undisturbed run.

An asynchronous run depends on who is fast. So those that are struck follow the arrivals of the
undisturbed one, and have to come to the same bits.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.facts.resolution import experiment_of
from fedmodels.methods import make, method_class
from fedmodels.tensors.bundle import Problem
from fedmodels.training.asked import needs_server_data
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedsrv.parts.buffered_rounds import check_asynchronous
from tests.faults.plans import Draw, Fault, Plan, Reached
from tests.faults.playing import PATIENCE_S, Played, Player
from tests.faults.processes import Nursery, Site
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.integration.harness import write_config

CLIENTS = {"client-0": "0", "client-1,2": "1-2", "client-evaluator": "evaluator"}
"""One client on its own, two in one process, and the evaluator."""
PROBLEM = Problem((1, 8, 8), 10)
"""Of the digits that everybody trains on."""
PORTS = range(20_000, 32_000)
"""Below those that the system hands out: a coordinator must get its own again."""


@dataclass(frozen=True)
class Setting:
    """What kind of run is struck."""

    method: str
    launched: bool = False
    """Whether the launcher starts everybody; else each process is started by hand."""
    asynchronous: bool = False
    relayed: bool = False
    lenient: bool = False
    """Whether two clients suffice, once others are late or dead."""
    strict: bool = False
    """Whether every commit is synced before it counts."""
    open: bool = False
    """Whether each client goes from task to task by itself, until all are learned."""
    secure: bool = False
    """Whether the coordinator learns sums of uploads only."""

    def __str__(self) -> str:
        """Return it in a few words."""
        kinds = (
            "launched" * self.launched,
            "asynchronous" * self.asynchronous,
            "relayed" * self.relayed,
            "lenient" * self.lenient,
            "strict" * self.strict,
            "open" * self.open,
            "secure" * self.secure,
        )
        return " ".join(filter(None, (self.method, *kinds)))


@dataclass
class Ground:
    """Plays runs, each in a directory of its own, and remembers the undisturbed ones."""

    nursery: Nursery
    data: Path
    root: Path
    patience_s: float = PATIENCE_S
    _undisturbed: dict[Setting, Played] = field(default_factory=dict)
    _made: int = 0

    def undisturbed(self, setting: Setting) -> Played:
        """Return the run of a setting that nothing happens to."""
        if setting not in self._undisturbed:
            played = self._play(setting, Plan(), experiment(setting))
            assert not played.troubles, f"{setting} fails undisturbed: {played.troubles}"
            self._undisturbed[setting] = played
        return self._undisturbed[setting]

    def drawn(self, setting: Setting, seed: int, faults: int = 3) -> Plan:
        """Return the plan that a seed draws for a setting."""
        census = self.undisturbed(setting).census()
        return Draw(census, setting.launched).plan(seed, faults)

    def without(self, setting: Setting, seed: int) -> Plan:
        """Return a plan that kills the first client for good, after an upload that a seed draws."""
        first = next(iter(CLIENTS))
        reached = self.undisturbed(setting).census()
        pushes = reached.count(Reached(first, "push.after"))
        nth = random.Random(seed).randint(1, max(1, pushes // 2))
        return Plan((Fault(first, "push.after", nth, (first,)),), seed=seed, gone=(first,))

    def play(self, setting: Setting, plan: Plan) -> Played:
        """Play a plan; what is asynchronous follows the arrivals of the undisturbed run.

        Where somebody is gone for good nothing is followed: who arrives is up to the others.
        """
        follows = setting.asynchronous and not plan.gone
        follows = self.undisturbed(setting).site.out if follows else None
        return self._play(setting, plan, experiment(setting, follows))

    def _play(self, setting: Setting, plan: Plan, made: Experiment) -> Played:
        self._made += 1
        root = self.root / f"{self._made}-{str(setting).replace(' ', '-')}"
        root.mkdir(parents=True)
        launched = setting.launched
        on_server = needs_server_data(method_class(setting.method))
        site = Site(
            write_config(root / "config.toml", made),
            root / "run",
            None if launched and made.method.pools_data else self._partition(made),
            free_port(),
            {} if launched else CLIENTS,
            self.data / "server" if on_server else None,
            free_port() if setting.relayed else None,
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


def experiment(setting: Setting, follows: Path | None = None) -> Experiment:
    """Return the tiny experiment of a setting: every way results take, and no pictures.

    Args:
        setting: what kind of run it is.
        follows: the run whose arrivals an asynchronous one follows.
    """
    tables = experiment_for((setting.method, {})).to_dict()
    tables["evaluate"]["pictures"] = 0
    tables["server"]["upload_memory_mb"] = 0  # uploads are added up as they come, and spooled
    if setting.lenient:
        tables["server"] |= {"min_clients": 2, "deadline_s": 5.0}
    if setting.asynchronous:
        buffer = 2 if setting.lenient else 1
        tables["schedule"] |= {"order": "asynchronous", "rounds": 3, "buffer": buffer}
    if follows is not None:
        tables["schedule"]["arrivals"] = str(follows)
    if setting.strict:
        tables["server"]["durability"] = "strict"
    if setting.open:
        tables["schedule"] |= {"open": True, "order": "tasks_outer"}
        tables["server"]["min_clients"] = tables["schedule"]["clients"]
        tables["trigger"] = {"close_after_s": 0}
    if setting.secure:
        tables["privacy"] = {"secure_sum": {"trust": "coordinator"}}
    return experiment_of(tables)


@cache
def may_be(setting: Setting) -> bool:
    """Tell whether a run of a setting can be configured: not every method is for every order."""
    try:
        experiment(setting)
    except ConfigError:
        return False
    return True


def may_be_asynchronous(name: str) -> bool:
    """Tell whether a method's rounds may be asynchronous."""
    return _allows(check_asynchronous, name)


def _allows(check: Callable[[Method, RunFacts], None], name: str) -> bool:
    made = experiment(Setting(name))
    try:
        check(make(made.method.name, **made.method.hyper_parameters()), RunFacts(made, PROBLEM))
    except ConfigError:
        return False
    return True


def free_port() -> int:
    """Return a port that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
