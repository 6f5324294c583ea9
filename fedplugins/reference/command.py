"""``fedsrv methods``, ``nets``, ``metrics`` and ``schema``: what there is."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedmodels.console.options import AsRows, show
from fedmodels.errors import ConfigError, suggestion

reference_app = typer.Typer()


def _methods(begun: str) -> list[str]:
    from fedmodels.methods import names

    return [name for name in names() if name.startswith(begun)]


def _nets(begun: str) -> list[str]:
    from fedmodels.nets import net_names

    return [name for name in net_names() if name.startswith(begun)]


def _metrics(begun: str) -> list[str]:
    from fedmodels.numerics.metric_tables import METRICS

    return [name for name in METRICS if name.startswith(begun)]


@reference_app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method, in detail.", autocompletion=_methods)
    ] = None,
    as_json: AsRows = False,
) -> None:
    """List every method; with NAME its hyper-parameters, defaults and paper."""
    from fedplugins.reference import catalogue

    if name:
        return show(catalogue.method_told(name), lambda: catalogue.method_table(name), as_json)
    return show(catalogue.methods_told(), catalogue.methods_table, as_json)


@reference_app.command()
def nets(
    name: Annotated[
        str | None, typer.Argument(help="One net, in detail.", autocompletion=_nets)
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/nets.md.")
    ] = False,
    as_json: AsRows = False,
) -> None:
    """List every net with its size; with NAME its options, defaults and source."""
    from fedplugins.reference import net_catalogue

    _check_one(markdown, as_json)
    if markdown:
        return typer.echo(net_catalogue.nets_markdown(), nl=False)
    if name:
        return show(net_catalogue.net_told(name), lambda: net_catalogue.net_table(name), as_json)
    return show(net_catalogue.nets_told(), net_catalogue.nets_table, as_json)


@reference_app.command()
def schema(
    what: Annotated[
        str,
        typer.Argument(
            help="config, or a command whose --json is meant: methods, nets, metrics, plugins, "
            "data, check, queue, verify, track or recover; method or net where one is named."
        ),
    ] = "config",
) -> None:
    """Write the JSON Schema of a config, by which editors complete a file; or of an output."""
    from fedplugins.reference.config_schema import config_schema
    from fedplugins.reference.rows import SHAPES, schema_of

    if what != "config" and what not in SHAPES:
        raise ConfigError(
            f"{what!r} has no schema.{suggestion(what, SHAPES)} There are config, "
            f"{', '.join(SHAPES)}"
        )
    found = config_schema() if what == "config" else schema_of(what)
    typer.echo(json.dumps(found, indent=1))


@reference_app.command()
def metrics(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names to list; by default all.", autocompletion=_metrics),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/metrics.md.")
    ] = False,
    as_json: AsRows = False,
) -> None:
    """Explain each metric of a report: formula, range, direction and paper."""
    from fedplugins.reference.catalogue import metrics_markdown, metrics_table, metrics_told

    _check_one(markdown, as_json)
    if markdown:
        typer.echo(metrics_markdown(), nl=False)
    else:
        show(metrics_told(names or ()), lambda: metrics_table(names or ()), as_json)


def _check_one(markdown: bool, as_json: bool) -> None:
    if markdown and as_json:
        raise ConfigError("give --markdown or --json, not both")
