"""Commands that reach a run over the network: ``status``, ``watch``, ``exclude`` and others."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedmodels.console.rows import QueuedLine
    from fedpb.v1.coordinator_pb2 import ClassOf
    from fedsrv.identity.tls import ChannelCredentials
    from fedsrv.progress.events import Event

watching_app = typer.Typer()


def _checked(address: str) -> str:
    """Return an address that is one; else a malformed one would look like a dead server."""
    from fedmodels.config.places import check_address

    check_address(address, "the coordinator's address")
    return address


def _checked_place(place: str) -> str:
    """Return an address, or a run directory."""
    from fedmodels.errors import ConfigError

    if Path(place).is_dir():
        return place
    try:
        return _checked(place)
    except ConfigError as error:
        raise ConfigError(f"{error}; it is no directory either") from None


Place = Annotated[
    str,
    typer.Argument(
        metavar="HOST:PORT|RUN",
        help="The coordinator, or a run directory.",
        callback=_checked_place,
    ),
]
Coordinator = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="The coordinator.", callback=_checked)
]
Clients = Annotated[list[int], typer.Argument(help="Ids of the clients.")]
AsJson = Annotated[bool, typer.Option("--json", help="Objects instead of lines.")]
Authority = Annotated[Path | None, typer.Option("--tls-ca", help="Authority of the server.")]
Cert = Annotated[Path | None, typer.Option("--tls-cert", help="The watcher's certificate.")]
Key = Annotated[Path | None, typer.Option("--tls-key", help="Its key.")]
Revoked = Annotated[
    Path | None,
    typer.Option("--tls-crl", help="Certificate revocation list; revoked servers are rejected."),
]


@watching_app.command()
def status(
    server: Place,
    as_json: AsJson = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to listen.")] = 2.0,
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """Show a run's progress, scores and clients and what it waits for, or the runs of a queue."""
    from fedmodels.console.printable import json_text
    from fedsrv.progress.run_status import RunStatus

    if Path(server).is_dir():
        found = RunStatus.of_directory(Path(server))
    elif (runs := queued_at(server, credentials_of(server, ca, cert, key, crl))) is not None:
        for run in runs:
            place = f" at {run.address}" if run.address else ""
            line = f": {run.doing}" if run.doing else ""
            shown = f"{run.run}: {run.state}{place}{line}"
            typer.echo(run.model_dump_json() if as_json else shown)
        if not (runs or as_json):
            typer.echo("the queue is empty: add a run with fedsrv submit")
        return
    else:
        found = RunStatus.of(_events(server, ca, cert, key, crl, seconds))
    for line in [json_text(found.to_dict())] if as_json else found.lines():
        typer.echo(line)


@watching_app.command()
def watch(
    server: Coordinator,
    as_json: AsJson = False,
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """Follow a run until it ends, one line per event.

    Ends with 0 if the run has finished, else with 1 and a line that says why.
    """
    from fedmodels.errors import RunFailed
    from fedsrv.progress.event_lines import ENDED, EventFormatter, level_of

    formatter, finished = EventFormatter(), False
    why = f"{server} ended without giving a reason; see the last line of fedsrv serve"
    for event in _events(server, ca, cert, key, crl, None):
        if as_json or level_of(event) > logging.DEBUG:
            typer.echo(event.to_json() if as_json else formatter.line(event))
            sys.stdout.flush()
        if event.kind in ("finished", ENDED):
            finished, why = event.kind == "finished", formatter.line(event)
    if not finished:
        raise RunFailed(why)


@watching_app.command()
def health(
    server: Coordinator,
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """Exit with 0 if a coordinator serves; for probes of containers."""
    from fedsrv.progress.watching import check_health

    check_health(server, credentials_of(server, ca, cert, key, crl))


@watching_app.command()
def retire(
    server: Coordinator,
    clients: Clients,
    forget: Annotated[
        bool, typer.Option("--forget", help="Also delete what the server keeps of these clients.")
    ] = False,
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """Retire clients of an open run permanently, from the next round on.

    What they taught the shared model stays in it.
    """
    _steer(server, ca, cert, key, crl, retire=[str(c) for c in clients], forget=forget)
    typer.echo(f"{server}: retires before the next round: {', '.join(map(str, clients))}")


@watching_app.command()
def exclude(
    server: Coordinator,
    clients: Clients,
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """Exclude clients permanently, from the next round on.

    What they sent before stays in the model. A resumed run leaves them out as well.
    """
    _steer(server, ca, cert, key, crl, exclude=[str(c) for c in clients])
    typer.echo(f"{server}: excluded before the next round: {', '.join(map(str, clients))}")


@watching_app.command("set-aside")
def set_aside(
    server: Coordinator,
    client: Annotated[int, typer.Option(min=0, help="Whose task it is.")],
    task: Annotated[int, typer.Option(min=0, help="The number of the task, from 0.")],
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """Set a task of an open run aside permanently; its client continues without it.

    What the run has learned from it stays in the model. It is trained and scored no more.
    """
    _steer(server, ca, cert, key, crl, set_aside=[(str(client), task)])
    typer.echo(f"{server}: task {task} of client {client} is set aside before the next round")


@watching_app.command()
def classes(
    server: Coordinator,
    rename: Annotated[
        tuple[str, str] | None, typer.Option(metavar="OLD NEW", help="Rename a class.")
    ] = None,
    merge: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="CLASS INTO", help="Merge a class into another one, permanently."),
    ] = None,
    as_json: AsJson = False,
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """Show the classes of an open run, or rename or merge some.

    Sites may go on calling a class as they did: the run knows its earlier names.
    """
    from fedmodels.console.printable import json_text, printable
    from fedmodels.facts.run_classes import ClassChange

    if rename is not None and merge is not None:
        raise typer.BadParameter("--rename and --merge are two commands: the first one first")
    if (change := rename or merge) is not None:
        _steer(server, ca, cert, key, crl, classes=[ClassChange(*change)], merge=merge is not None)
        old, now = map(printable, change)
        how = "called" if merge is None else "part of"
        typer.echo(f"{server}: the class {old!r} is {how} {now!r} from the next round on")
        return
    for label, one in enumerate(_steer(server, ca, cert, key, crl, classes=())):
        name, earlier = printable(one.name), [*map(printable, one.earlier)]
        facts = {"examples": one.examples, "clients": one.clients, "earlier": earlier}
        was = f", earlier {', '.join(map(repr, earlier))}" if earlier else ""
        if one.part_of:
            facts, was = {**facts, "part_of": one.part_of}, f", part of {printable(one.part_of)!r}"
        line = f"{label:>3}  {name!r}: {one.examples} examples at {one.clients} clients{was}"
        typer.echo(json_text({"label": label, "name": name, **facts}) if as_json else line)


@watching_app.command()
def close(
    server: Coordinator,
    now: Annotated[
        bool,
        typer.Option("--now", help="End after the current round, even if data are left to learn."),
    ] = False,
    ca: Authority = None,
    cert: Cert = None,
    key: Key = None,
    crl: Revoked = None,
) -> None:
    """End an open run once it has learned all data; clients store their final models."""
    _steer(server, ca, cert, key, crl, close=True, now=now)
    when = "after the current round" if now else "once it has learned all data"
    typer.echo(f"{server}: the run ends {when}")


def queued_at(server: str, credentials: ChannelCredentials | None) -> list[QueuedLine] | None:
    """Return the runs of a queue by the address of its front; None of one run's coordinator."""
    from fedmodels.console.printable import printable
    from fedmodels.console.rows import QueuedLine
    from fedpb.channels import place_after
    from fedpb.v1 import front_pb2 as pb
    from fedsrv.progress.watching import ask_front

    answer = ask_front(server, credentials, "ListRuns", pb.ListRunsRequest(), pb.ListRunsResponse)
    return answer and [
        QueuedLine(
            run=printable(one.name), state=printable(one.state), directory=None,
            address=place_after(server, one.place) if one.place else None,
            doing=printable(one.line),
        )
        for one in answer.runs
    ]  # fmt: skip


def credentials_of(
    server: str, ca: Path | None, cert: Path | None, key: Path | None, crl: Path | None
) -> ChannelCredentials | None:
    """Return a caller's credentials, once the server has shown no revoked certificate."""
    from fedpb.server_check import ServerCheck
    from fedsrv.identity.tls import caller_credentials

    found = caller_credentials(ca, cert, key, "--tls")
    if crl is not None:
        ServerCheck(server, ca, crl, cert, key)()
    return found


def _steer(
    server: str,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    crl: Path | None,
    **wanted: Any,
) -> Sequence[ClassOf]:
    """Tell a coordinator what an operator wants; return the classes that it tells of."""
    from fedsrv.progress.watching import steer

    return steer(server, credentials_of(server, ca, cert, key, crl), **wanted)


def _events(
    server: str,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    crl: Path | None,
    seconds: float | None,
) -> Iterator[Event]:
    """Yield what a coordinator tells a watcher."""
    from fedsrv.progress.watching import watched

    return watched(server, credentials_of(server, ca, cert, key, crl), seconds)
