"""The hosts of a launched run: how they are started and ended, and what their logs say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedmodels.config.places import gpu_of
from fedmodels.host.machine import cores, free_bytes
from fedmodels.host.processes import Box, Child, started
from fedsrv.launch.forked import fork_hosts
from fedsrv.launch.gpus import Look
from fedsrv.launch.layout import Crowd, Machine, layout

FORECAST = "forecast"
BESIDE = 5
"""By how much a trial gives way to the run: it has a fifth of a core that a client wants."""
"""The id, among those of hosts, of the trial that says how long a run takes; and its log."""


@dataclass(frozen=True)
class Joining:
    """What ``fedcli join`` is told on every host."""

    data: Path
    states: Path
    device: str
    """``auto``, ``cpu`` or ``cuda:K``."""
    further: tuple[str, ...] = ()
    """More options."""
    ahead: Sequence[str] = ()
    """Modules that every host needs, and that take long to import."""

    def arguments(self, clients: str, server: str, device: str) -> list[str]:
        """Return the arguments of ``fedcli``.

        Args:
            clients: as ``--client-id`` says them.
            server: HOST:PORT of the coordinator.
            device: of this host.
        """
        found = ["join", "--client-id", clients, "--server", server, "--data", str(self.data)]
        found += ["--state-dir", str(self.states), "--device", device]
        return [*found, *self.further]


class Hosts(Protocol):
    """Where hosts run, as the launcher sees it.

    The launcher hears of hosts in its box, from the source ``hosts``. The line ``{"id": "0-4",
    "status": 0}`` comes when the host of clients 0 to 4 has ended, with ``why`` if the host's log
    cannot say it. One with ``waits`` comes while no node has room for the host, one with ``node``
    when the host has a node. An exit status comes when all hosts have gone at once.
    """

    @property
    def name(self) -> str:
        """The name, in lines, of what all hosts depend on: when it ends, they all end."""
        ...

    def why(self, status: int) -> str:
        """Return why all hosts have gone at once, by the exit status that the box tells."""
        ...

    @property
    def listen(self) -> str:
        """Where the coordinator is to listen, so that hosts reach it; known after ``begin``."""
        ...

    @property
    def serve_options(self) -> Sequence[str]:
        """More options of ``fedsrv serve`` that hosts need; known after ``begin``."""
        ...

    @property
    def gpus(self) -> int:
        """How many GPUs of this machine hosts are spread over; known after ``divide``."""
        ...

    def begin(self, box: Box) -> None:
        """Get ready to start hosts. The launcher has no thread yet."""
        ...

    def divide(self, crowd: Crowd) -> list[str]:
        """Return the ``--client-id`` of each host, the evaluator's last."""
        ...

    def start(self, clients: str, server: str) -> None:
        """Start a host, or start it again after its end."""
        ...

    def forecast(self, config: Path, data: Path, told: Path) -> bool:
        """Start a trial that says in a file how long the run takes; tell whether there is one."""
        ...

    def begin_again(self) -> None:
        """Get ready once more, after all hosts have gone at once."""
        ...

    def end(self) -> None:
        """End all that was started."""
        ...


class LocalHosts:
    """Hosts on this machine, forked from one process that has imported torch."""

    name = "hosts"
    listen = "127.0.0.1:0"
    serve_options: Sequence[str] = ()

    def __init__(self, joining: Joining, logs: Path) -> None:
        """Remember how hosts join, and where their logs lie."""
        self._joining, self._logs = joining, logs
        self._server: Child | None = None
        self._look: Look | None = None
        self._devices: dict[str, str] = {}

    def begin(self, box: Box) -> None:
        """Fork the fork server, and what looks at the GPUs.

        Raises:
            ConfigError: the one GPU that is asked for cannot be used.
        """
        self._box, self._look = box, Look(self._joining.device, self._log("hosts"))
        if gpu_of(self._joining.device) is not None:
            self._look.gpus()  # what is wrong is told before data are dealt out
        self._server = Child("hosts", fork_hosts(self._log("hosts"), self._joining.ahead), box)

    def begin_again(self) -> None:
        """Start another fork server, as an ordinary process."""
        process = started(["-m", "fedcli.hosts", *self._joining.ahead], self._log("hosts"))
        self._server = Child("hosts", process, self._box)

    def divide(self, crowd: Crowd) -> list[str]:
        """Give every host every n-th client; by default as many hosts as pay here."""
        assert self._look is not None
        self._devices = layout(crowd, Machine(cores(), free_bytes(), self._look.gpus()))
        return [*self._devices]

    @property
    def gpus(self) -> int:
        """Count the GPUs that a host has."""
        return len({*self._devices.values()} - {"cpu"})

    def start(self, clients: str, server: str) -> None:
        """Fork a host; what it says goes to a log of its own."""
        assert self._server is not None
        argv = self._joining.arguments(clients, server, self._devices[clients])
        log = self._log(f"client-{clients}")
        self._server.tell({"id": clients, "argv": argv, "log": str(log)})

    def forecast(self, config: Path, data: Path, told: Path) -> bool:
        """Fork the trial; its end comes into the box as that of a host."""
        assert self._server is not None
        device, log = next(iter(self._devices.values())), self._log(FORECAST)
        argv = ["forecast", str(config), "--data", str(data), "--device", device]
        argv += ["--told", str(told)]
        self._server.tell({"id": FORECAST, "argv": argv, "log": str(log), "nice": BESIDE})
        return True

    def end(self) -> None:
        """End the fork server, which kills every host."""
        if self._look is not None:
            self._look.end()
        if self._server is not None:
            self._server.end()

    def why(self, status: int) -> str:
        """Return why the fork server has ended."""
        return error_in(self._log("hosts")) if status > 0 else f"killed by signal {-status}"

    def _log(self, source: str) -> Path:
        return self._logs / f"{source}.log"


def notes_in(log: Path) -> list[str]:
    """Return the notes on the data in the log of a partition, each once."""
    try:
        lines = log.read_text("locale", "replace").splitlines()
    except OSError:
        return []
    said = (line.partition("note: ")[2] for line in lines if " fedcli.data." in line)
    return [f"note: {text}" for text in dict.fromkeys(said) if text]


def error_in(log: Path) -> str:
    """Return the last error line of a log, without its prefix; empty where there is none."""
    try:
        lines = log.read_text("locale", "replace").splitlines()
    except OSError:
        return ""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else (lines[-1] if lines else "")
