"""What the log is told of a client that joins and leaves all the time; where a run stands."""

from fedmodels.printable import printable
from fedsrv.event_lines import MAX_COMINGS, ComingsLimit, EventFormatter
from fedsrv.events import Event
from fedsrv.run_status import Pace, RunStatus


def lines(comings, client, times, kind="joined"):
    events = [Event(kind, client, unix_time=float(t)) for t in times]
    return [printable(comings.limited(event, f"{kind} at {event.unix_time}")) for event in events]


def test_few_lines_are_all_told():
    assert all(lines(ComingsLimit(), "3", range(0, 600, 3))), "twenty in each minute"


def test_a_flood_ends_in_one_line_that_says_so():
    found = lines(ComingsLimit(), "3", [t / 100 for t in range(5_900)])
    assert found[MAX_COMINGS - 1] == f"joined at {(MAX_COMINGS - 1) / 100}"
    assert found[MAX_COMINGS] == "client 3 comes and goes all the time: no more of it is told"
    assert set(found[MAX_COMINGS + 1 :]) == {""}


def test_it_is_told_again_when_a_minute_is_over():
    comings = ComingsLimit()
    lines(comings, "3", [0.0] * 100)
    assert lines(comings, "3", [60.0, 60.1, 60.2]) == ["", "joined at 60.1", "joined at 60.2"]


def test_others_and_other_events_are_told():
    comings = ComingsLimit()
    lines(comings, "3", [0.0] * 100)
    assert lines(comings, "4", [0.0]) == ["joined at 0.0"]
    assert all(lines(comings, "3", [0.0] * 100, "failed"))
    assert lines(comings, "3", [0.0], "left") == [""]


def test_a_run_waits_no_longer_for_those_who_have_come():
    line = "gathering the run's clients: waiting for clients 0, 1 (not connected) for 10 s"
    status = RunStatus.of([Event("waiting", detail={"line": line, "clients": ["0", "1"]})])
    status.take(Event("joined", "7"))
    status.take(Event("joined", "0"))
    assert status.waiting == line
    status.take(Event("joined", "1"))
    assert status.waiting == ""
    assert status.lines()[0] == "state: going on"
    status.take(Event("waiting", detail={"line": "client 1 (at work)", "clients": ["1"]}))
    status.take(Event("upload", "1"))
    assert status.waiting == ""


def test_the_last_interaction_that_is_known_leaves_no_time():
    """An open run that waited for new data had "about 0 s left"."""
    pace = Pace()
    for number in range(2):
        pace.take(Event("commit", interaction=number, unix_time=10.0 * number))
    assert pace.seconds_left(4) == 20
    assert pace.seconds_left(2) is None


def test_clients_are_where_their_last_event_leaves_them():
    place = {"interaction": 4, "round": 2}
    status = RunStatus.of(
        [
            Event("listening", detail={"clients": 3, "needed": 3, "address": "h:1"}),
            *(Event("joined", str(client)) for client in range(3)),
            *(Event("order", str(client), **place, detail={"order": 1}) for client in range(3)),
            Event("beat", "0", 4, detail={"epoch": 0, "batch": 9}),
            Event("upload", "1", **place),
            Event("failed", "2", **place, detail={"reason": "its disk\x1b[2J is full"}),
            Event("left", "2", detail={"reason": "gone"}),
            Event("joined", "evaluator"),
        ]
    )
    assert {name: str(client) for name, client in status.clients.items()} == {
        "0": "trains: epoch 1, batch 10",
        "1": "waits",
        "2": "left",
        "evaluator": "joined",
    }
    assert (status.joined, status.expected) == (3, 3)
    assert status.present == ["0", "1", "evaluator"]
    assert status.clients["2"].failures == 1
    assert [status.clients[name].lag(6) for name in "01"] == [None, 2]


def test_a_roll_back_takes_the_status_back():
    status = RunStatus.of([Event("commit", "", 5, 5, {"of": 9}), Event("rollback", "", 2)])
    assert status.place == "interaction 3 of 9: round 6"
    assert status.seconds_left is None


def test_the_work_of_a_server_is_counted_apart_from_interactions():
    facts = {"work": "trains a generator", "step": 2, "of": 7, "loss": None}
    event = Event("server", "", 3, 1, facts)
    formatter = EventFormatter()
    assert formatter.line(event) == "interaction 4: round 2: trains a generator, step 2 of 7"
    assert formatter.status.work == "trains a generator, step 2 of 7"
    formatter.line(Event("commit", "", 3, 1, {"of": 9}))
    assert formatter.status.work == ""


def test_scores_are_percentages():
    event = Event("scores", "", 0, 0, {"metrics": {"a_loc": 0.75, "mine": 2.0}})
    assert EventFormatter().line(event) == "interaction 1: round 1 scored: a_loc 75.0 %"


def test_notes_are_shown_once_and_the_last_of_many():
    status = RunStatus.of(Event("note", detail={"line": f"line {n % 12}"}) for n in range(25))
    assert [*status.notes] == [f"line {n % 12}" for n in range(15, 25)]
    assert [line for line in status.lines() if line.startswith("note: ")][-1] == "note: line 0"
    assert status.to_dict()["notes"][-1] == "line 0"
