"""What a machine is and has, as ``fedsrv doctor`` prints it: facts to put into a report of a fault.

No path, no name of a user and no host is told, and no password.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil

from fedmodels.console.commands import PREFIXES
from fedmodels.console.printable import bytes_text, without_passwords
from fedmodels.host.machine import cores, free_bytes
from fedmodels.times import DOCTOR_S
from fedpb.unreachable import EXCEPTIONS, PROXIES

Facts = Mapping[str, str]
"""Lines by what they are about."""
THREADS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
"""Variables of others that change how a run computes."""


def facts() -> dict[str, Facts]:
    """Return what there is, by subject."""
    return {
        "versions": dict(_versions()),
        "machine": dict(_machine()),
        "GPUs": dict(_gpus()),
        "network": dict(_network()),
        "variables": dict(_variables()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "fedtide", version("fedtide")
    yield "python", platform.python_version()
    names = [re.split(r"[\s<>=!;\[]", line)[0] for line in requires("fedtide") or ()]
    for name in dict.fromkeys(names):
        with suppress(PackageNotFoundError):  # an extra that is not installed
            yield name, version(name)


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "processor", _processor()
    yield "cores", f"{cores()} of {os.cpu_count()}"
    memory = psutil.virtual_memory().total
    yield "memory", f"{bytes_text(free_bytes())} free of {bytes_text(memory)}"
    disk = shutil.disk_usage(Path.cwd())
    yield "disk here", f"{bytes_text(disk.free)} free of {bytes_text(disk.total)}"
    with suppress(ImportError):  # Windows
        import resource

        yield "open files", str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield "clock", f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"


def _processor() -> str:
    """Return the processor's name, and the instructions that torch uses of it."""
    import torch

    used = torch.backends.cpu.get_cpu_capability()
    with suppress(OSError):
        said = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        if found := re.search(r"model name\s*: (.+)", said):
            return f"{found[1]}, torch uses {used}"
    return f"{platform.processor()}, torch uses {used}"


def _gpus() -> Iterator[tuple[str, str]]:
    import torch

    for number in range(torch.cuda.device_count()):
        name, memory = torch.cuda.get_device_name(number), torch.cuda.mem_get_info(number)
        yield f"cuda:{number}", f"{name}, {bytes_text(memory[0])} free of {bytes_text(memory[1])}"
    if not torch.cuda.device_count():
        yield "cuda", "none" if torch.version.cuda else "none: torch is built for CPUs"
    elif torch.version.cuda:
        yield "CUDA of torch", torch.version.cuda


def _network() -> Iterator[tuple[str, str]]:
    for family, name in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family) as one:
                one.bind((name, 0))
            yield name, "can be listened on"
        except OSError as error:
            yield name, f"cannot listen there: {error.strerror}"


def reached(host: str, port: int) -> str:
    """Return whether a connection to a server can be made from here, past any proxy."""
    begun = time.monotonic()
    try:
        socket.create_connection((host, port), DOCTOR_S).close()
    except (socket.gaierror, UnicodeError):
        return "its name is not known here"
    except OSError as error:
        return f"cannot be reached: {error.strerror or f'no answer in {DOCTOR_S} s'}"
    return f"takes connections, after {(time.monotonic() - begun) * 1000:.0f} ms"


def _variables() -> Iterator[tuple[str, str]]:
    """Yield variables that change what a command does; those of ours by name alone."""
    for name in (*PROXIES, *EXCEPTIONS, *THREADS):
        if name in os.environ:
            yield name, without_passwords(os.environ[name])
    for name in sorted(os.environ):
        if name.startswith(tuple(f"{prefix}_" for prefix in PREFIXES)):
            yield name, "is set"
