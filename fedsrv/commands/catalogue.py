"""``fedsrv methods`` and ``fedsrv metrics``: what there is, and what it means."""

from __future__ import annotations

from typing import Annotated

import typer


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, in detail.")] = None,
) -> None:
    """List every method; with NAME its hyper-parameters, defaults and paper."""
    from rich.console import Console

    from fedsrv.catalogue import method_table, methods_table

    Console().print(method_table(name) if name else methods_table())


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
