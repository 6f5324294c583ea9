"""One host on a node of a cluster, as the actor runs it there.

The node needs fedtide installed. The host is a fork of ``fedcli.hosts``, as on the launcher's
machine: it ends when the actor does, however that dies.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from fedmodels.host.files import no_locks, wait_for_lock
from fedmodels.host.processes import Box, Child, ProcessLine, started
from fedpb.unreachable import EXCEPTIONS


@dataclass(frozen=True)
class Dealing:
    """Data that a node deals out itself."""

    config: str
    """The experiment's TOML."""
    root: str
    """Where the clients' directories go, on the node."""


@dataclass(frozen=True)
class HostInstructions:
    """What one host is told for its time on a node."""

    clients: str
    """The ids of its clients, as ``--client-id`` takes them."""
    arguments: Sequence[str]
    """Arguments of ``fedcli``, without the options of ``secrets``."""
    directory: str
    """The launcher's working directory; the host works there too, if its node has it."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Option of ``fedcli join`` -> the content of the file that it names."""
    dealing: Dealing | None = None

    @property
    def host(self) -> str:
        """Return where the coordinator is."""
        server = self.arguments[self.arguments.index("--server") + 1]
        return server.rpartition(":")[0].strip("[]")


def remote_host(given: dict[str, Any]) -> Iterator[str | dict[str, Any]]:
    """Run a host to its end; yield the lines of its log, and its exit status at last.

    Args:
        given: the fields of its :class:`HostInstructions`.
    """
    dealing = given.pop("dealing")
    stay = HostInstructions(**given)
    if Path(stay.directory).is_dir():
        os.chdir(stay.directory)
    if dealing is not None and (error := deal(Dealing(**dealing))):
        yield error
        yield {"status": 1}
        return
    with TemporaryDirectory(prefix="fedtide-host-") as private:
        secrets = _written(stay.secrets, Path(private))
        os.environ[EXCEPTIONS[0]] = stay.host  # no proxy is between nodes of a cluster
        yield from _hosted(stay.clients, [*stay.arguments, *secrets])


def deal(dealing: Dealing) -> str:
    """Deal out data on this node unless that was done before; return what went wrong, or nothing.

    Several hosts of a node may ask at the same time; one of them deals.
    """
    root = Path(dealing.root)
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(f".{root.name}.lock").open("w") as lock:
        try:
            wait_for_lock(lock.fileno())
        except OSError as error:
            return f"error: {root}: {no_locks(error) or error.strerror}\n"
        if root.is_dir():
            return ""
        with TemporaryDirectory(prefix=".dealing-", dir=root.parent) as made:
            config, data = Path(made) / "config.toml", Path(made) / "data"
            config.write_text(dealing.config, "utf-8")
            command = ["fedcli", "partition", str(config), "--out", str(data), "--no-picture"]
            done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
            if done.returncode:
                return done.stderr or f"error: fedcli partition ended with {done.returncode}\n"
            data.rename(root)
    return ""


def _written(secrets: Mapping[str, str], private: Path) -> Iterator[str]:
    """Write files that the owner alone may read; yield the options that name them."""
    for option, content in secrets.items():
        path = private / option.lstrip("-")
        path.touch(mode=0o600)
        path.write_text(content, encoding="utf-8")
        yield from (option, str(path))


def _hosted(clients: str, arguments: Sequence[str]) -> Iterator[str | dict[str, Any]]:
    """Run a host in a fork server; yield the lines that both log, and the host's exit status."""
    box: Box = queue.SimpleQueue()
    server = started(["-m", "fedcli.hosts"])
    assert server.stderr is not None
    threading.Thread(target=_listen, args=(server.stderr, box), daemon=True).start()
    child = Child("hosts", server, box)
    child.tell({"id": clients, "argv": list(arguments), "log": "/dev/stderr"})
    status, heard = None, 2
    while heard:  # the facts of the fork server, and what it and the host log
        said = box.get()
        if said.status is not None:
            heard -= 1
        elif said.source == "log":
            yield f"{said.line}\n"
        elif "status" in (fact := json.loads(said.line)):
            status = int(fact["status"])
            child.end()
    yield {"status": 1 if status is None else status}


def _listen(lines: IO[bytes], box: Box) -> None:
    """Put lines into a box as they come, and a status after the last one."""
    with lines, suppress(OSError):
        for line in lines:
            box.put(ProcessLine("log", line.decode(errors="replace").rstrip("\n")))
    box.put(ProcessLine("log", "", 0))
