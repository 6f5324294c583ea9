"""A Ray cluster to run on, as ``--on ray`` or ``--on ray://HEAD:PORT`` names it.

The first is the cluster of this machine, which is started if there is none. The second has the
address that ``ray start --head`` printed; this machine must be one of that cluster's nodes.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmodels.config.places import check_address
from fedmodels.errors import ConfigError, RunFailed

RAY = "ray"


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
    """Return the cluster that options of ``fedsrv launch`` name, if any.

    Raises:
        ConfigError: the options do not go together, or ``on`` names no cluster.
    """
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


@contextmanager
def connected(place: str) -> Iterator[Any]:
    """Give the module ``ray``, connected; disconnect at the end unless it was connected before.

    Args:
        place: ``ray`` or ``ray://HEAD:PORT``.

    Raises:
        ConfigError: the extra is not installed, or ``place`` names no cluster.
        RunFailed: there is no cluster at this address, or it runs other versions.
    """
    address = address_in(place)
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("--on ray needs a package more: pip install 'fedtide[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise RunFailed(
            f"cannot use the Ray cluster at {address or 'this machine'}: {why} "
            "(give the address that ray start --head printed, on a machine of the cluster)"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()
