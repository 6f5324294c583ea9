"""``fedsrv certs``: an authority, the certificates it issues, and those it revokes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmodels.console.options import CommandGroup
from fedsrv.commands.options import Place

certs_app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Create a CA; issue and revoke certificates."
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
        list[str] | None, typer.Option(help="A host name or address of the server or relay.")
    ] = None,
) -> None:
    """Issue a certificate and its key."""
    from fedsrv.identity.certificates import issue

    for path in issue(directory, identity, host or ()):
        typer.echo(path)


@certs_app.command("revoke")
def certs_revoke(
    which: Annotated[
        str, typer.Argument(metavar="IDENTITY|SERIAL", help="An identity or a serial number.")
    ],
    directory: AuthorityDir = Path("certs"),
) -> None:
    """Revoke certificates, and cancel their owners' open invitations.

    Coordinators and relays that have crl.pem refuse them at once.
    """
    from fedsrv.identity.certificates import revoke

    found = revoke(directory, which)
    for line in found or [f"nothing to do: all certificates of {which} are already revoked"]:
        typer.echo(line)
    typer.echo(f"written to {directory / 'crl.pem'}: copy it to the directory of --tls-client-ca")


@certs_app.command("crl")
def certs_crl(
    directory: AuthorityDir = Path("certs"),
    days: Annotated[float, typer.Option(min=0.001, help="Days until the next list is due.")] = 30.0,
) -> None:
    """Renew the certificate revocation list before it is overdue."""
    from fedsrv.identity.certificates import write_list

    due = write_list(directory, days)
    typer.echo(
        f"written to {directory / 'crl.pem'}, next update due on {due:%Y-%m-%d}: copy it to the "
        "directory of --tls-client-ca"
    )


@certs_app.command("invite")
def certs_invite(
    identity: Annotated[str, typer.Argument(help="As of certs issue.")],
    directory: AuthorityDir = Path("certs"),
    days: Annotated[float, typer.Option(min=0.001, help="Days the invitation is valid.")] = 7.0,
    host: Annotated[
        list[str] | None, typer.Option(help="A host name or address of the server or relay.")
    ] = None,
) -> None:
    """Print a one-time token with which one site gets its certificate (fedcli enrol)."""
    from fedsrv.identity.enrolment import invite

    typer.echo(invite(directory, identity, days, host or ()))


@certs_app.command("invitations")
def certs_invitations(directory: AuthorityDir = Path("certs")) -> None:
    """List all invitations: name, identity and state."""
    from fedsrv.identity.invitations import listed

    for line in listed(directory):
        typer.echo(line)


@certs_app.command("withdraw")
def certs_withdraw(
    which: Annotated[
        str, typer.Argument(metavar="NAME|IDENTITY", help="A listed name or identity.")
    ],
    directory: AuthorityDir = Path("certs"),
) -> None:
    """Withdraw open invitations, so that their tokens are rejected."""
    from fedsrv.identity.invitations import withdraw

    for line in withdraw(directory, which):
        typer.echo(line)


@certs_app.command("serve")
def certs_serve(directory: AuthorityDir = Path("certs"), listen: Place = "127.0.0.1:50050") -> None:
    """Serve certificates to invited sites until Ctrl-C, on the machine that has the CA's key."""
    from fedmodels.config.places import check_address
    from fedmodels.console.log_lines import LogLevel, set_up_logging
    from fedmodels.errors import Interrupted
    from fedmodels.host.machine import end_on_sigterm
    from fedsrv.identity.enrolment import start_enrolling

    set_up_logging(LogLevel.INFO)
    check_address(listen, "--listen", lowest_port=0)
    end_on_sigterm()
    server, port = start_enrolling(directory, listen)
    typer.echo(f"invited sites enrol at {listen.rpartition(':')[0]}:{port}")
    try:
        server.wait_for_termination()
    except KeyboardInterrupt:
        raise Interrupted("stopped") from None
    finally:
        server.stop(1.0).wait()
