"""``fedsrv submit`` and ``fedsrv queue``: runs that are served one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmodels.options import AsRows, Config, Sets, show

queue_app = typer.Typer()


@queue_app.command()
def submit(
    config: Config,
    queue: Annotated[Path, typer.Option(help="The directory of the queue.")],
    name: Annotated[str | None, typer.Option(help="Of the run; the config's unless given.")] = None,
    sets: Sets = None,
) -> None:
    """Put a run at the end of a queue: fedsrv serve QUEUE serves it when its turn has come."""
    from fedmodels.config_file import read_experiment
    from fedsrv.run_queue import submit as put

    typer.echo(put(read_experiment(config, sets or ()), queue, name or config.stem).place)


@queue_app.command()
def queue(
    directory: Annotated[Path, typer.Argument(metavar="QUEUE", help="The directory.")],
    withdrawn: Annotated[
        str | None,
        typer.Option(
            "--withdraw", metavar="RUN", help="Take a run out first; one that is served ends."
        ),
    ] = None,
    as_json: AsRows = False,
) -> None:
    """Show the runs of a queue, and how far they are; fedsrv serve QUEUE serves them."""
    from rich.table import Table

    from fedsrv.run_queue import runs_of, withdraw

    if withdrawn is not None:
        withdraw(directory, withdrawn)
    table = Table("run", "state", "directory")
    for run in runs_of(directory):
        table.add_row(run.place.name, run.state, str(run.run))
    show(table, as_json)
