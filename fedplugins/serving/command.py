"""``fedcli serve-model``. Heavy imports happen inside the command."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcli.predicting.whose import ModelFile, RecipeOfNew, RunOfModel, live_model
from fedmodels.console.log_lines import LogLevel, set_up_logging
from fedmodels.console.options import Level
from fedmodels.errors import ConfigError
from fedmodels.host.machine import end_on_sigterm
from fedplugins.serving.services import Beside, with_services

if TYPE_CHECKING:
    from fedcli.predicting.live_model import LiveModel
    from fedplugins.serving.site import Site

serving_app = typer.Typer()
MAX_MODELS = 1000
"""Models of a process; each is in memory once it was asked."""
MAX_FEEDBACK = 100_000
"""Rows with labels of a task."""


@serving_app.command("serve-model")
@with_services
def serve_model(
    run: RunOfModel = None,
    client: Annotated[
        str | None,
        typer.Option(help="The client whose deployed model answers, or a range such as 0-4."),
    ] = None,
    model: ModelFile = None,
    recipe: RecipeOfNew = None,
    listen: Annotated[
        str, typer.Option(metavar="PORT", help="Where; loopback unless HOST:PORT.")
    ] = "8100",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow reachable addresses: there is no TLS.")
    ] = False,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-hosts",
            metavar="NAME",
            help="A name by which callers may ask, such as of a service or of a proxy; * stands "
            "for any letters. Addresses and this machine's own name always may.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory above the client's own data, with which what is asked is compared; by "
            "default what fedcli join cut of the client's files.",
        ),
    ] = None,
    feedback: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            min=1,
            max=MAX_FEEDBACK,
            help="Take labels back, and make a task of the client's data of so many rows.",
        ),
    ] = None,
    feedback_every: Annotated[
        float,
        typer.Option(
            "--feedback-every",
            metavar="MINUTES",
            min=0,
            help="Time between two such tasks, at least: labels that come meanwhile wait, and are "
            "one task then.",
        ),
    ] = 60.0,
    feedback_tokens: Annotated[
        Path | None,
        typer.Option(
            "--feedback-tokens",
            metavar="FILE",
            help="Tokens of the programs that may send labels, one per line; --feedback needs it "
            "on an address that other machines reach.",
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(
            "--rules",
            metavar="FILE",
            help="The file of the site's conditions that fedcli join has, too: what they hold back "
            "is not told to callers either.",
        ),
    ] = None,
    log_level: Level = LogLevel.INFO,
    beside: Beside = (),
) -> None:
    """Serve deployed models over HTTP, also during training."""
    from fedcli.gate.gate import held_back
    from fedcli.gate.rules import Rules
    from fedmodels.config.recipe import recipe_in

    set_up_logging(log_level)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    host, port, is_near = _place(listen, "--listen", insecure)
    further = [(one, *_place(at, one.option, insecure)[:2]) for one, at in beside]
    if recipe is not None:
        recipe_in(recipe)  # what is wrong with it is said before the first request
    tokens = _tokens(feedback, feedback_tokens, listen, is_near=is_near)
    held = held_back(Rules.read(rules))
    models = _models(run, client, model, recipe)
    from fedplugins.serving.model_server import ModelServer

    end_on_sigterm()
    sites = _sites(run, models, data, feedback, 60 * feedback_every)
    server = ModelServer(host, port, models, tuple(allowed_hosts or ()), sites, tokens, held)
    place = server.url + ("models/NAME/" if len(models) > 1 else "")
    names = f"; NAME is one of {', '.join(models)}" if len(models) > 1 else ""
    typer.echo(f"answers at {place}predict, {server.url}health and {server.url}metrics{names}")
    ends = [site.end for site in sites.values()]
    try:
        for one, its_host, its_port in further:
            its_port, end = one.begin(server, its_host, its_port)
            ends.insert(0, end)
            typer.echo(f"{one.option} answers at {its_host}:{its_port}")
        server.serve()
    except SystemExit as ended:
        if not server.is_idle and isinstance(ended.code, int):
            os._exit(ended.code)  # a thread that still works on a request keeps it no longer
        raise
    finally:
        for end in ends:
            end()


def _place(text: str, option: str, insecure: bool) -> tuple[str, int, bool]:
    """Return a host, a port, and whether this machine alone reaches them; ConfigError if others."""
    from fedmodels.config.places import http_place
    from fedpb.channels import is_loopback

    host, port = http_place(text, option)
    is_near = is_loopback(f"[{host}]" if ":" in host else host)
    if not insecure and not is_near:
        raise ConfigError(
            f"{option} {text} can be reached from other machines without TLS; give the port "
            "alone for this machine, or --insecure"
        )
    return host, port, is_near


def _tokens(
    feedback: int | None, file: Path | None, listen: str, *, is_near: bool
) -> tuple[str, ...]:
    """Return the tokens by which labels come; none on loopback unless a file has some."""
    from fedplugins.serving.tokens import tokens_in

    if file is not None and feedback is None:
        raise ConfigError("--feedback-tokens is for --feedback: leave it out, or take labels back")
    if file is None and feedback is not None and not is_near:
        raise ConfigError(
            f"--listen {listen} can be reached from other machines, and labels change what the "
            "model learns: say by --feedback-tokens FILE who may send them"
        )
    return () if file is None else tokens_in(file)


def _sites(
    run: Path | None,
    models: Mapping[str, LiveModel],
    data: Path | None,
    feedback: int | None,
    every_s: float,
) -> dict[str, Site]:
    """Return the data of the clients whose models answer, by the names of these."""
    from fedcli.data.kept_runs import last_run
    from fedcli.data.store.own_files import cut_before
    from fedplugins.serving.site import Site

    if run is None:
        if data is not None or feedback is not None:
            raise ConfigError("--data and --feedback are for a client's model: --run and --client")
        return {}
    found = dict[str, Site]()
    for name in models:
        client = int(name.removeprefix("client-"))
        root = data or cut_before(last_run(run) / "own-data", client)
        if root is not None:
            found[name] = Site(root, client, feedback, every_s)
        elif feedback is not None:
            raise ConfigError(
                f"{run / 'own-data'} has no data of client {client}: pass the parent of its "
                "directory with --data"
            )
    if not found:
        typer.echo("note: served inputs are not monitored: pass the client's data with --data")
    return found


def _models(
    run: Path | None, client: str | None, model: Path | None, recipe: Path | None
) -> dict[str, LiveModel]:
    """Return the models that answer, by the names that callers ask them by."""
    if client is None or model is not None:
        name = re.sub(r"[^\w.-]+", "-", model.stem if model else "")
        return {name: live_model(run, None if client is None else 0, model, recipe)}
    found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", client)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < first + MAX_MODELS:
        raise ConfigError(
            f"--client {client} is no id, and no range such as 0-4 of at most {MAX_MODELS}"
        )
    return {f"client-{n}": live_model(run, n, None, recipe) for n in range(first, last + 1)}
