"""A Ray cluster to run on, as ``--on ray`` or ``--on ray://HEAD:PORT`` names it.

The first is the cluster of this machine, which is started if there is none. The second has the
address that ``ray start --head`` printed; this machine must be one of that cluster's nodes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmodels.config.places import check_address
from fedmodels.errors import ConfigError, RunFailed, pip_line, reason_of
from fedmodels.host.processes import Box, Child, Popen, started
from fedmodels.times import CONNECTED_S, RAY_LEAVING_S, REACHED_S

RAY = "ray"
ADVICE = "give the address that ray start --head printed, on a machine of the cluster"


@dataclass(frozen=True)
class RayPlace:
    """A Ray cluster, and what one host takes of it."""

    place: str = RAY
    """``ray`` or ``ray://HEAD:PORT``."""
    cpus: float = 1.0
    gpus: float = 0.0
    """A fraction lets several hosts share a GPU."""
    node_dir: Path | None = None
    """A directory on each node for data and states; without it, all nodes see those of the run."""


def ray_place(
    on: str | None, cpus: float, gpus: float, node_dir: Path | None, device: str
) -> RayPlace | None:
    """Return the cluster that options of ``fedsrv launch`` name, if any; ConfigError if unclear."""
    if on is None:
        if (cpus, gpus, node_dir) != (1.0, 0.0, None):
            raise ConfigError("--host-cpus, --host-gpus and --node-dir need --on ray")
        return None
    address_in(on)
    if device != "auto":
        raise ConfigError(f"--device {device} is of this machine; with --on give --host-gpus")
    if node_dir is not None and not node_dir.is_absolute():
        raise ConfigError(f"--node-dir {node_dir} is not absolute, and lies on other machines")
    return RayPlace(on, cpus, gpus, node_dir)


def address_in(place: str) -> str | None:
    """Return HEAD:PORT of ``ray://HEAD:PORT``; None for ``ray``.

    Raises:
        ConfigError: it is neither.
    """
    if place == RAY:
        return None
    found = re.fullmatch(r"ray://(.+)", place)
    if found is None:
        raise ConfigError(f"--on {place!r} is neither ray nor ray://HEAD:PORT")
    check_address(found[1], "--on ray://")
    return found[1]


UNITS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""An option of ``ray.remote`` -> what Ray calls it in a node's resources."""


def taken(takes: Mapping[str, Any]) -> dict[str, float]:
    """Return what options of ``ray.remote`` take of a node, by Ray's names."""
    return {UNITS[name]: n for name, n in takes.items() if name in UNITS and n}


def lacking(takes: Mapping[str, Any], nodes: Iterable[Mapping[str, float]]) -> str:
    """Return what is taken that no node has, were it idle; empty where one has all of it."""
    wanted = taken(takes)
    if any(all(node.get(unit, 0) >= n for unit, n in wanted.items()) for node in nodes):
        return ""
    return ", ".join(f"{n:g} {unit}" for unit, n in wanted.items())


class RayCluster:
    """A Ray cluster, through the process that talks to it."""

    def __init__(self, place: str, log: Path, source: str, box: Box) -> None:
        """Connect.

        Args:
            place: ``ray`` or ``ray://HEAD:PORT``.
            log: for what Ray prints.
            source: what the box calls the cluster.
            box: gets what :mod:`fedsrv.ray.ray_driver` tells of it.

        Raises:
            ConfigError: the extra is not installed, or ``place`` names no cluster.
            RunFailed: there is no cluster at this address, or it does not answer in time.
        """
        address = address_in(place)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f"--on ray needs a package more: {pip_line('ray')}")
        self._who = f"the Ray cluster at {address or 'this machine'}"
        if address is not None:
            self._reach(address)
        command = ["-m", "fedsrv.ray.ray_driver", str(os.getpid())]
        process = started(command, log)
        try:
            facts = self._connected(process, address)
        except BaseException:
            process.kill()
            with process:  # waits for its end, and closes its pipes
                raise
        self.nodes: list[dict[str, float]] = facts["nodes"]
        """What each node has that is alive, by Ray's names."""
        self.here: str = facts["here"]
        """This machine's address in the cluster."""
        self._child = Child(source, process, box)

    def _reach(self, address: str) -> None:
        """Check that something listens at the address, before Ray tries it for minutes."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACHED_S).close()
        except OSError as error:
            late = isinstance(error, TimeoutError)
            why = f"no answer in {REACHED_S:g} s" if late else reason_of(error)
            raise RunFailed(f"cannot use {self._who}: {why}; {ADVICE}") from None

    def _connected(self, process: Popen, address: str | None) -> dict[str, Any]:
        """Have the process connect; return what it tells of the cluster."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"address": address}).encode() + b"\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], CONNECTED_S)[0]:
            raise RunFailed(
                f"cannot use {self._who}: it did not answer as Ray does in {CONNECTED_S:g} s; "
                f"{ADVICE}"
            )
        facts: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
        if "nodes" not in facts:
            why = facts.get("error", "the process that talks to it has ended")
            raise RunFailed(f"cannot use {self._who}: {why}; {ADVICE}")
        return facts

    def start(
        self,
        key: str,
        function: Callable[[Any], Iterator[str | dict[str, Any]]],
        given: Mapping[str, Any],
        takes: Mapping[str, Any],
        log: Path,
    ) -> None:
        """Run a function on a node that has room; it replaces what ran under this key.

        Args:
            key: under which the box hears of it.
            function: as :mod:`fedsrv.ray.ray_driver` says; nodes import it by its name.
            given: what it is called with, for JSON.
            takes: what it takes of a node, as ``ray.remote`` takes it.
            log: for the lines that it yields.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        order = {"id": key, "function": name, "given": given, "takes": takes, "log": str(log)}
        self._child.tell(order)

    def end(self) -> None:
        """End everything that runs on the cluster; Ray has a limited time for it."""
        self._child.end(RAY_LEAVING_S)
