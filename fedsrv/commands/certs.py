"""``fedsrv certs``: makes an authority, and certificates for server, clients and monitors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsrv.commands.options import Group

certs_app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Make an authority and certificates for TLS."
)


@certs_app.command("init")
def certs_init(
    directory: Annotated[Path, typer.Option("--dir", help="Where the files go.")] = Path("certs"),
) -> None:
    """Make a certificate authority."""
    from fedsrv.identity.certificates import init_authority

    for path in init_authority(directory):
        typer.echo(path)


@certs_app.command("issue")
def certs_issue(
    identity: Annotated[
        str, typer.Argument(help="A client id, a range 0-24, evaluator, monitor or server.")
    ],
    directory: Annotated[Path, typer.Option("--dir", help="The authority's files.")] = Path(
        "certs"
    ),
    host: Annotated[list[str] | None, typer.Option(help="A name the server is reached by.")] = None,
) -> None:
    """Issue a certificate and its key."""
    from fedsrv.identity.certificates import issue

    for path in issue(directory, identity, host or ()):
        typer.echo(path)
