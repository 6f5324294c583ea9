"""``python -m tests.integration.forks``: a fork server for all processes of tests.

A coordinator or launcher that begins as a fork shares torch with this process and starts in
milliseconds, where an ordinary one imports torch for seconds. What is forked is ``fedsrv`` with the
same arguments, as the launcher forks its own coordinator. Orders are those of ``fedcli.hosts``. An
order for ``fedsrv`` names two files more, ``stdin`` and ``stdout``, and may shorten the lease. An
order with ``call`` names a function: of a test, or of a program with the arguments in ``argv``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import typer.main

from fedcli import hosts
from fedmodels.host.warm import kept

PRELOADED = (
    *hosts.PRELOADED,
    "fedcli.data.sets.registry",
    "fedcli.data.store.findings",
    "fedcli.parts.pictures",
    "fedmodels.methods.gldp",
    "fedmodels.methods.pfedgrp",
    "fedmodels.nets.cnn",
    "fedmodels.nets.mlp",
    "fedsrv.cli",
    "fedsrv.coordinator",
    "fedsrv.launch.launcher",
    "fedsrv.parts.stages",
    "fedplugins.relays.relaying",
    "fedsrv.report.page",
    "fedsrv.state.lineage",
    "grpc._server",
    "sklearn.cluster",  # FedMLP's clusters: a second or two in each process
    "torch.utils.flop_counter",  # what a run counts by: a tenth of a second in each coordinator
    *filter(find_spec, ["dp_accounting"]),  # half a second in each process of a private run
)
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Forks(hosts.ForkServer):
    """The processes this one has started, by process id."""

    def start(self, order: dict[str, object]) -> None:
        """Fork a client, a ``fedsrv`` or a function."""
        if "call" in order:
            log = os.open(str(order["log"]), APPENDING, 0o644)
            return self._fork(order, [os.open(os.devnull, os.O_RDONLY), log, log], _call)
        if "stdin" not in order:
            return super().start(order)
        ways = {"stdin": os.O_RDONLY, "stdout": os.O_WRONLY, "log": APPENDING}
        files = [os.open(str(order[name]), way, 0o644) for name, way in ways.items()]
        return self._fork(order, files, _fedsrv)

    def _fork(self, order: dict[str, object], files: list[int], run: Callable[..., None]) -> None:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _become(order, files, run)
        for file in {*files}:
            os.close(file)
        self.running[pid] = order["id"]
        hosts._tell({"id": order["id"], "pid": pid})


def _fedsrv(order: dict[str, object]) -> None:
    from fedsrv.cli import main
    from fedsrv.transport.remote_cohort import RemoteCohort

    if lease_s := order.get("lease_s"):
        RemoteCohort.lease_s = float(lease_s)  # type: ignore[arg-type]
    assert isinstance(order["argv"], list)
    sys.argv = ["fedsrv", *map(str, order["argv"])]
    main()


def _call(order: dict[str, object]) -> None:
    module, _, name = str(order["call"]).partition(":")
    function, place = getattr(importlib.import_module(module), name), Path(str(order["place"]))
    if "argv" not in order:
        return function(place)
    assert isinstance(order["argv"], list)
    os.chdir(place)
    os.environ["COLUMNS"] = "200"
    sys.argv = order["argv"]
    with kept(()) if "--stay" in sys.argv else contextlib.nullcontext():
        function()  # the process of each run is a fork, too


def _become(order: dict[str, object], files: list[int], run: Callable[..., None]) -> None:
    """Turn the forked process into what runs with the order; never return."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for target, source in enumerate(files):
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    status = 0
    try:
        run(order)
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Preload, say so, and serve."""
    for name in PRELOADED:
        __import__(name)
    typer.main.get_command = functools.cache(typer.main.get_command)
    for program in ("fedcli.cli", "fedsrv.cli"):  # a fork makes no tree of commands of its own
        typer.main.get_command(sys.modules[program].app)
    gc.collect()
    gc.freeze()
    hosts._tell({"ready": True})
    Forks().serve()


if __name__ == "__main__":
    main()
