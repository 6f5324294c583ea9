"""What follows the events of a run by an option of ``serve`` and ``launch``: a page, or metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmodels.console.options import port_option, with_options
from fedmodels.errors import ConfigError
from fedmodels.plugins import usable

if TYPE_CHECKING:
    from fedsrv.progress.events import Ending, Event, EventLog


Follow = Callable[[str, Path | None], Callable[["Event"], object]]


@dataclass(frozen=True)
class Watcher:
    """Something that is served over HTTP beside a run, at a port that an option names."""

    option: str
    help: str
    begin: Callable[[EventLog, Path, str, int, tuple[str, ...]], Ending]
    """Serves it, by the events and the directory of a run, at a host and a port, also for those who
    ask by further names, and returns what ends that. It may raise a ConfigError: the place cannot
    be used, or a package is missing."""
    of_queue: Callable[[str, int, tuple[str, ...]], tuple[Follow, Ending]] | None = None
    """Serves it for the runs of a queue, at a place likewise. What it returns first follows a run,
    by its name and directory, and takes in its events; without one, the run's page is dropped."""

    @property
    def parameter(self) -> Parameter:
        """The option, as a parameter of a command."""
        return port_option(self.option, self.help, "Watching")


ALLOWED = "--allowed-hosts"
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        ALLOWED,
        metavar="NAME",
        help="A host name of the pages, such as a proxy's; * matches any letters. Addresses and "
        "this machine's own name are always allowed.",
        rich_help_panel="Watching",
    ),
]


def _live_page(
    events: EventLog, run: Path, host: str, port: int, allowed: tuple[str, ...]
) -> Ending:
    from fedsrv.dashboard.live import show

    return show(events, run, host, port, allowed)


def _live_pages(host: str, port: int, allowed: tuple[str, ...]) -> tuple[Follow, Ending]:
    from fedsrv.dashboard.live import show_several

    return show_several(host, port, allowed)


DASHBOARD = Watcher(
    "--dashboard", "A live page of the run; on loopback unless HOST:PORT.", _live_page, _live_pages
)


@functools.cache
def watchers() -> tuple[Watcher, ...]:
    """Return all watchers, those of plugins first."""
    return (*usable("fedtide.watchers"), DASHBOARD)


def with_watchers(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option of each watcher; ``watched`` gets the places that are given.

    With them come the names that are allowed to ask, with commas between.
    """

    def watched(given: dict[str, Any]) -> dict[str, str]:
        places = {w.option: given[w.parameter.name] for w in watchers()}
        found = {option: place for option, place in places.items() if place is not None}
        if names := given["allowed_hosts"]:
            found[ALLOWED] = ",".join(names)
        return found

    names = Parameter("allowed_hosts", Parameter.KEYWORD_ONLY, default=None, annotation=Allowed)
    return with_options(command, "watched", [*(w.parameter for w in watchers()), names], watched)


def wanted(
    watched: Mapping[str, str], run: Path, insecure: bool
) -> list[Callable[[EventLog], Ending]]:
    """Return what follows a run's events, by the places that options name.

    Raises:
        ConfigError: a place is none, or other machines reach it and ``insecure`` is not given; or
            names are allowed to ask for no page.
    """

    def follow(
        watcher: Watcher, host: str, port: int, allowed: tuple[str, ...], events: EventLog
    ) -> Ending:
        return watcher.begin(events, run, host, port, allowed)

    return [functools.partial(follow, *asked) for asked in asked_for(watched, insecure)]


def asked_for(
    watched: Mapping[str, str], insecure: bool
) -> list[tuple[Watcher, str, int, tuple[str, ...]]]:
    """Return the watchers whose places are given, with host, port and the names allowed to ask.

    Raises:
        ConfigError: as :func:`wanted`.
    """
    allowed = tuple(filter(None, watched.get(ALLOWED, "").split(",")))
    if allowed and len(watched) == 1:
        options = " or ".join(watcher.option for watcher in watchers())
        raise ConfigError(f"{ALLOWED} is only used with {options}")
    return [
        (watcher, *place_of(watched[watcher.option], watcher.option, insecure), allowed)
        for watcher in watchers()
        if watcher.option in watched
    ]


def place_of(text: str, option: str, insecure: bool) -> tuple[str, int]:
    """Return the host and port of a page: it has no TLS and asks nobody who they are.

    Raises:
        ConfigError: it is none, or other machines reach it and ``insecure`` is not given.
    """
    from fedmodels.config.places import http_place
    from fedpb.channels import is_loopback

    host, port = http_place(text, option)
    if not insecure and not is_loopback(f"[{host}]" if ":" in host else host):
        raise ConfigError(
            f"{option} {text} can be reached from other machines without TLS; give the port alone "
            "for this machine, or --insecure"
        )
    return host, port
