"""Whose model is meant: the options of commands, ``fedcli rollback``, and the model that is live.

Heavy imports happen inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmodels.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedcli.predicting.live_model import LiveModel

RunOfModel = Annotated[
    Path | None, typer.Option(help="The run directory, or a client's --state-dir.")
]
WhoseModel = Annotated[int | None, typer.Option(min=0, help="The client of the deployed model.")]
ModelFile = Annotated[
    Path | None, typer.Option(help="A model's file, as fedsrv export --to safetensors writes.")
]
RecipeOfNew = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="How the site's files say what the model takes; by default the recipe that the model "
        "carries.",
    ),
]


def rollback(
    run: Annotated[Path, typer.Option(help="The run directory, or a client's --state-dir.")],
    client: Annotated[int, typer.Option(min=0, help="The client of the deployed model.")],
    release: Annotated[
        bool, typer.Option("--release", help="Let later models go live again, and change nothing.")
    ] = False,
    to: Annotated[
        str,
        typer.Option(
            metavar="12|task-3|2026-11-29",
            help="An earlier one: of a round, the last one of a task, or the one that was live at "
            "a time in UTC (2026-11-29T10:15).",
        ),
    ] = "",
) -> None:
    """Deploy an earlier model again, by default the previous one, and keep it until --release."""
    from fedcli.predicting.prediction import places_of
    from fedcli.runtime.deployed import Deployed

    found = [Deployed(place) for place in places_of(run, client)]
    deployed = next((one for one in found if one.folder.is_dir()), None)
    if deployed is None:
        raise DataError(
            f"{run} holds no live model of client {client}: it deploys none, or --run is another "
            "directory"
        )
    again = f"fedcli rollback --run {run} --client {client} --release"
    if release and to:
        raise ConfigError("--release lets later models go live, and --to puts one back: give one")
    if release:
        held = deployed.release()
        typer.echo("later models go live again" if held else "no roll-back holds the live model")
        return
    typer.echo(f"client {client} is {deployed.roll_back(to)}; no other goes live until: {again}")


def whose_model(
    run: Path | None, client: int | None, model: Path | None
) -> Path | tuple[Path, int]:
    """Return the model's file, or the run and the client; ConfigError unless options say one."""
    if model is not None and (run is not None or client is not None):
        raise ConfigError("--model FILE says which model: leave out --run and --client")
    if model is not None:
        return model
    if run is None or client is None:
        raise ConfigError("choose a model: --run RUN --client ID, or --model FILE")
    return run, client


def live_model(
    run: Path | None, client: int | None, model: Path | None, recipe: Path | None = None
) -> LiveModel:
    """Return whose model answers, as the options of a command say it."""
    from fedcli.predicting.live_model import LiveModel

    whose = whose_model(run, client, model)
    if isinstance(whose, Path):
        return LiveModel([whose], str(whose), recipe=recipe)
    return LiveModel.of(*whose, recipe)
