"""``fedsrv``: serve, launch, report, and the commands of ``fedsrv/commands``."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fedmodels.console.commands import forget_options, run_command
from fedmodels.console.log_lines import LogLevel
from fedmodels.console.options import (
    AsJson,
    AsRows,
    Config,
    Device,
    Level,
    Quiet,
    Sets,
    Strict,
    program,
)
from fedmodels.errors import ConfigError, FedtideError, Interrupted
from fedmodels.host.machine import set_by_sigterm
from fedmodels.plugins import gone as missing
from fedmodels.plugins import owner_of, usable
from fedsrv.commands import options
from fedsrv.commands.audit import audit_app
from fedsrv.commands.certs import certs_app
from fedsrv.commands.lineage import lineage
from fedsrv.commands.plugins import plugins
from fedsrv.commands.watchers import place_of, wanted, with_watchers
from fedsrv.commands.watching import watching_app
from fedsrv.ray.ray_cluster import ray_place

if TYPE_CHECKING:
    from fedmodels.config.experiment import Experiment
    from fedsrv.progress.event_lines import EventPrinter

NONE: Mapping[str, str] = {}

app = program("Run, watch and steer federated runs: the coordinator, local launches and sweeps.")
app.add_typer(certs_app, name="certs")
app.command()(plugins)
app.command()(lineage)
app.add_typer(watching_app)
app.add_typer(audit_app)
for further in usable("fedsrv.commands"):
    app.add_typer(further)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake is one line, never a traceback."""
    run_command(app, arguments, "FEDSRV")


@app.command()
@with_watchers
def serve(
    context: typer.Context,
    config: Annotated[
        Path, typer.Argument(help="The experiment, a TOML file or preset; or a queue's directory.")
    ],
    listen: options.Place = "127.0.0.1:0",
    out: options.RunDirectory = Path("run"),
    resume: options.Resume = False,
    without: options.Without = None,
    forget: options.Forget = None,
    sets: Sets = None,
    tls_cert: options.Certificate = None,
    tls_key: options.Key = None,
    tls_client_ca: options.ClientAuthority = None,
    tls_crl: options.RevokedCallers = None,
    insecure: options.Insecure = False,
    at_once: options.AtOnce = 4,
    wait_for_sites: options.WaitForSites = 3600.0,
    evaluator: options.AwaitsEvaluator = False,
    server_data: options.OwnExamples = None,
    events: options.PrintsEvents = False,
    quiet: Quiet = False,
    log_level: Level = LogLevel.INFO,
    as_json: AsJson = False,
    watched: Mapping[str, str] = NONE,
) -> None:
    """Run the coordinator of one run, or of the runs of a queue."""
    options.set_up(quiet, log_level, as_json)
    if config.is_dir():
        _serve_queue(context, config, watched)
    aside = options.check_without(without, resume)
    gone = options.check_without(forget, resume, "--forget")
    experiment = _experiment_of(config, sets or (), out if resume else None)
    from fedsrv.coordinator import serve as serve_run
    from fedsrv.identity.listen import Listen
    from fedsrv.progress.event_lines import EventPrinter

    if events:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    telling = EventPrinter(names_address=not as_json, prints=events)
    with _telling_the_end(telling, out):
        summary = serve_run(
            experiment,
            out,
            Listen.given(listen, tls_cert, tls_key, tls_client_ca, insecure, tls_crl),
            resume=resume,
            without=aside,
            forgets=options.wanted(gone),
            expects_evaluator=evaluator,
            server_data=server_data,
            on_ready=telling.begin,
            stop=set_by_sigterm(),
            watchers=wanted(watched, out, insecure),
        )
    telling.end()
    if not events:  # a launcher shows the run itself
        _show(out, with_table=not (quiet or as_json))
    logging.getLogger("fedsrv").info("state digest: %s", summary["state_sha256"])


def _experiment_of(config: Path, sets: Sequence[str], resumed: Path | None) -> Experiment:
    """Return the experiment of a config; of a run that is resumed, with the defaults it has."""
    from fedmodels.facts.config_file import read_experiment

    if resumed is None:
        return read_experiment(config, sets)
    from fedsrv.state.resumed_config import read_resumed
    from fedsrv.state.run_directory import require_run

    require_run(resumed)
    return read_resumed(config, sets, resumed)


def _serve_queue(context: typer.Context, queue: Path, watched: Mapping[str, str]) -> NoReturn:
    """Serve the runs of a queue by the options of ``serve``; or ConfigError for one of one run."""
    of_one = ("out", "resume", "without", "forget", "sets", "evaluator", "server_data", "events")
    for option in context.command.params:
        given = context.params.get(option.name or "")
        if option.name in of_one and given and given != option.get_default(context):
            raise ConfigError(
                f"{queue} is a queue of runs, and {option.opts[0]} applies to a single run"
            )
    for serve_all in usable("fedsrv.queues"):
        serve_all(queue, context, watched)
    raise ConfigError(f"{queue} is a directory, and no plugin that serves queues is installed")


@contextmanager
def _telling_the_end(telling: EventPrinter, out: Path) -> Iterator[None]:
    """Tell the launcher of an error; turn Ctrl-C into the line that says how to go on.

    Where clients could not join yet, there is nothing to go on with.
    """
    try:
        yield
    except FedtideError as error:
        telling.fail(str(error))
        raise
    except KeyboardInterrupt:
        if telling.has_begun:
            raise Interrupted(f"stopped; add --resume to continue the run in {out}") from None
        raise


def _end_with_stdin() -> None:
    """End at once when the launcher is gone; what is not committed is computed again."""
    while os.read(0, 4096):
        pass
    os._exit(130)


def _show(out: Path, *, with_table: bool) -> None:
    """Print the table of a run that has finished, and write its page."""
    from rich.console import Console

    from fedsrv.report.tables import PageNotWritten, final_table, write_page
    from fedsrv.state.run_record import read_run

    record, log = read_run(out), logging.getLogger("fedsrv")
    if with_table:
        Console().print(final_table(record))
    try:
        log.info("report: %s", write_page(record))
    except PageNotWritten as error:
        log.warning("%s", error)


@app.command()
@with_watchers
def launch(
    config: Config,
    out: options.RunDirectory = Path("run"),
    sets: Sets = None,
    hosts: options.Hosts = None,
    resume: options.Resume = False,
    without: options.Without = None,
    forget: options.Forget = None,
    data: Annotated[
        Path | None, typer.Option(help="An existing partition; by default one is made in OUT/data.")
    ] = None,
    device: Device = "auto",
    server_data: Annotated[
        Path | None, typer.Option(help="Examples at the server; by default those of the partition.")
    ] = None,
    strict: Strict = False,
    quiet: Quiet = False,
    log_level: Level = LogLevel.INFO,
    as_json: AsJson = False,
    insecure: options.Insecure = False,
    on: options.On = None,
    host_cpus: options.HostCpus = 1.0,
    host_gpus: options.HostGpus = 0.0,
    node_dir: options.NodeDir = None,
    forecast: options.Forecast = None,
    watched: Mapping[str, str] = NONE,
) -> None:
    """Run coordinator and clients as processes, with live progress and a final table."""
    level = options.set_up(quiet, log_level, as_json)
    lacks = owner_of("commands", "forecast")
    if forecast and lacks:
        raise ConfigError(missing("--forecast", lacks))
    forget_options()
    aside = options.check_without(without, resume)
    gone = options.check_without(forget, resume, "--forget")
    options.wanted(gone)  # what is wrong is said before anything starts
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that are forked: before torch comes in
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for GPUs spoils no fork
    experiment = _experiment_of(config, sets or (), out if resume else None)
    wanted(watched, out, insecure)  # the coordinator makes its own
    from fedsrv.launch.launcher import launch as launch_run

    launch_run(
        experiment,
        out,
        hosts=hosts,
        resume=resume,
        data=data,
        device=device,
        server_data=server_data,
        log_level=level,
        as_json=as_json,
        serve_options=[
            *chain.from_iterable(watched.items()),
            *(["--insecure"] if insecure else []),
            *(word for client in aside for word in ("--without", str(client))),
            *(word for one in gone for word in ("--forget", one)),
        ],
        ray=ray_place(on, host_cpus, host_gpus, node_dir, device),
        strict=strict,
        forecasts=sys.stdout.isatty() and not (as_json or lacks) if forecast is None else forecast,
    )


@app.command(epilog="fedsrv metrics says what each figure is.")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page with charts.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every figure, not six.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each run's summary as JSON, in one list.")
    ] = False,
    serve_at: Annotated[
        str | None,
        typer.Option("--serve", metavar="PORT", help="Show one run's live page until Ctrl-C."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines read that page.")
    ] = False,
) -> None:
    """Compare runs; those that differ only in the seed become mean ± standard deviation."""
    if serve_at is not None:
        from fedsrv.dashboard.live import serve_page

        if as_json:
            from fedmodels.errors import ConfigError

            raise ConfigError("--serve shows a page: leave out --json")
        serve_page(runs, *place_of(serve_at, "--serve", insecure), typer.echo)
        return
    from fedsrv.report.tables import report_command

    report_command(runs, html, everything, as_json=as_json)


@app.command()
def export(
    run: options.RunDirectory,
    to: Annotated[str, typer.Option(help="safetensors, torch.export or onnx.")],
    client: Annotated[
        int | None, typer.Option(min=0, help="The client; by default all clients.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default in RUN.")] = None,
) -> None:
    """Export a trained model as a self-contained file that maps raw inputs to logits."""
    from fedsrv.trained.export import KINDS, check_kind
    from fedsrv.trained.export import export as write
    from fedsrv.trained.trained_models import global_model, personal_model

    check_kind(to)
    name = "model" if client is None else f"model-{client}"
    place = out or run / f"{name}{KINDS[to][0]}"
    model = global_model(run) if client is None else personal_model(run, client)
    write(model, to, place)
    typer.echo(f"written to {place}")
    for caveat in model.caveats():
        typer.echo(f"note: {caveat}", err=True)


@app.command()
def recover(
    run: Annotated[Path, typer.Argument(help="The run directory.")], as_json: AsRows = False
) -> None:
    """Rebuild a damaged or missing run.db from rounds.jsonl and the states."""
    from fedmodels.console.rows import Recovered
    from fedsrv.state.recovery import recover as recover_run

    notes = list[str]()
    last = recover_run(run, notes.append if as_json else typer.echo)
    if as_json:
        told = Recovered(run=str(run), interactions=last + 1, notes=notes)
        typer.echo(told.model_dump_json(indent=1))


if __name__ == "__main__":
    main()
