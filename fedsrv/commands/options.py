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
        help="Number of processes that host clients; auto: one per client up to the number of "
        "cores, or by free GPU memory.",
    ),
]
HostCpus = Annotated[float, typer.Option(min=0.01, help="CPUs of a host, with --on ray.")]
HostGpus = Annotated[
    float, typer.Option(min=0, help="GPUs of a host, with --on ray; 0.25 is fine.")
]
NodeDir = Annotated[
    Path | None,
    typer.Option(help="With --on ray: where each node stores data and states, instead of in OUT."),
]
Forecast = Annotated[
    bool | None,
    typer.Option(
        "--forecast/--no-forecast",
        help="Estimate the run's duration from a trial during the first rounds; default on a "
        "terminal.",
    ),
]
Place = Annotated[str, typer.Option(help="HOST:PORT to listen at; port 0 picks a free one.")]
RunDirectory = Annotated[Path, typer.Option(help="The run directory.")]
Certificate = Annotated[Path | None, typer.Option(help="The server's certificate.")]
Key = Annotated[Path | None, typer.Option(help="Its key.")]
ClientAuthority = Annotated[
    Path | None, typer.Option(help="CA of the clients: requires client certificates (mutual TLS).")
]
RevokedCallers = Annotated[
    Path | None,
    typer.Option(help="Certificate revocation list; by default crl.pem next to --tls-client-ca."),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Allow addresses that other machines can reach without TLS."),
]
AwaitsEvaluator = Annotated[
    bool, typer.Option("--evaluator", help="Wait for the evaluator before the first round.")
]
OwnExamples = Annotated[
    Path | None, typer.Option(help="Examples at the server, for methods that train on them.")
]
AtOnce = Annotated[
    int,
    typer.Option(
        min=1, max=16, metavar="N",
        help="For a queue: how many runs are served at once, on the N ports after that of "
             "--listen, if cores and memory allow.",
    ),
]  # fmt: skip
WaitForSites = Annotated[
    float,
    typer.Option(
        min=1, metavar="SECONDS",
        help="For a queue: after a site has been missing for this long, waiting runs go first.",
    ),
]  # fmt: skip
PrintsEvents = Annotated[
    bool, typer.Option(hidden=True, help="Print events as JSON; end when standard input closes.")
]
Without = Annotated[
    list[int] | None,
    typer.Option(
        "--without",
        metavar="CLIENT",
        min=0,
        help="With --resume: continue without this client from now on.",
    ),
]
Forget = Annotated[
    list[str] | None,
    typer.Option(
        "--forget",
        metavar="CLIENT[:TASK]",
        help="With --resume: recompute the run from the start without this client, or without "
        "this task of it.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")]


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
