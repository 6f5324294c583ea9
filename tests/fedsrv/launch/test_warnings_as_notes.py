"""The launcher shows no log of the coordinator: what the log warns of comes as a note."""

import json
import logging

from fedsrv.progress.event_lines import EventPrinter
from fedsrv.progress.events import EventLog


def printed(prints, capsys):
    """Return the notes that a coordinator prints, which warns of one thing, before and after."""
    telling, events = EventPrinter(names_address=False, prints=prints), EventLog()
    log = logging.getLogger("fedplugins.trackers.trackers")
    telling.begin("here", events)
    events.tell("note", line="an event")
    events.close()
    log.warning("mlflow does not %s", "close")
    log.info("a detail")
    telling.end()
    log.warning("later")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return sorted(line["detail"]["line"] for line in lines if line["kind"] == "note")


def test_warnings_are_printed_for_the_launcher_alone(capsys):
    assert printed(True, capsys) == ["an event", "mlflow does not close"]
    assert printed(False, capsys) == []
