"""Where things run and listen, as options say it: checked before anything starts."""

from __future__ import annotations

import re

from fedmodels.errors import ConfigError

MAX_PORT = 65_535


def check_address(text: str, option: str, lowest_port: int = 1) -> None:
    """Check that a gRPC address has a host and a port; ConfigError says how one is written."""
    if re.match(r"unix(-abstract)?:.", text):
        return
    target = re.sub(r"^(dns:(///)?|ipv4:|ipv6:)", "", text)
    found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^:/\s\[\]]+):([0-9]{1,5})", target)
    if found is None or not lowest_port <= int(found[1]) <= MAX_PORT:
        raise ConfigError(
            f"{option} {text!r} is not HOST:PORT, such as 127.0.0.1:5055 or [::1]:5055, with a "
            f"port from {lowest_port} to {MAX_PORT}"
        )


def http_place(text: str, option: str) -> tuple[str, int]:
    """Return host and port of a page: ``PORT`` is on loopback, ``HOST:PORT`` where it says.

    Raises:
        ConfigError: it is neither.
    """
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > MAX_PORT or re.search(r"[/\s]", host):
        raise ConfigError(f"{option} {text!r} is neither PORT nor HOST:PORT, such as 8080")
    return host.strip("[]") or "127.0.0.1", int(port)


def gpu_of(device: str) -> int | None:
    """Return the number of the GPU that a device names; None for ``auto`` and ``cpu``.

    Raises:
        ConfigError: it names nothing.
    """
    found = re.fullmatch(r"auto|cpu|cuda(?::([0-9]{1,3}))?", device)
    if found is None:
        raise ConfigError(f"--device {device!r} is not auto, cpu or cuda:K")
    return int(found[1] or 0) if device.startswith("cuda") else None


def check_gpu(device: str, count: int) -> None:
    """Check that a machine with so many GPUs has a device; ConfigError says what it has."""
    gpu = gpu_of(device)
    if gpu is None or gpu < count:
        return
    if not count:
        raise ConfigError(f"--device {device}: this machine has no CUDA device; use --device cpu")
    raise ConfigError(f"--device {device}: this machine has cuda:0 to cuda:{count - 1}")
