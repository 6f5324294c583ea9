"""Where things run and listen, as options say it: checked before anything starts."""

from __future__ import annotations

import re

from fedmodels.errors import ConfigError

MAX_PORT = 65_535


def check_address(text: str, option: str, lowest_port: int = 1) -> None:
    """Check that a gRPC address has a host and a port.

    Raises:
        ConfigError: says how one is written.
    """
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


def check_device(text: str) -> None:
    """Check that this machine has a device.

    Raises:
        ConfigError: says what it has.
    """
    import torch

    if text == "auto":
        return
    found = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", text)
    if found is None:
        raise ConfigError(f"--device {text!r} is not auto, cpu or cuda:K")
    if not text.startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {text}: this machine has no CUDA device; use --device cpu")
    if int(found[1] or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(f"--device {text}: this machine has cuda:0 to cuda:{last}")
