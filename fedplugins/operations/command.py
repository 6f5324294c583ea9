"""``fedsrv backup``, ``restore`` and ``doctor``, and ``fedcli forecast``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fedmodels.console.log_lines import LogLevel, set_up_logging
from fedmodels.console.options import AsJson, Config, Device, Sets
from fedmodels.console.printable import json_text
from fedmodels.errors import RunFailed

server_app = typer.Typer()
client_app = typer.Typer()
ForecastTold = Annotated[Path | None, typer.Option("--told", hidden=True)]
"""Where a launch reads the forecast, as code of one's own may print. The trial lies beside."""


@server_app.command()
def backup(
    run: Annotated[Path, typer.Argument(help="The run directory; the run may continue meanwhile.")],
    to: Annotated[Path, typer.Argument(metavar="DEST", help="A new directory.")],
) -> None:
    """Make a consistent backup of a coordinator, also during a run."""
    from fedplugins.operations.backup import backup as copy

    committed = copy(run, to)
    typer.echo(f"{to} contains the run as of interaction {committed + 1}")


@server_app.command()
def restore(
    copy: Annotated[Path, typer.Argument(metavar="BACKUP", help="What fedsrv backup made.")],
    run: Annotated[Path, typer.Argument(help="The run directory to create from it.")],
) -> None:
    """Restore a backup into a new run directory, to continue with --resume."""
    from fedplugins.operations.backup import restore as restored

    taken = restored(copy, run)
    typer.echo(
        f"{run} is the run as of {taken['taken_at']}, after interaction "
        f"{int(taken['committed']) + 1}: continue with --resume --out {run}"
    )


@server_app.command()
def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run directory: also print what this release would change for it, and exit with "
            "1 if it cannot continue the run."
        ),
    ] = None,
    certificates: Annotated[
        list[Path] | None,
        typer.Option(
            "--certificate",
            metavar="FILE",
            help="A certificate whose expiry is shown; may be repeated.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A coordinator to which the connection is tested."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Print versions, hardware, network and variables for a bug report.

    It names no directory, user or host.
    """
    from fedmodels.config.places import http_place
    from fedpb.pem import check_certificate, read_pem
    from fedplugins.operations.machine_page import facts, reached

    refused = ""
    place = None if server is None else http_place(server, "--server")
    found = facts()
    if place is not None:
        found["network"] = {**found["network"], "the server": reached(*place)}
    option, ends = "--certificate", {}
    for path in certificates or ():
        until = check_certificate(path, read_pem(path, option), option).not_valid_after_utc
        ends[path.name] = f"ends on {until:%Y-%m-%d %H:%M} UTC"
    if ends:
        found["certificates"] = ends
    if run is not None:
        from fedplugins.operations.upgrade import upgrade

        found["the run"], refused = upgrade(run)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        for subject, lines in found.items():
            for name, value in lines.items():
                typer.echo(f"{subject:12} {name:26} {value}")
    if refused:
        raise RunFailed(f"this release cannot continue the run: {refused}")


@client_app.command("forecast", rich_help_panel="Run")
def tell_forecast(
    config: Config,
    data: Annotated[
        Path | None, typer.Option(help="The clients' data; by default a temporary partition.")
    ] = None,
    sets: Sets = None,
    device: Device = "auto",
    told: ForecastTold = None,
    as_json: AsJson = False,
) -> None:
    """Estimate a run's duration on this machine from a trial of a client's first training."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_up_logging(LogLevel.ERROR)
    import torch

    from fedmodels.config.places import check_gpu
    from fedmodels.facts.config_file import read_experiment
    from fedmodels.host.devices import device_of
    from fedmodels.host.machine import keep_large_blocks
    from fedplugins.operations.forecasting import of_config

    check_gpu(device, 0 if device == "cpu" else torch.cuda.device_count())
    keep_large_blocks()
    file = told.resolve() if told else None
    place = file.parent if file else None
    found = of_config(read_experiment(config, sets or ()), data, device_of(device), place)
    if file is not None:
        file.write_text(json_text(found.to_dict()), "utf-8")
    for line in [json_text(found.to_dict())] if as_json else found.lines():
        typer.echo(line)
