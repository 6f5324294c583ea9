"""The options that commands of both programs have, and the program of Typer around commands."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fedmodels.console.commands import Commands
from fedmodels.console.log_lines import LogLevel

if TYPE_CHECKING:
    from rich.table import Table

    from fedmodels.console.rows import Printed


def complete_key(begun: str) -> list[str]:
    """Return what a word ``KEY=VALUE`` may become: keys, or names of methods or nets."""
    key, has_value, value = begun.partition("=")
    if has_value:
        return [f"{key}={name}" for name in _values_of(key) if name.startswith(value)]
    from fedmodels.config.experiment import Experiment

    return sorted({f"{name}=" for name in _keys(Experiment) if name.startswith(begun)})


def _values_of(key: str) -> list[str]:
    if key == "method.name":
        from fedmodels.methods import names

        return list(names())
    if key == "net.name":
        from fedmodels.nets import net_names

        return list(net_names())
    return []


def _keys(table: Any, above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a table and of those below it."""
    from fedmodels.config.sent import tables_in

    for name, field in table.model_fields.items():
        tables = tables_in(field.annotation)
        for one in tables:
            yield from _keys(one, f"{above}{name}.")
        if not tables:
            yield above + name


Config = Annotated[Path, typer.Argument(help="The experiment, a TOML file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override any key.", autocompletion=complete_key
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda:K.")]
Strict = Annotated[bool, typer.Option("--strict", help="Treat warnings about the data as errors.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")]
Level = Annotated[
    LogLevel,
    typer.Option(
        "--log-level",
        parser=LogLevel.named,
        metavar=f"[{'|'.join(LogLevel)}]",
        help="Lowest level of the messages to print.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print messages as JSON, an object a line, on stdout.")
]

AsRows = Annotated[bool, typer.Option("--json", help="Print one JSON value in place of a table.")]


def show(rows: Sequence[Printed], table: Callable[[], Table], as_json: bool) -> None:
    """Print rows as a table, or as one list of JSON; ``fedsrv schema`` has its schema."""
    if as_json:
        typer.echo(json.dumps([row.model_dump(mode="json") for row in rows], indent=1))
        return
    from rich.console import Console

    Console().print(table())


def port_option(option: str, about: str, panel: str | None = None) -> Parameter:
    """Return an option that names a port, as a parameter of a command; None unless it is given."""
    told = typer.Option(option, metavar="PORT", help=about, rich_help_panel=panel)
    kind = Annotated[str | None, told]
    name = option.strip("-").replace("-", "_")
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def with_options(
    command: Callable[..., None],
    name: str,
    options: Sequence[Parameter],
    made: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """Return a command with further options in place of its parameter ``name``.

    ``made`` makes of their values, by name, what that parameter gets.
    """

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {one.name: given.pop(one.name) for one in options}
        command(**given, **{name: made(values)})

    form = inspect.signature(command, eval_str=True)
    kept = [one for one in form.parameters.values() if one.name != name]
    run.__signature__ = form.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return run


def words_of(context: typer.Context, **changed: Any) -> list[str]:
    """Return the options of a command as a command line has them; defaults are left out.

    Args:
        context: the command, and what it was given.
        changed: other values, by name of a parameter.
    """
    words: list[str] = []
    for option in context.command.params:
        if option.param_type_name != "option":
            continue
        value = {**context.params, **changed}.get(option.name or "")
        if value is None or value == option.get_default(context):
            continue
        if isinstance(value, bool):
            words.append(option.opts[0] if value else option.secondary_opts[0])
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [option.opts[0], str(one)]
    return words


class CommandGroup(Commands, TyperGroup):
    """The commands of a program, or those below one of its words."""


def program(about: str) -> typer.Typer:
    """Return a program without commands, which has ``--version``; its help begins with a line."""
    app = typer.Typer(
        cls=CommandGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    @app.callback(help=about)
    def of_all(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_print_version, is_eager=True, help="Print the version."
            ),
        ] = False,
    ) -> None:
        """Take the options before a command."""

    return app


def _print_version(given: bool) -> None:
    if given:
        typer.echo(f"fedtide {version('fedtide')}")
        raise typer.Exit
