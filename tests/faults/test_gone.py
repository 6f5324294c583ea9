"""A client is killed after its first upload and never comes back: the others end the run."""

import pytest

from tests.faults.ground import CLIENTS, Setting
from tests.faults.plans import Fault, Plan
from tests.faults.verdict import troubles_of_the_living

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(200)]

FIRST = next(iter(CLIENTS))


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_the_others_end_a_run(asynchronous, ground):
    setting = Setting("fedper", asynchronous=asynchronous, lenient=True)
    once = Fault(FIRST, "push.after", 1, (FIRST,))
    played = ground.play(setting, Plan((once,), gone=(FIRST,)))
    assert played.struck == [once]
    assert troubles_of_the_living(played, 6 if asynchronous else 4) == [], played.plan
