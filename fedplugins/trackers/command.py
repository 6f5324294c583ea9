"""``fedsrv track``: trackers get what they lack of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedmodels.console.options import AsRows

track_app = typer.Typer()


@track_app.command(rich_help_panel="Results")
def track(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="NAME",
            help="A tracker: tensorboard, mlflow or wandb; may be repeated. By default those of "
            "the run's config.",
        ),
    ] = None,
    as_json: AsRows = False,
) -> None:
    """Send missing metrics and results of a run to its trackers.

    For a tracker that was too slow, failed, or was not asked for. A run that is resumed does it
    by itself.
    """
    from fedmodels.errors import ConfigError, FedtideError, suggestion
    from fedmodels.facts.config_file import read_experiment
    from fedplugins.trackers.trackers import TRACKERS, send, until, wanted
    from fedsrv.state.run_directory import reading, refuse_in_use

    if not (run / "run.db").is_file():
        raise ConfigError(f"{run} is not a run directory: pass the directory given to --out")
    refuse_in_use(run)
    experiment = read_experiment(run / "config.toml")
    names = list(dict.fromkeys(to or wanted(experiment)))
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"--to {name} is no tracker.{suggestion(name, TRACKERS)}")
    if not names:
        raise ConfigError(f"{run} has no tracker: choose one of {', '.join(TRACKERS)} with --to")
    with reading(run) as db:
        (run_id,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    told = send(experiment, run, run_id, names)
    if as_json:
        typer.echo(json.dumps([one.model_dump() for one in told], indent=1))
    else:
        for one in told:
            if one.error is None:
                typer.echo(f"{one.tracker} has metrics {until(one.interactions)}")
    if failed := [one for one in told if one.error is not None]:
        raise FedtideError(
            "; ".join(
                f"{one.tracker} failed and has metrics {until(one.interactions)}: {one.error}"
                for one in failed
            )
        )
