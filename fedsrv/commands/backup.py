"""``fedsrv backup`` and ``restore``: a copy of a run of one moment, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

backup_app = typer.Typer()


@backup_app.command()
def backup(
    run: Annotated[Path, typer.Argument(help="The run directory; the run may go on.")],
    to: Annotated[Path, typer.Argument(metavar="DEST", help="A new directory.")],
) -> None:
    """Copy what a coordinator needs to go on, of one moment, also while the run goes on."""
    from fedsrv.state.backup import backup as copy

    committed = copy(run, to)
    typer.echo(f"{to} holds the run after interaction {committed + 1}")


@backup_app.command()
def restore(
    copy: Annotated[Path, typer.Argument(metavar="BACKUP", help="What fedsrv backup made.")],
    run: Annotated[Path, typer.Argument(help="The run directory that is made of it.")],
) -> None:
    """Make a run directory of a backup; serve or launch with --resume goes on with it."""
    from fedsrv.state.backup import restore as restored

    taken = restored(copy, run)
    typer.echo(
        f"{run} is the run as of {taken['taken_at']}, after interaction "
        f"{int(taken['committed']) + 1}: go on with --resume --out {run}"
    )
