"""How ``fedcli join`` takes the signals that end it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from fedcli.predicting.live_model import LiveModel
from fedcli.predicting.watching import WatchedFolder
from fedcli.runtime.host import Host
from fedcli.runtime.link import Link
from fedcli.runtime.worker import Worker
from fedmodels.host import machine as signals
from fedmodels.host.machine import end_on_sigterm, set_by_sigterm
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc


@pytest.fixture
def ends_at_sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signals, "_signals", [])
    end_on_sigterm()
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_does_not_disturb_the_end(ends_at_sigterm):
    """Supervisors signal a process and its group: two signals come at once."""
    with pytest.raises(SystemExit, match="143"):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


def drops_errors() -> None:
    """Do what torch does with what a signal raises while it reads a file."""
    with suppress(SystemExit):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_a_library_dropped_ends_a_host_before_its_next_order(idle, ends_at_sigterm):
    idle._orders.put([(rpc.Order(client_id="0"), Bundle())])
    drops_errors()
    with pytest.raises(SystemExit, match="143"):
        idle._next_order()


def test_an_error_that_a_signal_became_is_no_failure_of_a_client(ends_at_sigterm):
    drops_errors()
    order = rpc.Order(client_id="0")
    with pytest.raises(SystemExit, match="143"):
        Worker.failed(cast(Worker, SimpleNamespace()), order, ValueError("no shape"))


def test_a_signal_that_a_library_dropped_ends_a_watch(tmp_path, ends_at_sigterm):
    folder = WatchedFolder(tmp_path, cast(LiveModel, None))
    drops_errors()
    with pytest.raises(SystemExit, match="143"):
        next(folder.watch())


@pytest.fixture
def idle(digits: Path, tmp_path: Path) -> Host:
    """Return a host to which nothing comes."""
    return Host([0], cast(Link, SimpleNamespace()), digits, tmp_path, torch.device("cpu"))


def _telling(begun: threading.Event, call: Callable[..., object]) -> Callable[..., object]:
    """Return a call that says that it begins."""

    def told(*given: object, **options: object) -> object:
        begun.set()
        return call(*given, **options)

    return told


@pytest.mark.parametrize("wait", [lambda h: h._next_order(), lambda h: h.hand_on(None)])
def test_a_signal_that_another_thread_got_ends_a_wait(wait, idle, ends_at_sigterm, monkeypatch):
    """The system gives a signal to any thread; gRPC's do not hand it on."""
    idle._results.put(None)  # and there is no room for another
    waits = threading.Event()
    for queued, call in ((idle._orders._changed, "wait"), (idle._results, "put")):
        monkeypatch.setattr(queued, call, _telling(waits, getattr(queued, call)))

    def signalled() -> None:
        waits.wait(10)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    threading.Thread(target=signalled).start()
    begun = time.monotonic()
    with pytest.raises(SystemExit, match="143"):
        wait(idle)
    assert time.monotonic() - begun < 10


def test_a_second_signal_waits_for_no_lock_of_the_first(monkeypatch):
    """Two came at once, and a coordinator stood still for ever: setting an event takes a lock."""
    sets = list[int]()

    class Signalled(threading.Event):
        def set(self) -> None:
            sets.append(len(sets))
            if len(sets) == 1:
                signal.raise_signal(signal.SIGTERM)
            super().set()

    monkeypatch.setattr(signals.threading, "Event", Signalled)
    before = signal.getsignal(signal.SIGTERM)
    try:
        event = set_by_sigterm()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert event.is_set()
    assert sets == [0]
