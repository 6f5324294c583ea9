"""The options that commands of both programs have, and the program of Typer around commands."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from fedmodels.commands import Commands
from fedmodels.log_lines import LogLevel

Config = Annotated[Path, typer.Argument(help="The experiment, a TOML file.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override any key.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda:K.")]
Strict = Annotated[bool, typer.Option("--strict", help="Treat warnings about the data as errors.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors alone.")]
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
