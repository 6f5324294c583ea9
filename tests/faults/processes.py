"""The processes of one run, as one who starts them by hand has them, or as the launcher does."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fedsrv.state.run_directory import may_hold_a_run
from tests.faults.plans import COORDINATOR, LAUNCHER, RELAY
from tests.integration import harness
from tests.integration.harness import Client, ForkServer

INSIDE = Path(__file__).parent / "inside"
PATH = f"{INSIDE}:{harness.PATH}"


class Nursery(ForkServer):
    """Starts coordinators, clients and launchers in milliseconds, with the hooks in them."""

    def __init__(self, log: Path) -> None:
        super().__init__(log, FEDTIDE_FAULTS="1", PYTHONPATH=PATH)
        self._fact("", "ready", 120)

    def begin(self, arguments: list[str], log: Path) -> Client:
        """Fork ``fedcli`` or ``fedsrv``; what it says goes to a log."""
        if arguments[0] == "join":
            return self.start(arguments, log)
        files = {"stdin": os.devnull, "stdout": os.devnull, "log": str(log)}
        return Client(self, *self._forked({"argv": arguments, **files}), log)

    def status(self, process: Client) -> int | None:
        """Return a process's exit status; None while it runs."""
        with self._changed:
            return self._told.get(process.key, {}).get("status")


@dataclass
class Site:
    """What a run is started with."""

    config: Path
    out: Path
    data: Path | None
    """A partition; by default the launcher makes one."""
    port: int
    clients: dict[str, str] = field(default_factory=dict)
    """``--client-id`` by role; by default the launcher chooses."""
    server_data: Path | None = None
    relay_port: int | None = None
    """Where a relay of the clients listens; by default there is none."""

    @property
    def states(self) -> Path:
        """Return where clients keep their states: the launcher's in the run, others elsewhere."""
        return (self.out.with_name("sites") if self.clients else self.out) / "clients"

    def _resume(self) -> list[str]:
        """Begin, or go on with what a start has left."""
        return ["--resume"] if may_hold_a_run(self.out) else []

    def arguments(self, role: str) -> list[str]:
        """Return the command line of a process."""
        if role == LAUNCHER:
            more = ["--data", str(self.data)] if self.data else []
            more += [*self._resume(), "--device", "cpu", "--hosts", "2", "--no-forecast"]
            return ["launch", str(self.config), "--out", str(self.out), *more]
        address = f"127.0.0.1:{self.port}"
        relay = f"127.0.0.1:{self.relay_port}"
        if role == RELAY:
            beside = self.out.parent / "relay.py"
            more = ["--listen", relay, "--clients", "0-2", "--code", str(beside)]
            return ["relay", "--up", address, *more]
        if self.relay_port and role in self.clients and self.clients[role] != "evaluator":
            address = relay
        if role == COORDINATOR:
            more = ["--server-data", str(self.server_data)] if self.server_data else []
            more += ["--evaluator", *self._resume(), "--listen", address]
            return ["serve", str(self.config), "--out", str(self.out), *more]
        return [
            "join", "--client-id", self.clients[role], "--server", address,
            "--data", str(self.data), "--state-dir", str(self.states), "--device", "cpu",
        ]  # fmt: skip

    @property
    def roles(self) -> list[str]:
        """Return the roles of the processes that are started."""
        relays = [RELAY] if self.relay_port else []
        return [COORDINATOR, *relays, *self.clients] if self.clients else [LAUNCHER]


class Family:
    """The processes of a run: those started here, and what the launcher started of them."""

    def __init__(self, nursery: Nursery, site: Site, logs: Path) -> None:
        self.nursery, self.site, self.logs = nursery, site, logs
        self.running: dict[str, Client] = {}
        logs.mkdir(exist_ok=True)

    def start(self, role: str) -> None:
        """Start the process of a role."""
        log = self.logs / f"{role}.log"
        self.running[role] = self.nursery.begin(self.site.arguments(role), log)

    def ended(self) -> dict[str, int]:
        """Return the exit status of each process that ended since the last time."""
        found = {role: self.nursery.status(process) for role, process in self.running.items()}
        gone = {role: status for role, status in found.items() if status is not None}
        for role in gone:
            del self.running[role]
        return gone

    def kill(self, role: str, pid: int | None = None) -> int:
        """Kill the process of a role, all it has started, and wait; return how many there were."""
        if role in self.running:
            pid = self.running[role].pid
        if pid is None:
            return 0
        victims = _family_of(pid, self._mine())
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        psutil.wait_procs(victims, timeout=20)
        if role in self.running:
            self.running[role].wait()
        return len(victims)

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal to a process of the run; tell whether it was there."""
        if pid not in self._mine():
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def _mine(self) -> set[int]:
        """Return the processes that descend from the nursery; nobody else's are ever killed."""
        children = psutil.Process(self.nursery.process.pid).children(recursive=True)
        return {child.pid for child in children}

    def close(self) -> None:
        """Kill what is left."""
        for role in list(self.running):
            self.kill(role)
        self.ended()


def _family_of(pid: int, mine: set[int]) -> list[psutil.Process]:
    if pid not in mine:
        return []
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def log_ends(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else "(it said nothing)"
