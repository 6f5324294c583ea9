"""How ``fedcli join`` takes the signals that end it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fedcli import cli


@pytest.fixture
def ends_at_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, cli._end)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_does_not_disturb_the_end(ends_at_sigterm: None) -> None:
    """Supervisors signal a process and its group: two signals come at once."""
    with pytest.raises(SystemExit, match="143"):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
