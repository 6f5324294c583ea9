"""What else answers with the models of ``serve-model``, each at a port that an option names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from fedmodels.console.options import port_option, with_options
from fedmodels.plugins import usable

if TYPE_CHECKING:
    from fedplugins.serving.model_server import ModelServer

Ending = Callable[[], None]
Beside = Sequence[tuple[Any, str]]
"""Each :class:`Service` that was asked for, and where."""


@dataclass(frozen=True)
class Service:
    """A further way to the models."""

    option: str
    help: str
    begin: Callable[[ModelServer, str, int], tuple[int, Ending]]
    """Begins it at a host and a port, 0 for any that is free; returns the port and what ends it.
    It may raise a ConfigError: the place cannot be used."""

    @property
    def parameter(self) -> Parameter:
        """The option, as a parameter of a command."""
        return port_option(self.option, self.help)


@functools.cache
def services() -> tuple[Service, ...]:
    """Return what plugins add."""
    return tuple(usable("fedcli.services"))


def with_services(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option of each service; ``beside`` gets those that are asked for."""

    def asked(given: dict[str, Any]) -> Beside:
        places = ((one, given[one.parameter.name]) for one in services())
        return [(one, place) for one, place in places if place is not None]

    return with_options(command, "beside", [one.parameter for one in services()], asked)
