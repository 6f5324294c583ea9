"""What the log is told of a client that joins and leaves all the time; where a run stands."""

from fedmodels.printable import printable
from fedsrv.events import Event
from fedsrv.narration import MOST_COMINGS, Chatter, Standing


def lines(chatter, client, times, kind="joined"):
    events = [Event(kind, client, unix_time=float(t)) for t in times]
    return [printable(chatter.hushed(event, f"{kind} at {event.unix_time}")) for event in events]


def test_few_lines_are_all_told():
    assert all(lines(Chatter(), "3", range(0, 600, 3))), "twenty in each minute"


def test_a_flood_ends_in_one_line_that_says_so():
    found = lines(Chatter(), "3", [t / 100 for t in range(5_900)])
    assert found[MOST_COMINGS - 1] == f"joined at {(MOST_COMINGS - 1) / 100}"
    assert found[MOST_COMINGS] == "client 3 comes and goes all the time: no more of it is told"
    assert set(found[MOST_COMINGS + 1 :]) == {""}


def test_it_is_told_again_when_a_minute_is_over():
    chatter = Chatter()
    lines(chatter, "3", [0.0] * 100)
    assert lines(chatter, "3", [60.0, 60.1, 60.2]) == ["", "joined at 60.1", "joined at 60.2"]


def test_others_and_other_events_are_told():
    chatter = Chatter()
    lines(chatter, "3", [0.0] * 100)
    assert lines(chatter, "4", [0.0]) == ["joined at 0.0"]
    assert all(lines(chatter, "3", [0.0] * 100, "failed"))
    assert lines(chatter, "3", [0.0], "left") == [""]


def test_a_run_waits_no_longer_for_those_who_have_come():
    line = "gathering the run's clients: waiting for clients 0, 1 (not connected) for 10 s"
    standing = Standing.of([Event("waiting", detail={"line": line, "clients": ["0", "1"]})])
    standing.take(Event("joined", "7"))
    standing.take(Event("joined", "0"))
    assert standing.waiting == line
    standing.take(Event("joined", "1"))
    assert standing.waiting == ""
    assert standing.lines()[0] == "state: going on"
    standing.take(Event("waiting", detail={"line": "client 1 (at work)", "clients": ["1"]}))
    standing.take(Event("upload", "1"))
    assert standing.waiting == ""
