"""``fedsrv methods``, ``nets``, ``metrics`` and ``schema``: what there is, and what it means."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, in detail.")] = None,
) -> None:
    """List every method; with NAME its hyper-parameters, defaults and paper."""
    from rich.console import Console

    from fedsrv.catalogue import method_table, methods_table

    Console().print(method_table(name) if name else methods_table())


def nets(
    name: Annotated[str | None, typer.Argument(help="One net, in detail.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As the tables of docs/nets.md.")
    ] = False,
) -> None:
    """List every net with its size; with NAME its options, defaults and source."""
    from rich.console import Console

    from fedsrv.net_catalogue import net_table, nets_markdown, nets_table

    if markdown:
        typer.echo(nets_markdown(), nl=False)
    else:
        Console().print(net_table(name) if name else nets_table())


def schema() -> None:
    """Write the JSON Schema of a config, by which editors complete and check a TOML file."""
    from fedsrv.config_schema import config_schema

    typer.echo(json.dumps(config_schema(), indent=1))


def metrics(
    names: Annotated[list[str] | None, typer.Argument(help="All unless some are given.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As the tables of docs/metrics.md.")
    ] = False,
) -> None:
    """Explain each metric of a report: formula, range, direction and paper."""
    from rich.console import Console

    from fedsrv.catalogue import metrics_markdown, metrics_table

    if markdown:
        typer.echo(metrics_markdown(), nl=False)
    else:
        Console().print(metrics_table(names or ()))
