"""The fixtures of the integration tests, and proxies in front of their coordinators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.integration.conftest import Loopback, _plugins, loopback, partition
from tests.links.proxy import Fates, Proxy

__all__ = ["_plugins", "loopback", "partition"]

Behind = Callable[[Loopback, Fates], Proxy]


@pytest.fixture
def behind() -> Iterator[Behind]:
    """Return a maker of proxies: clients that join later reach the coordinator through it."""
    made: list[Proxy] = []

    def put(run: Loopback, fates: Fates) -> Proxy:
        made.append(Proxy(run.port, fates))
        run.port = made[-1].port
        return made[-1]

    yield put
    for proxy in made:
        proxy.close()
