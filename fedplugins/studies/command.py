"""``fedsrv sweep``: many runs from one file."""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmodels.console.commands import forget_options
from fedmodels.console.log_lines import LogLevel
from fedmodels.console.options import AsJson, Level, Quiet, Sets
from fedmodels.console.printable import event_of, json_text
from fedmodels.errors import ConfigError
from fedsrv.commands.options import set_up

if TYPE_CHECKING:
    from fedplugins.studies.outcome import Outcome

sweep_app = typer.Typer()


@sweep_app.command(
    rich_help_panel="Run", epilog="What the file may say: docs/results.md#the-file-of-a-sweep"
)
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Methods, seeds, settings.")],
    out: Annotated[Path, typer.Option(help="The directory of the runs and the tables.")],
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Concurrent runs; by default one on this machine.")
    ] = None,
    seeds: Annotated[
        list[int] | None,
        typer.Option(
            "--seed", min=0, help="A seed, instead of those in the file; may be repeated."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run only this row; may be repeated.")
    ] = None,
    sets: Sets = None,
    choose: Annotated[
        str | None,
        typer.Option(metavar="validation", help="Report which setting is best on validation data."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(metavar="optuna", help="Search the ranges in the file's table search."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE", help="ray, ray://HEAD:PORT or slurm; by default this machine."
        ),
    ] = None,
    resources: Annotated[
        list[str] | None,
        typer.Option(
            "--resource",
            metavar="KEY=VALUE",
            help="A resource of each run on a cluster: num_gpus=0.5 (Ray), slurm_partition=gpu "
            "(Slurm).",
        ),
    ] = None,
    quiet: Quiet = False,
    log_level: Level = LogLevel.INFO,
    as_json: AsJson = False,
) -> None:
    """Run methods × seeds × settings and tabulate them; finished runs are kept."""
    level = set_up(quiet, log_level, as_json)
    forget_options()
    from rich.console import Console

    from fedmodels.console.log_lines import outlive_readers
    from fedplugins.studies.plan import Sweep
    from fedplugins.studies.sweeping import run_sweep

    outlive_readers()
    rows, sets = only or (), sets or []
    found, says = Sweep.read(file), level.number <= logging.INFO
    say = partial(_say, level=level.number, as_json=as_json)
    if choose not in (None, "validation"):
        raise ConfigError(f"--choose {choose!r}: only validation parts may choose: validation")
    if search is not None:
        if search != "optuna" or on or choose or resources:
            raise ConfigError(
                "--search takes optuna, on this machine: no --on, no --choose, no --resource"
            )
        if len(seeds or ()) > 1:
            raise ConfigError("--search runs each trial with one seed: give one --seed")
        from fedplugins.studies.search import run_search

        wanted = [*(only or found.methods)]
        return run_search(found, out, wanted, (seeds or found.seeds)[0], sets, say, jobs or 1)
    where: Any = {"jobs": jobs, "on": on, "resources": resources or ()}
    where["chooses"] = choose is not None
    where["console"] = Console() if says and not as_json else None
    where["show"] = partial(_show, says=says) if as_json else None
    run_sweep(found, out, only=rows, seeds=seeds or (), sets=sets, say=say, **where)


def _say(line: str, *, level: int, as_json: bool) -> None:
    """Print a line that matters enough, or an object of it."""
    from fedplugins.studies.execution import Grave

    matters = LogLevel.WARNING if isinstance(line, Grave) else LogLevel.INFO
    if matters.number >= level:
        typer.echo(_object("sweep", {"level": matters, "line": line}) if as_json else line)


def _show(outcome: Outcome, *, says: bool) -> None:
    """Print the tables as the object that ``record.json`` holds."""
    from fedplugins.studies.outcome import to_json

    if says:
        typer.echo(_object("tables", json.loads(to_json(outcome))))


def _object(kind: str, detail: dict[str, Any]) -> str:
    return json_text(event_of(kind, time.time(), detail=detail))
