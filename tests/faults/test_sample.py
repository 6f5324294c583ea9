"""A sample of what ``make soak`` does: kills and losses of power at points drawn by seeds."""

from __future__ import annotations

import pytest

from tests.faults.ground import Ground
from tests.faults.verdict import troubles

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(300)]  # a launcher imports torch anew

SAMPLE = [("fedper", False, 1), ("fedper", False, 2), ("creff", False, 3), ("fedper", True, 4)]
"""A method with private states and one with a large server half; by hand and launched; a seed."""


@pytest.mark.parametrize(("method", "launched", "seed"), SAMPLE)
def test_a_run_that_is_struck_ends_as_if_nothing_had_happened(
    method: str, launched: bool, seed: int, ground: Ground
) -> None:
    undisturbed = ground.undisturbed(method, launched)
    played = ground.play(method, ground.drawn(method, seed, launched), launched)
    assert played.struck
    assert troubles(played, undisturbed) == [], played.plan
