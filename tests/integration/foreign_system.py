"""Make this process look like Windows to fedtide: no fork, fcntl, prctl, resource or /proc.

The libraries that fedtide uses are imported first: they are those of Linux.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc  # noqa: F401
import numpy  # noqa: F401
import psutil
import rich.console  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch  # noqa: F401
import typer  # noqa: F401

HIDDEN = ("fcntl", "resource", "pwd", "grp", "termios")
LACKING = (
    "fork", "register_at_fork", "sched_getaffinity", "posix_fallocate", "O_CLOEXEC", "O_NONBLOCK",
)  # fmt: skip


class Locks(ModuleType):
    """Windows' module of locks: a byte of a file has one owner."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.held: set[tuple[int, int]] = set()

    def locking(self, handle: int, mode: int, count: int) -> None:
        byte = os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR)
        if byte in self.held:
            raise PermissionError(13, "it is locked")
        self.held.add(byte)


def hide() -> None:
    """Take away what Windows lacks."""
    for name in HIDDEN:
        sys.modules[name] = None
    sys.modules["msvcrt"] = Locks()
    for name in LACKING:
        delattr(os, name)
    memory = SimpleNamespace(peak_wset=1 << 30)  # psutil itself knows Windows
    psutil.Process = lambda *_: SimpleNamespace(memory_info=lambda: memory)
    psutil.virtual_memory = lambda: SimpleNamespace(available=4 << 30)
    ctypes.CDLL = _no_library
    real = builtins.open

    def opened(file: Any, *more: Any, **options: Any) -> Any:
        assert not str(file).startswith("/proc"), file
        return real(file, *more, **options)

    builtins.open = opened
    real_os_open = os.open

    def os_opened(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if not isinstance(path, int) and Path(os.fspath(path)).is_dir():
            raise PermissionError(13, "a directory", str(path))
        return real_os_open(path, flags, *more, **options)

    os.open = os_opened
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it opens directories elsewhere
    sys.platform = "win32"


def _no_library(name: str | None, *_: Any, **__: Any) -> Any:
    raise TypeError(f"LoadLibrary() argument 1 must be str, not {name}")


def main() -> None:
    """Run a config in this process, and ask its model; join a run elsewhere as client 0."""
    hide()
    config, out, sample, words = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
    import fedtide

    run = fedtide.run(config, backend="inprocess", out=out)
    print("inprocess", run.summary["state_sha256"])
    try:
        fedtide.run(config, out=f"{out}-processes")
    except fedtide.FedtideError as error:
        print("processes:", error)
    from fedcli.cli import main as fedcli

    with suppress(SystemExit):
        fedcli(["predict", "--run", out, "--client", "0", sample])
    fedcli(words)


if __name__ == "__main__":
    main()
