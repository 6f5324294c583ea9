"""``fedsrv submit`` and ``fedsrv queue``: runs that wait to be served."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmodels.console.options import AsRows, Config, Sets, show
from fedsrv.commands.watching import Authority, Cert, Key, Revoked

if TYPE_CHECKING:
    from rich.table import Table

    from fedmodels.console.rows import QueuedLine
    from fedplugins.queues.reaching import QueueAt

queue_app = typer.Typer()
Where = "The directory of the queue, or HOST:PORT of the front that serves it."


def _front(queue: str, *files: Path | None) -> QueueAt | None:
    """Return the front of a queue that an address names; None of a directory."""
    if Path(queue).is_dir() or not re.match(r"unix(-abstract)?:|[^/]+:[0-9]+$", queue):
        return None
    from fedmodels.config.places import check_address
    from fedplugins.queues.reaching import QueueAt
    from fedsrv.commands.watching import credentials_of

    check_address(queue, "the queue's address")
    return QueueAt(queue, credentials_of(queue, *files))


@queue_app.command(rich_help_panel="Run")
def submit(
    config: Config,
    queue: Annotated[str, typer.Option(metavar="QUEUE|HOST:PORT", help=Where)],
    name: Annotated[
        str | None, typer.Option(help="The run's name; by default the config's.")
    ] = None,
    sets: Sets = None,
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """Append a run to a queue, which fedsrv serve QUEUE serves in order.

    Over the network that takes an operator's certificate, and a config that names no files.
    """
    from fedmodels.facts.config_file import read_experiment
    from fedplugins.queues.run_queue import submit as put

    experiment, called = read_experiment(config, sets or ()), name or config.stem
    if (front := _front(queue, ca, cert, key, crl)) is not None:
        typer.echo(front.submit(experiment, called))
    else:
        typer.echo(put(experiment, Path(queue), called).place)


@queue_app.command(rich_help_panel="Run")
def queue(
    queue: Annotated[str, typer.Argument(metavar="QUEUE|HOST:PORT", help=Where)],
    withdrawn: Annotated[
        str | None,
        typer.Option(
            "--withdraw",
            metavar="RUN",
            help="Remove this run first; if it is being served, it ends.",
        ),
    ] = None,
    as_json: AsRows = False,
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """Show the runs of a queue and their progress."""
    from fedmodels.console.rows import QueuedLine
    from fedplugins.queues.run_queue import runs_of, withdraw

    if (front := _front(queue, ca, cert, key, crl)) is not None:
        if withdrawn is not None:
            front.withdraw(withdrawn)
        rows = front.runs()
        return show(rows, lambda: _table_of(rows, "address", "doing"), as_json)
    if withdrawn is not None:
        withdraw(Path(queue), withdrawn)
    rows = [
        QueuedLine(
            run=one.place.name, state=one.state, directory=str(one.run), address=None, doing=""
        )
        for one in runs_of(Path(queue))
    ]
    return show(rows, lambda: _table_of(rows, "directory"), as_json)


def _table_of(rows: Sequence[QueuedLine], *more: str) -> Table:
    """Return runs as a table: their names, states and what else is told of them."""
    from rich.markup import escape
    from rich.table import Table

    heads = ("run", "state", *more)
    table = Table(*heads)
    for row in rows:
        table.add_row(*(escape(getattr(row, head) or "") for head in heads))
    return table
