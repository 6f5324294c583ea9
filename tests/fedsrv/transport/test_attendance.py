"""Clients that end without a word, and how the run tells of it; time passes when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedmodels.errors import PayloadError
from fedsrv.progress.events import EventLog
from fedsrv.transport.refusals import UnknownSession
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.spool import Spool
from fedsrv.transport.waiting import GONE_EVERY_S
from tests.fedsrv.engine.test_open_run import admission, described

LEASE_S = RemoteCohort.lease_s


class Pull:
    """An open call that waits for clients' orders until its link ends."""

    def __init__(self, cohort: RemoteCohort, *clients: int) -> None:
        self.cohort, self.is_open = cohort, True
        waiting = {client: cohort.sessions[client] for client in clients}
        self.caller = cohort.caller(waiting, dict.fromkeys(waiting, 0))
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()
        while not self.caller.is_waiting:
            pass

    def _wait(self) -> None:
        with suppress(UnknownSession):
            self.cohort.next_orders(self.caller, lambda: self.is_open)

    def end(self) -> None:
        """End as gRPC ends it: the link is reset, or a ping was not answered."""
        self.is_open = False
        self.cohort.wake(self.caller)
        self.thread.join(10)


class Rest:
    """A run that rests, its clients' calls, and what it tells."""

    def __init__(self, directory: Path, clients: int, num_clients: int = 0, **options: Any) -> None:
        self.now, self.events = 1000.0, EventLog()
        self.cohort = RemoteCohort(
            num_clients or clients, Spool(directory, 1 << 20), self.events, admission=None,
            clock=lambda: self.now, **options,
        )  # fmt: skip
        for client in range(clients):
            self.cohort.join(client, "", bytes([1 + client % 9]) * 16, ())
        pulled = ([0], range(1, clients)) if clients else ()
        self.pulls = [Pull(self.cohort, *some) for some in pulled]

    def told(self, seconds: float) -> list[tuple[str, list[str]]]:
        """Let time pass; return who is told to be gone or back then, and by which line."""
        before = len(self.events._kept)
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + GONE_EVERY_S)
            self.cohort.look_after()
        found = [*self.events._kept][before:]
        return [(event.detail["line"], event.detail["clients"]) for event in found]


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[Rest]:
    made = Rest(tmp_path, 3)
    yield made
    for pull in made.pulls:
        pull.end()


def test_a_client_that_is_killed_at_rest_is_told_of_within_a_minute(rest):
    assert rest.told(600) == [], "silence is rest"
    assert rest.cohort.present()["clients"] == ["0", "1", "2"]
    rest.pulls[0].end()
    gone = f"client 0 is gone: nothing was heard for {LEASE_S:g} s"
    assert rest.told(LEASE_S + GONE_EVERY_S) == [(gone, ["0"])]
    assert rest.told(600) == [], "it is told once"
    assert rest.cohort.present()["clients"] == ["1", "2"]


def test_a_client_whose_link_comes_back_is_told_of(rest):
    rest.pulls[0].end()
    rest.told(20)
    rest.pulls[0] = Pull(rest.cohort, 0)
    assert rest.told(20) == [("client 0 is back", ["0"])]
    rest.pulls[0].end()
    rest.pulls[0] = Pull(rest.cohort, 0)
    assert rest.told(20) == [], "a link that is made anew at once is no news"


def test_a_client_for_which_a_relay_waits_no_more_is_gone(rest):
    """A relay whose client is gone makes another call, without it: this ends the call before."""
    rest.pulls[1].end()
    rest.pulls[1] = Pull(rest.cohort, 2)
    assert [clients for _, clients in rest.told(60)] == [["1"]]


def test_clients_of_one_process_are_one_line(rest):
    rest.pulls[1].end()
    gone = f"clients 1, 2 are gone: nothing was heard for {LEASE_S:g} s"
    assert rest.told(60) == [(gone, ["1", "2"])]


def test_who_leaves_is_not_gone_and_who_joins_again_is_not_back(rest):
    """Other events tell that."""
    rest.cohort.leave(0, "stopped")
    rest.cohort.set_out({1: "it retired"})  # which ends the call of its process
    rest.pulls[1] = Pull(rest.cohort, 2)
    told = [line for line, _ in rest.told(60)]
    assert told == []
    rest.cohort.join(0, "", b"another's", ())
    rest.pulls[0] = Pull(rest.cohort, 0)
    assert rest.told(60) == []
    assert rest.cohort.present()["clients"] == ["2", "0"]


def test_a_client_that_joins_and_never_asks_for_orders_is_gone(rest):
    rest.pulls[0].end()
    rest.cohort.join(0, "", b"\x01" * 16, ())
    assert [clients for _, clients in rest.told(60)] == [["0"]]


def test_how_each_client_stands_is_kept_over_a_restart(tmp_path):
    """A site was away while the coordinator was started again: nobody knew that it was missing."""
    kept: dict[int, Any] = {}
    rest = Rest(tmp_path, 3, keep=kept.update)
    rest.told(1)
    assert [one["state"] for one in kept.values()] == ["present"] * 3
    rest.pulls[0].end()
    rest.told(60)
    rest.cohort.leave(1, "stays out: its file is refused")
    rest.cohort.set_out({2: "an operator retired it"})
    rest.told(1)
    stands = {client: (one["state"], one["why"]) for client, one in kept.items()}
    assert stands == {
        0: ("away", f"nothing was heard for {LEASE_S:g} s"),
        1: ("away", "stays out: its file is refused"),
        2: ("out", "an operator retired it"),
    }
    for pull in rest.pulls:
        pull.end()
    known = {**kept, 0: {**kept[0], "state": "present"}}
    again = Rest(tmp_path / "again", 0, num_clients=3, known=known, keep=kept.update)
    assert [*again.cohort.present()["roster"]] == ["0", "1", "2"]
    again.told(1)
    assert kept[0]["why"] == "it has not joined since the coordinator began again"
    assert kept[1]["since"] == known[1]["since"]
    again.cohort.join(1, "", b"1" * 16, ())
    again.told(1)
    assert (kept[1]["state"], kept[1]["why"]) == ("present", "")


def test_a_client_that_comes_and_goes_is_stored_a_bounded_number_of_times(tmp_path):
    """It comes or goes at each look, for an hour; its last standing is stored all the same."""
    kept = list[Any]()
    rest = Rest(tmp_path, 0, num_clients=2, keep=kept.append)
    for look in range(1800):
        if look % 2:
            rest.cohort.leave(0, "stopped")
        else:
            rest.cohort.join(0, "", b"1" * 16, ())
        rest.told(2)
    assert 60 <= len(kept) <= 75
    rest.cohort.join(1, "", b"2" * 16, ())
    rest.told(2)
    assert kept[-1][1]["state"] == "present"
    rest.told(120)
    last = {client: one["state"] for each in kept for client, one in each.items()}
    assert last[0] == "away"


def test_why_a_clients_file_is_refused_is_kept_until_one_is_taken(tmp_path):
    kept: dict[int, Any] = {}
    rest = Rest(tmp_path, 0, num_clients=3, keep=kept.update)
    rest.cohort.admission = admission()
    with pytest.raises(PayloadError, match="has inputs"):
        rest.cohort.join(0, described([3, 3], input_shape=[7]), b"0" * 16, ())
    rest.told(1)
    assert kept[0]["state"] == "away"
    assert "has inputs [7]" in kept[0]["refused"]
    rest.cohort.join(0, described([3, 3]), b"0" * 16, ())
    rest.told(1)
    assert (kept[0]["state"], kept[0]["refused"]) == ("present", "")


def test_a_heartbeat_of_a_thousand_clients_costs_no_message(tmp_path):
    """What shows that they live is their open call; looking after it sends and tells nothing."""
    rest = Rest(tmp_path, 1000)
    told = len(rest.events._kept)
    assert rest.told(60) == []
    assert len(rest.events._kept) == told
    for pull in rest.pulls:
        pull.end()
