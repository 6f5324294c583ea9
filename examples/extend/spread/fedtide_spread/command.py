"""``fedsrv spread RUN``: in which rounds clients differed most."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command(rich_help_panel="Results")
def spread(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How many to list.")] = 3,
) -> None:
    """List the rounds whose clients' losses differed most."""
    import fedtide  # torch takes seconds, and every command imports this file

    rows = [row for row in fedtide.open(run).record.rows if "loss_spread" in row["metrics"]]
    for row in sorted(rows, key=lambda row: -row["metrics"]["loss_spread"])[:rounds]:
        typer.echo(f"round {row['round'] + 1}: {row['metrics']['loss_spread']:.3f}")
