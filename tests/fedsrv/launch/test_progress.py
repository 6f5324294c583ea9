"""What a launched run shows: on a terminal, as lines, as objects."""

import io
import json
import logging
from functools import partial

import pytest
from rich.console import Console

from fedsrv.launch import progress
from fedsrv.launch.progress import Display, GivenLines, JsonProgress, PlainLines
from fedsrv.progress.events import Event

HAPPENED = [
    Event("listening", detail={"address": "127.0.0.1:5", "clients": 2, "needed": 2}),
    Event("joined", "0"),
    Event("order", "0", 0, 0, {"order": 1}),
    Event("failed", "0", 0, 0, {"reason": "[/nothing] \x1b]0;forged\x07 [red]x"}),
    Event("commit", "", 0, 0, {"task": 0, "loss": 0.5, "of": 3}),
]
LEFT = [("0", "finished"), ("2", "stopped"), ("evaluator", "finished"), ("1", "finished")]
NEXT = Event("commit", "", 1, 1, {"task": 0, "loss": 0.25, "of": 3}, unix_time=2.0)


def shown(kind, **how):
    out = io.StringIO()
    console = Console(file=out, force_terminal=kind is Display, width=120)
    with kind("a run", console) if kind is Display else kind(console, **how) as display:
        for event in HAPPENED:
            display.take(event)
    return out.getvalue()


@pytest.mark.parametrize("kind", [PlainLines, Display])
def test_what_a_client_says_is_neither_markup_nor_control(kind):
    """Markup that does not close would end the launcher."""
    text = shown(kind)
    assert "client 0 failed: [/nothing] \\x1b]0;forged\\x07 [red]x" in text
    assert "\x1b]0;" not in text


def test_how_far_a_client_is():
    console = Console(file=io.StringIO(), width=500)
    display = Display("a run", console)
    display.take(Event("beat", "0", 0, 0, {"epoch": 0, "batch": 1}))
    with console.capture() as capture:
        console.print(display._render())
    assert "client 0  trains: epoch 1, batch 2" in capture.get()


def test_lines_without_a_terminal():
    lines = shown(PlainLines).splitlines()
    assert lines[0] == "waiting for 2 clients to join at 127.0.0.1:5"
    assert lines[1] == "client 0 joined (1 of 2)"
    assert lines[3] == "interaction 1 of 3: round 1, task 0 committed, loss 0.5"
    assert [line[:15] for line in shown(PlainLines, level=logging.WARNING).splitlines()] == [
        "client 0 failed"
    ]
    assert "client 0 order" in shown(PlainLines, level=logging.DEBUG)


def test_events_of_each_client_and_round_count_without_a_line():
    lines = PlainLines(Console(file=io.StringIO()))
    assert lines.take(Event("order", "0", 0, 0, {"order": 1})) == ""
    assert lines.status.clients["0"].phase == "trains"


def test_clients_that_leave_at_the_end_are_counted_and_others_named():
    """A line for each of 50 clients would bury the table."""
    said = io.StringIO()
    with PlainLines(Console(file=said, width=120)) as lines:
        for client, reason in (*LEFT, ("0", "finished")):  # told again after a restart
            lines.take(Event("left", client, detail={"reason": reason}))
    assert said.getvalue().splitlines() == [
        "client 2 left: stopped",
        "the run is over: 2 clients and the evaluator left",
    ]


def test_of_many_clients_that_join_each_tenth_part_has_a_line():
    said = io.StringIO()
    with PlainLines(Console(file=said, width=120)) as lines:
        lines.take(Event("listening", detail={"address": "h:5", "clients": 50, "needed": 50}))
        for client in (*range(50), "evaluator", 7):
            lines.take(Event("joined", str(client)))
    assert said.getvalue().splitlines()[1:] == [
        *(f"client {n - 1} joined ({n} of 50)" for n in range(5, 51, 5)),
        "client evaluator joined",
        "client 7 joined again",
    ]


def test_objects_hold_every_client_that_leaves():
    said = io.StringIO()
    with JsonProgress(Console(file=said)) as objects:
        for client, reason in LEFT:
            objects.take(Event("left", client, detail={"reason": reason}))
    found = [Event.from_json(line) for line in said.getvalue().splitlines()]
    assert [(event.client, event.detail["reason"]) for event in found] == LEFT


def test_objects_are_one_a_line():
    found = [Event.from_json(line) for line in shown(JsonProgress).splitlines()]
    assert found == [event for event in HAPPENED if event.kind != "order"]
    out = io.StringIO()
    JsonProgress(Console(file=out)).say("dealing out")
    assert json.loads(out.getvalue())["detail"] == {"line": "dealing out"}


def test_the_terminal_shows_clients_and_the_last_step():
    console = Console(file=io.StringIO(), width=120)
    display = Display("a run", console)
    for event in HAPPENED:
        display.take(event)
    with console.capture() as capture:
        console.print(display._render())
    assert "client 0  failed" in capture.get()
    assert "interaction 1 of 3: round 1, task 0 committed, loss 0.5" in capture.get()


def test_the_terminal_says_once_how_long_it_takes():
    console = Console(file=io.StringIO(), width=120)
    display = Display("a run", console)
    for event in (*HAPPENED, NEXT):
        display.take(event)
    with console.capture() as capture:
        console.print(display._render())
    assert capture.get().count("about 2 s left") == 1
    assert "2/3" in capture.get()


class Unread(dict):
    """Clients by name, whom nobody may go through: with 10,000 it takes longer than the run."""

    def __iter__(self):
        raise AssertionError("all clients are looked at")

    keys = values = items = __iter__


@pytest.mark.parametrize("kind", [PlainLines, Display])
def test_an_event_costs_the_same_however_many_clients_there_are(kind):
    console = Console(file=io.StringIO(), width=120)
    display = kind("a run", console) if kind is Display else kind(console)
    display.status.clients = Unread()
    for client in map(str, reversed(range(40))):
        display.take(Event("joined", client))
        display.take(Event("order", client, 0, 0, {"order": 1}))
    assert display.status.joined == 40
    if kind is Display:
        console.print(display._render())
        shown = [line.split()[1] for line in console.file.getvalue().splitlines()[-17:-1]]
        assert shown == [str(client) for client in range(16)]


def test_a_live_display_only_where_somebody_sees_it(monkeypatch):
    """A notebook without widgets would warn at each look, and cannot go lines back."""
    monkeypatch.setattr(progress, "Console", partial(Console, force_jupyter=False))
    assert progress.live_display("a run") is None
    monkeypatch.setattr(progress, "Console", partial(Console, force_terminal=True))
    assert progress.live_display("a run") is not None
    out = io.StringIO()

    def console(force_jupyter=True, **how):
        return Console(file=out, force_jupyter=force_jupyter, width=80, **how)

    monkeypatch.setattr(progress, "Console", console)
    with progress.live_display("a run") as display:
        for event in [Event("joined", "0"), NEXT]:
            display.take(event)
            display.console.print(display._render())
    assert "2/3" in out.getvalue()
    assert "client 0" not in out.getvalue()


def test_lines_of_the_launcher_and_of_logs_are_handed_over():
    lines = list[str]()
    given = GivenLines(lines.append)
    said = {"line": "client-0 died"}
    for level in ("debug", "warning"):
        given.take(Event("log", detail=said | {"level": level}))
    given.take(Event("launcher", detail=said))
    given.take(Event("report", detail={"path": "report.html"}))
    assert lines == ["client-0 died", "client-0 died", "report: report.html"]
