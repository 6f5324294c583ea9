"""``fedsrv init``: the list of the configs that come with fedtide, and a copy of one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

init_app = typer.Typer()


def _presets(begun: str) -> list[str]:
    from fedmodels.config.presets import presets

    return [name for name in presets() if name.startswith(begun)]


@init_app.command(rich_help_panel="Run")
def init(
    preset: Annotated[
        str | None,
        typer.Argument(help="A preset of the list, or a method.", autocompletion=_presets),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default PRESET.toml.")
    ] = None,
) -> None:
    """List the configs that come with fedtide, or copy one to start from."""
    from fedplugins.presets.presets import command_of, copy_preset, listed

    if preset is None:
        typer.echo("\n".join(listed()))
        return
    place = out or Path(f"{preset}.toml")
    copy_preset(preset, place)
    given = shlex.quote(str(place))
    typer.echo(f"written to {place}: run it with  fedsrv {command_of(preset)} {given} --out run")
