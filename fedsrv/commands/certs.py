"""``fedsrv certs``: an authority, the certificates it issues, and those it revokes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsrv.commands.options import Group

certs_app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Make an authority and certificates for TLS."
)

AuthorityDir = Annotated[Path, typer.Option("--dir", help="The authority's files.")]


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
        str,
        typer.Argument(
            help="A client id, a range 0-24, evaluator, watcher, operator, relay:0-24 or server."
        ),
    ],
    directory: AuthorityDir = Path("certs"),
    host: Annotated[
        list[str] | None, typer.Option(help="A name the server or relay is reached by.")
    ] = None,
) -> None:
    """Issue a certificate and its key."""
    from fedsrv.identity.certificates import issue

    if identity == "monitor":
        typer.echo("note: a monitor is called watcher by now, or operator if it steers", err=True)
    for path in issue(directory, identity, host or ()):
        typer.echo(path)


@certs_app.command("revoke")
def certs_revoke(
    which: Annotated[
        str,
        typer.Argument(metavar="IDENTITY|SERIAL", help="Whose certificates, or which one."),
    ],
    directory: AuthorityDir = Path("certs"),
) -> None:
    """Revoke certificates: coordinators and relays that have crl.pem refuse them at once."""
    from fedsrv.identity.revoking import revoke

    found = revoke(directory, which)
    for line in found or [f"nothing new: all certificates of {which} are revoked already"]:
        typer.echo(line)
    typer.echo(f"written to {directory / 'crl.pem'}: bring it to where --tls-client-ca lies")
