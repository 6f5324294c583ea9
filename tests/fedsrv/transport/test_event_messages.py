"""Every kind of event has a message, and a watcher reads what was told."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.commits import commit_facts
from fedsrv.parts.private_rounds import ClientPrivacy
from fedsrv.parts.stages import OpenRuns
from fedsrv.progress.events import Event, EventLog
from fedsrv.transport.event_messages import event_of, field_of, message_of

FACTS: dict[str, dict[str, Any]] = {
    "joined": {},
    "left": {"reason": "finished"},
    "order": {"order": rpc.ORDER_KIND_EVALUATE},
    "beat": {"epoch": 1, "batch": 2},
    "upload": {},
    "failed": {"reason": "its disk is full"},
    "commit": {
        "task": 1,
        "loss": 0.5,
        "of": 4,
        "failed": {"2": "no"},
        "seconds": 0.5,
        "bytes": {"down": 8, "up": 16},
        "privacy": {"epsilon": 1.5},
        "open": True,
    },
    "scores": {
        "metrics": {"a_loc": 0.75},
        "scored": 2,
        "unscored": ["1"],
        "means": {"a_loc": 2},
        "changed": "since round 2 without 1",
    },
    "finished": {"metrics": {"a_loc": 0.75}, "state_sha256": "0" * 64},
    "waiting": {"line": "waiting for client 1", "clients": ["1"], "seconds": 3},
    "server": {"work": "generator", "step": 3, "of": 10, "loss": 0.5},
    "rollback": {"reason": "a state is gone"},
    "started-over": {},
    "missed": {"events": 7},
    "listening": {"address": "127.0.0.1:5055", "clients": 3, "needed": 2},
    "ended": {"reason": "the run has failed: client 3 diverged"},
    "draining": {"line": "asked to stop"},
    "note": {"line": "no training example at client 1"},
    "dashboard": {"url": "http://127.0.0.1:8000/"},
    "metrics": {"url": "http://127.0.0.1:9000/metrics"},
    "gone": {"line": "client 1 is gone: nothing was heard for 15 s", "clients": ["1"]},
    "back": {"line": "client 1 is back", "clients": ["1"]},
    "present": {
        "clients": ["0", "1"],
        "roster": {"1": {"state": "away", "since": 5.0, "why": "stopped", "refused": "a column"}},
    },
    "resting": {"line": "the run has learned all it has", "clients": []},
    "growth": {"line": "client 0 with another task"},
    "resumed": {
        "task": 1,
        "loss": 0.5,
        "metrics": {"a_loc": 0.75},
        "scored": 1,
        "unscored": ["1"],
        "means": {"a_loc": 1},
        "changed": "",
    },
    "forecast": {
        "line": "an interaction sends 8 B",
        "clients": 2,
        "interactions": 3,
        "down": [8, 8],
        "up": [4, 6],
        "all": [72, 84],
        "server_disk": [1, 2],
        "client_disk": [3, 4],
    },
    "refused": {"line": "client 1 does not serve its model of round 2"},
}


@pytest.mark.parametrize("kind", FACTS)
def test_an_event_is_the_same_at_the_monitor(kind):
    event = Event(kind, "2", 3, 1, FACTS[kind], 1e9)
    found = event_of(rpc.Event.FromString(message_of(event).SerializeToString()))
    assert found == event
    assert json.loads(found.to_json()) == json.loads(event.to_json())


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_an_event_is_json_whatever_a_client_says(loss):
    facts = {"task": 0, "of": 3, "loss": loss, "seconds": 1.0}
    commit = message_of(Event("commit", "", 3, 1, facts, 1e9))
    found = event_of(rpc.Event.FromString(commit.SerializeToString()))
    said = json.loads(found.to_json(), parse_constant=pytest.fail)
    assert said["detail"]["loss"] is None
    assert Event.from_json(found.to_json()).detail["loss"] is None


def test_a_commit_is_told_with_what_its_message_has():
    record = {
        "interaction": 3, "round": 1, "task": 1, "metrics": {}, "seconds": {"wall": 0.5},
        "bytes": {"down": 8, "up": 16, "wire_up": 20}, "failed": {"2": "no"},
        "privacy": {"epsilon": 1.5},
    }  # fmt: skip
    log = EventLog()
    of_parts = [part.tells(None, record) for part in (ClientPrivacy, OpenRuns)]
    log.tell("commit", **commit_facts(record), **of_parts[0], **of_parts[1], of=4)
    log.close()
    (event,) = log.listen(from_start=True)
    assert event_of(message_of(event)) == event


def test_a_loss_that_nobody_has_is_none():
    event = Event("commit", detail={**FACTS["commit"], "loss": None, "failed": {}})
    assert event_of(message_of(event)) == event
    metrics = Event("scores", detail={"metrics": {"a_loc": None, "a_glo": 0.5}})
    assert event_of(message_of(metrics)).detail["metrics"] == {"a_glo": 0.5}


def test_every_kind_that_is_told_has_a_message():
    places = [path for room in ("fedsrv", "fedplugins") for path in Path(room).rglob("*.py")]
    sources = [path.read_text() for path in places if path.parent.name != "tests"]
    told = {k for text in sources for k in re.findall(r'events?\.tell\(\s*"([\w-]+)"', text)}
    told |= {"upload", "failed", "gone", "back"}  # by a variable
    told |= {"missed", "present"}  # by who listens, and to who begins to
    told |= {"metrics"}  # of a plugin
    assert told == set(FACTS)
    fields = {field.name for field in rpc.Event.DESCRIPTOR.oneofs_by_name["what"].fields}
    assert fields == {field_of(kind) for kind in FACTS}


def test_a_kind_of_a_later_server_is_unknown():
    assert event_of(rpc.Event(client_id="2", interaction=1)).kind == "unknown"
