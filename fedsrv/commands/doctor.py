"""``fedsrv doctor``: what this machine is and has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

doctor_app = typer.Typer()


@doctor_app.command()
def doctor(
    certificates: Annotated[
        list[Path] | None,
        typer.Option(
            "--certificate",
            metavar="FILE",
            help="A certificate of which to say when it ends; once for each.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A coordinator of which to say whether it can be reached."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Print versions, machine, GPUs, network and variables, to put into a report of a fault.

    It names no directory, user or host.
    """
    from fedmodels.config.places import http_place
    from fedpb.pem import check_certificate, read_pem
    from fedsrv.commands.machine_page import facts, reached

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
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for subject, lines in found.items():
        for name, value in lines.items():
            typer.echo(f"{subject:12} {name:26} {value}")
