"""``fedsrv relay``."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedmodels.console.log_lines import LogLevel
from fedmodels.console.options import AsJson, Level, Quiet
from fedmodels.errors import ConfigError
from fedmodels.host.machine import end_on_sigterm
from fedsrv.commands import options

log = logging.getLogger("fedsrv")
relay_app = typer.Typer()


@relay_app.command(rich_help_panel="Run")
def relay(
    up: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator above.")],
    clients: Annotated[
        str, typer.Option(metavar="A-B", help="The clients that join here, such as 0-24.")
    ],
    listen: options.Place = "127.0.0.1:0",
    code: Annotated[
        list[Path] | None,
        typer.Option(help="A file of the run's own method or net, such as method.py."),
    ] = None,
    tls_cert: options.Certificate = None,
    tls_key: options.Key = None,
    tls_client_ca: options.ClientAuthority = None,
    tls_crl: options.RevokedCallers = None,
    insecure: options.Insecure = False,
    up_ca: Annotated[Path | None, typer.Option(help="CA of the coordinator.")] = None,
    up_cert: Annotated[
        Path | None, typer.Option(help="The relay's certificate, which covers its clients.")
    ] = None,
    up_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    up_crl: Annotated[
        Path | None, typer.Option(help="Certificate revocation list for the coordinator.")
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep an audit log of callers in DIR; fedsrv audit shows it."
        ),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay", help="Stay, and relay each run that the coordinator's address serves."
        ),
    ] = False,
    quiet: Quiet = False,
    log_level: Level = LogLevel.INFO,
    as_json: AsJson = False,
) -> None:
    """Relay a run to the clients of one place, and send up the sum of their weights."""
    options.set_up(quiet, log_level, as_json)
    from fedmodels.config.places import check_address
    from fedpb.channels import place_after
    from fedpb.server_check import ServerCheck
    from fedplugins.relays.kept_log import kept_lists
    from fedplugins.relays.relaying import RunGone, Upstream, serve_relay
    from fedplugins.relays.staying import Ready, places_behind, relay_runs
    from fedsrv.identity.listen import Listen
    from fedsrv.identity.tls import caller_credentials
    from fedsrv.progress.event_lines import EventPrinter

    ids = range_of(clients)
    check_address(up, "--up")
    of_server, of_clients = kept_lists(audit)

    def relay_run(address: str = "", on_ready: Ready = lambda address: None) -> None:
        credentials = caller_credentials(up_ca, up_cert, up_key, "--up")
        places = partial(places_behind, up, credentials, ids[0])
        behind = next(iter(places() if stay else ()), 0)
        server = place_after(up, behind) if behind else up

        def is_served() -> bool:
            return not (now := places()) or behind in now

        above = Upstream(server, credentials, is_served=is_served if stay else lambda: True)
        if up_crl is not None:
            kept = of_server.read, of_server.keep
            check = ServerCheck(server, up_ca, up_crl, up_cert, up_key, "--up", kept)
            above = replace(above, check=check)
        place = Listen.given(address or listen, tls_cert, tls_key, tls_client_ca, insecure, tls_crl)
        if place.revoked is not None:
            place.revoked.kept_by(of_clients.read, of_clients.keep)
        telling = EventPrinter(names_address=not (as_json or address), prints=False)
        serve_relay(ids, above, place, telling, code or (), audit, on_ready)
        telling.end()

    end_on_sigterm()
    if stay:
        relay_runs(relay_run)
    more = f"with --stay, a relay continues with the next run that is served at {up}"
    try:
        relay_run()
    except RunGone as gone:
        raise RunGone(f"{gone}; {more}") from None
    log.info("this relay ends together with its run; %s", more)


def range_of(text: str) -> range:
    """Read ``--clients``: a range with both ends, or one id.

    Raises:
        ConfigError: it is neither.
    """
    found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise ConfigError(f"--clients {text!r} is no range such as 0-24")
    return range(first, last + 1)
