import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedsrv.progress.events import Event, EventLog


def kinds(log, **options):
    return [event.kind for event in log.listen(**options)]


def test_what_an_event_says():
    log = EventLog()
    log.tell("commit", interaction=3, round=1, loss=0.5)
    log.tell("joined", 7)
    log.close()
    first, second = log.listen(from_start=True)
    assert (first.kind, first.client, first.interaction, first.round) == ("commit", "", 3, 1)
    assert first.detail == {"loss": 0.5}
    assert (second.client, second.interaction, second.detail) == ("7", -1, {})
    assert second.unix_time >= first.unix_time > 1e9


def test_an_event_is_one_line_of_json():
    event = Event("failed", "3", 2, 1, {"reason": "one\ntwo"}, 5.0)
    line = event.to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "kind": "failed",
        "client": "3",
        "interaction": 2,
        "round": 1,
        "detail": {"reason": "one\ntwo"},
        "unix_time": 5.0,
    }


def test_listeners_hear_what_is_told_after_they_came():
    log = EventLog()
    log.tell("before")
    with ThreadPoolExecutor(3) as pool:
        late = [pool.submit(kinds, log) for _ in range(2)]
        early = pool.submit(kinds, log, from_start=True)
        while len(log._listeners) < 3:
            pass
        log.tell("after")
        log.close()
        assert [f.result(30) for f in late] == [["after"]] * 2
        assert early.result(30) == ["before", "after"]
    assert log._listeners == set(), "nobody is left behind"


def test_a_closed_log_ends_at_once():
    log = EventLog()
    log.tell("one")
    log.close()
    assert kinds(log) == []
    assert kinds(log, from_start=True) == ["one"]


def test_a_listener_that_goes_is_forgotten():
    log = EventLog()
    log.tell("one")
    listening = log.listen(from_start=True)
    next(listening)
    assert len(log._listeners) == 1
    listening.close()
    assert log._listeners == set()


def test_the_last_events_are_kept():
    log = EventLog()
    for number in range(EventLog.KEPT + 5):
        log.tell("beat", number)
    log.close()
    kept = [int(event.client) for event in log.listen(from_start=True)]
    assert kept == list(range(5, EventLog.KEPT + 5))


@pytest.mark.timeout(20)
def test_many_threads_tell():
    log, heard = EventLog(), []
    listener = threading.Thread(target=lambda: heard.extend(log.listen()))
    listener.start()
    while not log._listeners:
        pass
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: log.tell("beat", n), range(400)))
    log.close()
    listener.join()
    assert sorted(int(e.client) for e in heard) == list(range(400))
