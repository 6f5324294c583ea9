"""What the log is told of a client that joins and leaves all the time; where a run stands."""

import logging

from fedmodels.console.printable import moment_text, printable
from fedsrv.progress.event_lines import MAX_COMINGS, ComingsLimit, EventFormatter, level_of
from fedsrv.progress.events import Event
from fedsrv.progress.run_status import Pace, RunStatus


def lines(comings, client, times, kind="joined"):
    events = [Event(kind, client, unix_time=float(t)) for t in times]
    return [printable(comings.limited(event, f"{kind} at {event.unix_time}")) for event in events]


def test_few_lines_are_all_told():
    assert all(lines(ComingsLimit(), "3", range(0, 600, 3))), "twenty in each minute"


def test_a_flood_ends_in_one_line_that_says_so():
    found = lines(ComingsLimit(), "3", [t / 100 for t in range(5_900)])
    assert found[MAX_COMINGS - 1] == f"joined at {(MAX_COMINGS - 1) / 100}"
    assert found[MAX_COMINGS] == "client 3 keeps leaving and returning: this is not reported again"
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


def test_rests_are_no_part_of_the_pace():
    """A run that rested for a month had months left."""
    pace = Pace()
    for number, time in enumerate((0, 10, 20)):
        pace.take(Event("commit", interaction=number, unix_time=time))
    pace.take(Event("resting", unix_time=20.0))
    pace.take(Event("growth", unix_time=1e6))
    assert pace.seconds_left(6) is None
    pace.take(Event("commit", interaction=3, unix_time=1e6 + 60))
    assert pace.seconds_left(6) == 20, "each interaction took ten seconds"
    pace.take(Event("commit", interaction=4, unix_time=1e6 + 80))
    assert pace.seconds_left(6) == 40 / 3


def test_a_run_at_rest_is_at_its_end_and_nobody_is_seen_who_is_gone():
    """A client that was killed while the run rested counted as seen for good."""
    gone = {"line": "client 1 is gone", "clients": ["1"]}
    status = RunStatus.of(
        [
            Event("present", detail={"clients": ["0", "1", "7", "evaluator"]}),
            Event("joined", "0"),
            Event("joined", "1"),
            Event("commit", "", 2, 2, {"of": 3}),
            Event("resting", detail={"line": "it waits for new data", "clients": []}),
        ]
    )
    assert status.lines()[0] == "state: resting"
    assert status.present == ["0", "1", "7", "evaluator"]
    assert status.num_present == 3
    assert status.is_at_the_end
    status.take(Event("gone", detail=gone, unix_time=5.0))
    assert (status.present, status.gone) == (["0", "7", "evaluator"], ["1"])
    assert "clients present: 2 of 3" in status.lines()
    (line,) = (line for line in status.lines() if line.startswith("gone: "))
    assert line.startswith("gone: client 1 since 19")
    status.take(Event("back", detail=gone))
    assert (status.present, status.gone) == (["0", "1", "7", "evaluator"], [])
    status.take(Event("growth", detail={"line": "client 0 with another task"}))
    assert status.lines()[0] == "state: going on"
    assert level_of(Event("resting", detail={"clients": []})) == logging.INFO
    assert level_of(Event("resting", detail={"clients": ["1"]})) == logging.WARNING


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
        "2": "left: gone",
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
    told = Event("commit", interaction=0, round=0, detail={"of": 4})
    notes = (
        Event("note", detail={"line": f"line {n % 12}"}, unix_time=60.0 * n) for n in range(25)
    )
    status = RunStatus.of([told, *notes])
    assert [*status.notes] == [f"line {n % 12}" for n in range(15, 25)]
    last = [line for line in status.lines() if line.startswith("note: ")][-1]
    assert last == f"note: {moment_text(60.0 * 24)}, after round 1: line 0"
    assert status.to_dict()["notes"][-1] == last.removeprefix("note: ")
    assert moment_text(1e300) == "at an unknown time"


def test_an_open_run_has_no_last_interaction():
    """It said "60 of 60" while it waited for the next week's data."""
    planned = {"interaction": 59, "round": 59}
    closed = Event("commit", detail={"of": 60, "task": 0}, **planned)
    going_on = Event("commit", detail={"of": 60, "task": 0, "open": True}, **planned)
    assert RunStatus.of([closed]).place == "interaction 60 of 60: round 60, task 0"
    assert RunStatus.of([going_on]).place == "interaction 60: round 60, task 0"
    line = EventFormatter().line(going_on)
    assert line.startswith("interaction 60: round 60, task 0 committed")


def test_the_roster_says_who_is_away_who_is_out_and_whose_file_was_refused():
    """Also of clients of which no event tells: they were away before the coordinator began."""
    roster = {
        "0": {"state": "present", "since": 5.0, "why": "", "refused": "column 'x' is missing"},
        "1": {"state": "away", "since": 5.0, "why": "stopped", "refused": ""},
        "2": {"state": "out", "since": 5.0, "why": "an operator retired it", "refused": ""},
    }
    told = {"clients": ["0"], "roster": roster}
    status = RunStatus.of(
        [
            Event("listening", detail={"clients": 5, "needed": 5, "address": "h:1"}),
            Event("present", detail=told),
        ]
    )
    assert (status.members, status.gone, status.present) == (["0", "1"], ["1"], ["0"])
    lines = status.lines()
    assert "clients present: 1 of 2, 2 never seen" in lines
    assert any(line.startswith("gone: client 1 since") and "(stopped)" in line for line in lines)
    assert "refused of client 0: column 'x' is missing" in lines


def test_a_resumed_run_says_over_whom_its_last_means_are():
    status = RunStatus()
    facts = {"metrics": {"a_loc": 0.5}, "scored": 1, "unscored": ["1"]}
    status.take(Event("resumed", "", 3, 0, facts))
    assert (status.scored, status.unscored) == (1, ["1"])
