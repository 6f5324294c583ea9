"""Who waits for whom before a call begins, and which call is ended."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedsrv.progress.events import Event, EventQueue
from fedsrv.transport import gate as gates
from fedsrv.transport.gate import Gate


class Call:
    """A call whose messages come when a test says so."""

    def __init__(self, peer="ipv4:127.0.0.1:1"):
        self._peer, self._said, self.cancelled = peer, threading.Event(), False
        self._message = None

    def peer(self):
        return self._peer

    def cancel(self):
        self.cancelled = True
        self._said.set()

    def say(self, message):
        self._message = message
        self._said.set()

    def abort(self, code, line):
        raise RuntimeError(line)

    def __iter__(self):
        return self

    def __next__(self):
        self._said.wait(5)
        if self._message is None:
            raise StopIteration
        return self._message


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def gate(clock):
    return Gate(0, clock)


def opened(gate, pool, call, method="/fedpb.v1.CoordinatorService/Join"):
    future = pool.submit(gate._first, method, call, call)
    while call not in gate._opening and not future.done():
        pass
    return future


def test_a_call_that_says_nothing_is_ended(gate, clock):
    with ThreadPoolExecutor(2) as pool:
        call = Call()
        first = opened(gate, pool, call)
        clock.now = gates.FIRST_MESSAGE_S - 1
        gate.end_overdue()
        assert not call.cancelled
        clock.now += 2
        gate.end_overdue()
        assert call.cancelled
        slow = opened(gate, pool, Call(), "/fedpb.v1.CoordinatorService/Push")
        clock.now += gates.FIRST_UPLOAD_S - 1
        gate.end_overdue()
        assert not slow.done(), "a small upload is a message, and may take its time"
        clock.now += 2
        gate.end_overdue()
        with pytest.raises(RuntimeError, match="without a message"):
            first.result(30)
    assert not gate._until
    assert not gate._opening


def test_of_those_that_say_nothing_the_oldest_of_the_loudest_peer_goes(gate, monkeypatch):
    monkeypatch.setattr(gate, "_most_opening", 4)
    quiet, loud = Call("a"), [Call("b") for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        waits = [opened(gate, pool, call) for call in (quiet, *loud)]
        assert [c.cancelled for c in (quiet, *loud)] == [False, True, False, False, False]
        quiet.say(b"hello")
        assert waits[0].result(30) == b"hello"
        for call in loud:
            call.cancel()


def test_one_call_at_a_time_holds_a_key(gate, clock):
    first, second, third = Call(), Call(), Call()
    with gate.alone([1], first), gate.alone([1, 2], second):
        clock.now = gates.REPLACED_S + 1
        gate.end_overdue()
        assert (first.cancelled, second.cancelled) == (True, False)
        first.cancelled = False
        with gate.alone([2], third):
            assert not third.cancelled
        with gate.alone([1], third):
            assert first.cancelled, "it had its moment"
    assert not gate._holders
    assert not gate._until


def test_a_call_has_its_time(gate, clock):
    call = Call()
    with gate.within(call, 100), gate.within(call, 5):
        clock.now = 6
        gate.end_overdue()
    assert call.cancelled
    assert not gate._until


# --- listeners ------------------------------------------------------------------------------------


def test_a_listener_that_does_not_read_costs_no_more_than_so_much(monkeypatch):
    monkeypatch.setattr(EventQueue, "MAX", 6)
    monkeypatch.setattr(EventQueue, "MAX_WITH_BEATS", 3)
    box = EventQueue()
    for number in range(5):
        box.put(Event("beat", interaction=number))
    for number in range(8):
        box.put(Event("commit", interaction=number))
    box.put(None)
    found = []
    while (event := box.get()) is not None:
        found.append(event)
    assert (found[0].kind, found[0].detail) == ("missed", {"events": 8})
    assert [e.interaction for e in found[1:]] == [3, 4, 5, 6, 7]
    assert {e.kind for e in found[1:]} == {"commit"}
