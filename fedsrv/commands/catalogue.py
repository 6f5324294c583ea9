"""``fedsrv methods``, ``nets``, ``metrics``, ``schema`` and ``plugins``: what there is."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedmodels.console.options import AsRows, show
from fedmodels.errors import ConfigError


def _methods(begun: str) -> list[str]:
    from fedmodels.methods import names

    return [name for name in names() if name.startswith(begun)]


def _nets(begun: str) -> list[str]:
    from fedmodels.nets import net_names

    return [name for name in net_names() if name.startswith(begun)]


def _metrics(begun: str) -> list[str]:
    from fedmodels.numerics.metric_tables import METRICS

    return [name for name in METRICS if name.startswith(begun)]


def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method, in detail.", autocompletion=_methods)
    ] = None,
    as_json: AsRows = False,
) -> None:
    """List every method; with NAME its hyper-parameters, defaults and paper."""
    from fedsrv.reference.catalogue import method_table, methods_table

    show(method_table(name) if name else methods_table(), as_json)


def nets(
    name: Annotated[
        str | None, typer.Argument(help="One net, in detail.", autocompletion=_nets)
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As the tables of docs/nets.md.")
    ] = False,
    as_json: AsRows = False,
) -> None:
    """List every net with its size; with NAME its options, defaults and source."""
    from fedsrv.reference.net_catalogue import net_table, nets_markdown, nets_table

    _check_one(markdown, as_json)
    if markdown:
        typer.echo(nets_markdown(), nl=False)
    else:
        show(net_table(name) if name else nets_table(), as_json)


def schema() -> None:
    """Write the JSON Schema of a config, by which editors complete and check a TOML file."""
    from fedsrv.reference.config_schema import config_schema

    typer.echo(json.dumps(config_schema(), indent=1))


def plugins(as_json: AsRows = False) -> None:
    """List what is installed beside the core, and what it adds."""
    from fedsrv.reference.catalogue import plugins_table

    show(plugins_table(), as_json)


def metrics(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="All unless some are given.", autocompletion=_metrics),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As the tables of docs/metrics.md.")
    ] = False,
    as_json: AsRows = False,
) -> None:
    """Explain each metric of a report: formula, range, direction and paper."""
    from fedsrv.reference.catalogue import metrics_markdown, metrics_table

    _check_one(markdown, as_json)
    if markdown:
        typer.echo(metrics_markdown(), nl=False)
    else:
        show(metrics_table(names or ()), as_json)


def _check_one(markdown: bool, as_json: bool) -> None:
    if markdown and as_json:
        raise ConfigError("give --markdown or --json, not both")
