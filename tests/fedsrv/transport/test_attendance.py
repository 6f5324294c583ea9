"""How clients stand is stored now and then, however often it changes."""

from fedmodels.times import GONE_EVERY_S
from fedsrv.transport.waiting import Attendance


def test_a_client_that_comes_and_goes_costs_one_statement_a_look():
    now, kept = [0.0], list[dict]()
    attendance = Attendance({}, lambda: 40.0, lambda: now[0], keep=kept.append)
    attendance.look()
    for _ in range(100):
        attendance.joined(3)
        attendance.left(3, "stopped")
        now[0] += GONE_EVERY_S / 100
        attendance.look()
    now[0] += GONE_EVERY_S
    attendance.look()
    assert len(kept) <= 2
    assert kept[-1][3]["state"] == "away"
    assert kept[-1][3]["why"] == "stopped"
