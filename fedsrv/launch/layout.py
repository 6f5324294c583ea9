"""Who shares a process, and where it trains: a function of the clients and the machine.

It decides nothing of a run but its speed: every layout ends in the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from fedmodels.tensors.bundle import EVALUATOR
from fedsrv.launch.gpus import Gpu

HOST_BYTES = 200 << 20
"""Memory that a process on the CPU is assumed to need."""
FEW = 4
"""So many clients have a process each on any machine; where there are more, each core has one."""
ON_GPU_BYTES, BESIDE_GPU_BYTES = 4 << 30, 1 << 30
"""Memory that a process with a GPU is assumed to need, of the GPU and of the machine. Half a
gigabyte of each holds CUDA itself."""
MAX_ON_A_GPU = 4
"""Processes that share a GPU at most. While one prepares a step, the GPU does another's."""


@dataclass(frozen=True)
class Machine:
    """What hosts can have."""

    cores: int
    free: int
    """Bytes of memory."""
    gpus: Sequence[Gpu] = ()

    @property
    def fit(self) -> int:
        """How many processes its memory has room for."""
        return max(1, self.free * 7 // 10 // (BESIDE_GPU_BYTES if self.gpus else HOST_BYTES))


@dataclass(frozen=True)
class Crowd:
    """Whom hosts share among themselves."""

    clients: int
    cohort: int
    """How many train in a round."""
    hosts: int | None = None
    """How many; by default as many as pay."""
    evaluator: bool = False
    """Whether there is one; it has a host of its own."""


def layout(crowd: Crowd, machine: Machine) -> dict[str, str]:
    """Return the device of each host by its ``--client-id``, the evaluator's last."""
    places = places_on(machine.gpus, MAX_ON_A_GPU)
    hosts = crowd.hosts
    if hosts is None and places:
        most = hosts_on_gpus(places, machine, crowd.evaluator)
        hosts = min(crowd.clients, crowd.cohort, most)
    elif hosts is None:
        hosts = hosts_without_gpus(crowd.clients, crowd.cohort, machine)
    ids = [*host_ranges(crowd.clients, hosts), *([EVALUATOR] if crowd.evaluator else [])]
    return dict(zip(ids, cycle(places or ["cpu"]), strict=False))


def places_on(gpus: Sequence[Gpu], most: int) -> list[str]:
    """Return the device of each host that GPUs have room for: one on each GPU, then a second one.

    The GPUs with most room come first. Where none has room, that with the most memory gets a host.
    """
    room = {gpu.device: min(most, gpu.free // ON_GPU_BYTES) for gpu in gpus}
    if gpus and not any(room.values()):
        return [max(gpus, key=lambda gpu: gpu.free).device]
    emptiest = sorted(room, key=lambda device: -room[device])
    return [device for turn in range(most) for device in emptiest if turn < room[device]]


def hosts_on_gpus(places: Sequence[str], machine: Machine, evaluator: bool) -> int:
    """Return how many hosts pay on GPUs: as many as cores, but one a GPU in any case."""
    room = sum(gpu.free // ON_GPU_BYTES for gpu in machine.gpus) - evaluator
    paying = max(machine.cores, len(set(places)))
    return max(1, min(len(places), room, machine.fit, paying))


def hosts_without_gpus(clients: int, cohort: int, machine: Machine) -> int:
    """Return how many client processes pay on cores, one for each client if they are few.

    Where clients share processes, there are no more of them than clients that train in a round.
    """
    if clients <= min(machine.fit, max(FEW, machine.cores)):
        return clients
    return min(machine.fit, machine.cores, cohort)


def host_ranges(clients: int, hosts: int) -> list[str]:
    """Return the client ids of each host as ``--client-id`` says them; never more than clients.

    With three hosts, each host gets every third client. All hosts begin with their lowest ids, so
    uploads arrive in about the order in which they are reduced.
    """
    hosts = min(hosts, clients)
    ranges = [range(first, clients, hosts) for first in range(hosts)]
    step = f":{hosts}" if hosts > 1 else ""
    return [f"{r[0]}-{r[-1]}{step}" if len(r) > 1 else str(r[0]) for r in ranges]
