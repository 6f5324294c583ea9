"""A sample of what ``make soak`` does: kills and losses of power at points drawn by seeds."""

import pytest

from tests.faults.ground import Setting
from tests.faults.verdict import troubles

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(300)]  # a launcher imports torch anew

SAMPLE = [
    (Setting("fedper"), 1),
    (Setting("creff"), 3),
    (Setting("fedper", launched=True), 4),
    (Setting("fedper", asynchronous=True), 5),
    (Setting("fedper", relayed=True), 6),
]
"""A method with private states and one with a large server half, and a seed."""


@pytest.mark.parametrize(("setting", "seed"), SAMPLE, ids=str)
def test_a_run_that_is_struck_ends_as_if_nothing_had_happened(setting, seed, ground):
    undisturbed = ground.undisturbed(setting)
    played = ground.play(setting, ground.drawn(setting, seed))
    assert played.struck
    assert troubles(played, undisturbed) == [], played.plan
