"""``fedsrv lineage``: which data made which model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def lineage(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    at: Annotated[
        int | None, typer.Option(min=1, metavar="VERSION", help="The data behind this version.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which clients' tasks and rows are in each version of the model."""
    from fedmodels.console.printable import json_text
    from fedsrv.state.lineage import lineage_of, lines_of, origin_lines

    found = lineage_of(run)
    if as_json:
        origins = {} if at is None else {"at": [vars(one) for one in found.at(at - 1)]}
        typer.echo(json_text({**found.to_json(), **origins}))
        return
    for line in lines_of(found) if at is None else origin_lines(found, at - 1):
        typer.echo(line)
