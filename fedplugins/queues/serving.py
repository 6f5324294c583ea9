"""``fedsrv serve QUEUE``: a front that listens, and the runs below it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fedmodels.errors import ConfigError, reason_of

if TYPE_CHECKING:
    import typer

OF_FRONT = ("listen", "at_once", "wait_for_sites", "quiet", "as_json")
"""Options of the front itself; each run gets the others."""


def serve_all(queue: Path, context: typer.Context, watched: Mapping[str, str]) -> NoReturn:
    """Serve the runs of a queue for good, by the options of ``fedsrv serve``.

    Args:
        queue: the directory.
        context: the command, and what it was given.
        watched: the places of pages, by option.

    Raises:
        ConfigError: an option is no good, or the directory cannot be used.
        RunFailed: another process serves the queue, or the address is not free.
        SystemExit: SIGTERM came.
    """
    from fedmodels.console.options import words_of
    from fedmodels.host.machine import end_on_sigterm
    from fedmodels.host.warm import kept
    from fedplugins.queues.front import Front
    from fedplugins.queues.service import FrontService
    from fedsrv.commands.watchers import asked_for, watchers
    from fedsrv.identity.listen import Listen
    from fedsrv.state.run_directory import lock
    from fedsrv.transport.listening import listen_at, stop_server

    given = context.params
    if (address := str(given["listen"])).endswith(":0"):
        raise ConfigError("a queue needs a port that sites know: --listen HOST:PORT")
    cert, key, ca, crl = (given[f"tls_{name}"] for name in ("cert", "key", "client_ca", "crl"))
    listen = Listen.given(address, cert, key, ca, given["insecure"], crl)
    listen.check()
    end_on_sigterm()
    with ExitStack() as stack:
        stack.enter_context(kept(["fedsrv.cli", "fedsrv.coordinator"]))  # before any thread
        try:
            stack.callback(os.close, lock(queue))
        except OSError as error:
            raise ConfigError(f"the queue {queue} cannot be used: {reason_of(error)}") from None
        pages = []
        for watcher, host, port, allowed in asked_for(watched, given["insecure"]):
            if watcher.of_queue is None:
                raise ConfigError(f"{watcher.option} is for one run, and {queue} is a queue")
            follow, end = watcher.of_queue(host, port, allowed)
            stack.callback(end)
            pages.append(follow)
        own = dict.fromkeys(
            [*OF_FRONT, "allowed_hosts", *(watcher.parameter.name for watcher in watchers())]
        )
        front = Front(
            queue, address, words_of(context, **own),
            at_once=given["at_once"], patience_s=given["wait_for_sites"], pages=pages,
        )  # fmt: skip
        service = FrontService(front, listen.guard())
        service.complaints.open()
        stack.callback(service.complaints.close)
        server, _ = listen_at(
            address, listen.credentials, service.handlers(), service.gate, service.health,
            service.gate.threads,
        )  # fmt: skip
        stack.callback(service.gate.close)
        stack.callback(stop_server, server)
        front.serve()
    raise AssertionError("a front serves until it is stopped")
