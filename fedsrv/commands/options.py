"""The options of ``fedsrv``'s commands with what their help says, and what some do to a process."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from fedmodels.console.log_lines import LogLevel, set_up_logging
from fedmodels.host.machine import require_linux

T = TypeVar("T")


def _number_of_hosts(text: str) -> int | None:
    """Return the number that ``--hosts`` gives; None for ``auto``."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text} is neither a number of processes nor auto")
    return int(text)


On = Annotated[
    str | None,
    typer.Option(metavar="PLACE", help="ray or ray://HEAD:PORT; by default this machine."),
]
Hosts = Annotated[
    int | None,
    typer.Option(
        parser=_number_of_hosts,
        metavar="[N|auto]",
        help="Client host processes; auto: one for each client up to the number of cores, or by "
        "the free memory of GPUs.",
    ),
]
HostCpus = Annotated[float, typer.Option(min=0.01, help="CPUs of a host, with --on ray.")]
HostGpus = Annotated[
    float, typer.Option(min=0, help="GPUs of a host, with --on ray; 0.25 is fine.")
]
NodeDir = Annotated[
    Path | None,
    typer.Option(help="With --on ray: data and states lie here on each node, not in OUT."),
]
Forecast = Annotated[
    bool | None,
    typer.Option(
        "--forecast/--no-forecast",
        help="Try a client's work beside the first rounds, and say how long the run will take; "
        "the default on a terminal.",
    ),
]
Place = Annotated[str, typer.Option(help="HOST:PORT; port 0 is any free one.")]
RunDirectory = Annotated[Path, typer.Option(help="The run directory.")]
Certificate = Annotated[Path | None, typer.Option(help="The server's certificate.")]
Key = Annotated[Path | None, typer.Option(help="Its key.")]
ClientAuthority = Annotated[
    Path | None, typer.Option(help="Authority of the clients: they must show certificates.")
]
RevokedCallers = Annotated[
    Path | None,
    typer.Option(help="Certificates that are revoked; by default crl.pem beside --tls-client-ca."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow reachable addresses without TLS.")
]
AwaitsEvaluator = Annotated[
    bool, typer.Option("--evaluator", help="Wait for the evaluator before the first round.")
]
OwnExamples = Annotated[
    Path | None,
    typer.Option(help="Examples of the server's own, for methods that train on them."),
]
AtOnce = Annotated[
    int,
    typer.Option(
        min=1, max=16, metavar="N",
        help="Of a queue: runs that are served side by side, at the N ports after that of "
        "--listen, where cores and memory allow.",
    ),
]  # fmt: skip
WaitForSites = Annotated[
    float,
    typer.Option(
        min=1, metavar="SECONDS",
        help="Of a queue: a run that misses a site for so long lets those that wait go first.",
    ),
]  # fmt: skip
PrintsEvents = Annotated[
    bool, typer.Option(hidden=True, help="Print events; end with standard input.")
]
Without = Annotated[
    list[int] | None,
    typer.Option(
        "--without",
        metavar="CLIENT",
        min=0,
        help="With --resume: go on without this client, from now on.",
    ),
]
Forget = Annotated[
    list[str] | None,
    typer.Option(
        "--forget",
        metavar="CLIENT[:TASK]",
        help="With --resume: compute the run again from its beginning without this client, or "
        "without this task of it.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]


def check_without(
    without: Sequence[T] | None, resume: bool, option: str = "--without"
) -> Sequence[T]:
    """Return whom to go on without; ConfigError if there is nothing to go on with."""
    if without and not resume:
        from fedmodels.errors import ConfigError

        raise ConfigError(f"{option} needs --resume: a new run has as many clients as its config")
    return without or ()


def wanted(words: Sequence[str]) -> list[int | tuple[int, int]]:
    """Return the clients, and the clients and tasks, that ``--forget`` names; or ConfigError."""
    found = list[int | tuple[int, int]]()
    for word in words:
        if re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", word, re.ASCII) is None:
            from fedmodels.errors import ConfigError

            raise ConfigError(f"--forget {word!r}: give a client, as 3, or its task 2, as 3:2")
        client, _, task = word.partition(":")
        found.append((int(client), int(task)) if task else int(client))
    return found


def set_up(quiet: bool, log_level: LogLevel, as_json: bool) -> LogLevel:
    """Prepare the process: logging, one thread unless told otherwise, a heap for large payloads.

    Returns:
        The level of what is said, which ``--quiet`` raises.
    """
    require_linux()
    level = LogLevel.WARNING if quiet else log_level
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_up_logging(level, as_json=as_json)
    from fedmodels.host.machine import keep_large_blocks

    keep_large_blocks()
    return level
