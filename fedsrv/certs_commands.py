"""``fedsrv certs``: makes an authority, and certificates for server, clients and monitors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

certs_app = typer.Typer(no_args_is_help=True, help="Make an authority and certificates for TLS.")


@certs_app.command("init")
def certs_init(
    directory: Annotated[Path, typer.Option("--dir", help="Where the files go.")] = Path("certs"),
) -> None:
    """Make a certificate authority."""
    from fedsrv.identity.certificates import init_authority

    _print_paths(init_authority(directory))


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

    _print_paths(issue(directory, identity, host or ()))


def _print_paths(paths: Any) -> None:
    """Print the paths of the files that were written, one a line."""
    for path in paths if isinstance(paths, tuple | list) else vars(paths).values():
        typer.echo(str(path))
