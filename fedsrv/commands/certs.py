"""``fedsrv certs``: an authority, the certificates it issues, and those it revokes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmodels.console.options import CommandGroup
from fedsrv.commands.options import Place

certs_app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Make an authority and certificates for TLS."
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
    """Revoke certificates, and void the open invitations of their owners.

    Coordinators and relays that have crl.pem refuse them at once.
    """
    from fedsrv.identity.certificates import revoke

    found = revoke(directory, which)
    for line in found or [f"nothing new: all certificates of {which} are revoked already"]:
        typer.echo(line)
    typer.echo(f"written to {directory / 'crl.pem'}: bring it to where --tls-client-ca lies")


@certs_app.command("crl")
def certs_crl(
    directory: AuthorityDir = Path("certs"),
    days: Annotated[float, typer.Option(min=0.001, help="When the next list is due.")] = 30.0,
) -> None:
    """Write the list of revoked certificates anew, before the next one is due."""
    from fedsrv.identity.certificates import write_list

    due = write_list(directory, days)
    typer.echo(
        f"written to {directory / 'crl.pem'}, the next one is due on {due:%Y-%m-%d}: bring it to "
        "where --tls-client-ca lies"
    )


@certs_app.command("invite")
def certs_invite(
    identity: Annotated[str, typer.Argument(help="As of certs issue.")],
    directory: AuthorityDir = Path("certs"),
    days: Annotated[float, typer.Option(min=0.001, help="How long it may be used.")] = 7.0,
    host: Annotated[
        list[str] | None, typer.Option(help="A name the server or relay is reached by.")
    ] = None,
) -> None:
    """Print a token that gets one certificate, once, by fedcli enrol: give it to its site alone."""
    from fedsrv.identity.enrolment import invite

    typer.echo(invite(directory, identity, days, host or ()))


@certs_app.command("invitations")
def certs_invitations(directory: AuthorityDir = Path("certs")) -> None:
    """List all invitations: their names, whom they are for, and what became of them."""
    from fedsrv.identity.invitations import listed

    for line in listed(directory):
        typer.echo(line)


@certs_app.command("withdraw")
def certs_withdraw(
    which: Annotated[
        str,
        typer.Argument(metavar="NAME|IDENTITY", help="As certs invitations has it."),
    ],
    directory: AuthorityDir = Path("certs"),
) -> None:
    """Take open invitations back: their tokens get no certificate any more."""
    from fedsrv.identity.invitations import withdraw

    for line in withdraw(directory, which):
        typer.echo(line)


@certs_app.command("serve")
def certs_serve(directory: AuthorityDir = Path("certs"), listen: Place = "127.0.0.1:50050") -> None:
    """Give certificates to whoever is invited, where the authority's key lies, until Ctrl-C."""
    from fedmodels.config.places import check_address
    from fedmodels.console.log_lines import LogLevel, set_up_logging
    from fedmodels.errors import Interrupted
    from fedmodels.host.machine import end_on_sigterm
    from fedsrv.identity.enrolment import start_enrolling

    set_up_logging(LogLevel.INFO)
    check_address(listen, "--listen", lowest_port=0)
    end_on_sigterm()
    server, port = start_enrolling(directory, listen)
    typer.echo(f"whoever is invited enrols at {listen.rpartition(':')[0]}:{port}")
    try:
        server.wait_for_termination()
    except KeyboardInterrupt:
        raise Interrupted("stopped") from None
    finally:
        server.stop(1.0).wait()
