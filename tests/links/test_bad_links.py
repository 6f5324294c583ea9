"""Runs over links that delay, throttle, cut, double and reorder: they end in the honest digest."""

from __future__ import annotations

import pytest

from tests.integration.conftest import tables
from tests.links.proxy import Fate, Fates, storm

pytestmark = pytest.mark.loopback

EXPERIMENT = tables("fedrep")
"""Its heads are private, so that clients have states, and finish orders have a digest to say."""


def first(count: int, fate: Fate) -> Fates:
    """Return fates that are bad for the first so many connections."""
    return lambda number: fate if number < count else Fate()


LINKS: dict[str, tuple[Fates, str]] = {
    "delayed": (first(99, Fate(delay_s=0.01)), "connections"),
    "throttled": (first(99, Fate(bytes_per_s=1e6)), "connections"),
    "cut-on-the-way-up": (lambda n: Fate(cut=("up", 2 + n)) if n < 9 else Fate(), "cut"),
    "cut-on-the-way-down": (lambda n: Fate(cut=("down", 1 + n)) if n < 9 else Fate(), "cut"),
    "doubled": (first(99, Fate(doubled=True)), "doubled"),
    "reordered": (lambda n: Fate(late_s=20.0 * (n == 0)), "late"),
    "storm": (storm(1), "cut"),
}


@pytest.mark.parametrize("name", LINKS)
def test_a_run_over_bad_links_is_the_same_run(name, loopback, behind):
    fates, shows = LINKS[name]
    run = loopback(EXPERIMENT)
    server = run.serve()
    proxy = behind(run, fates)
    run.finish_as_alone(server, *[run.join(str(client)) for client in range(3)])
    assert proxy.done[shows] >= 1, proxy.done
    assert "Traceback" not in server.log.read_text()
