"""``fedsrv sweep``: many runs from one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmodels.commands import forget_options
from fedmodels.errors import ConfigError
from fedmodels.machine import require_linux
from fedmodels.options import Sets

sweep_app = typer.Typer()


@sweep_app.command(epilog="What the file may say: docs/results.md#the-file-of-a-sweep")
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Methods, seeds, settings.")],
    out: Annotated[Path, typer.Option(help="The directory of the runs and the tables.")],
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default one here.")
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", min=0, help="In place of the file's.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A row to run; by default all.")] = None,
    sets: Sets = None,
    choose: Annotated[
        str | None,
        typer.Option(metavar="validation", help="Say which setting is best on validation parts."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(metavar="optuna", help="Search the ranges of the file's table search."),
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
            help="Of one run on a cluster: num_gpus=0.5 (Ray), slurm_partition=gpu (Slurm).",
        ),
    ] = None,
) -> None:
    """Run methods × seeds × settings and tabulate them; finished runs are kept."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    require_linux()
    forget_options()
    from rich.console import Console

    from fedmodels.log_lines import outlive_readers
    from fedsrv.sweep.plan import Sweep
    from fedsrv.sweep.sweeping import run_sweep

    outlive_readers()
    rows, sets = only or (), sets or []
    found, say = Sweep.read(file), typer.echo
    if choose not in (None, "validation"):
        raise ConfigError(f"--choose {choose!r}: only validation parts may choose: validation")
    if search is not None:
        if search != "optuna" or jobs or on or choose:
            raise ConfigError("--search takes optuna, and one trial at a time: no --jobs, --on")
        from fedsrv.sweep.search import run_search

        wanted = [*(only or found.methods)]
        return run_search(found, out, wanted, (seeds or found.seeds)[0], sets, say)
    where: Any = {"jobs": jobs, "on": on, "resources": resources or ()}
    where["chooses"] = choose is not None
    run_sweep(
        found, out, only=rows, seeds=seeds or (), sets=sets, say=say, console=Console(), **where
    )
