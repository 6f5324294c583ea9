"""Orders that clients of one process do together: which, and what goes wrong with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedcli.data.store.opened_data import open_data
from fedcli.parts.together import execute_together
from fedcli.runtime.host import Host
from fedcli.runtime.state import StateDirectory
from fedcli.runtime.worker import GivenOrder, Worker
from fedmodels.errors import ArchiveError
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import tiny_experiment


@pytest.fixture
def workers(digits, tmp_path):
    """Three clients of a method with private states, in one process."""
    experiment = tiny_experiment(method="local", training={"together": 3})
    made: list[Worker] = []
    for client in range(3):
        states = StateDirectory(tmp_path / str(client))
        sibling = made[0] if made else None
        made.append(
            Worker(
                client, open_data(digits, client), states, experiment, torch.device("cpu"), sibling
            )
        )
    return made


def order_of(client, interaction=0, base=-1, kind=rpc.ORDER_KIND_TRAIN, **facts):
    return rpc.Order(
        kind=kind, client_id=str(client), interaction=interaction, base=base, committed=-1,
        durable=-1, **facts,
    )  # fmt: skip


def given_to(workers, **facts):
    return [GivenOrder(w, order_of(w.client, **facts), Bundle()) for w in workers]


def private(worker, version=0):
    return worker.states.load(version, Bundle()).weights


# --- what goes wrong ------------------------------------------------------------------------------


def test_every_client_gets_its_own_net_and_result(workers):
    results = execute_together(given_to(workers))
    assert [r.order.client_id for r in results] == ["0", "1", "2"]
    assert all(r.failure == "" and r.report.num_examples > 0 for r in results)
    heads = [private(w)["head/weight"] for w in workers]
    assert not torch.equal(heads[0], heads[1])
    assert len(workers[2].set_up.nets) == 3
    assert workers[2].set_up.nets[0] is workers[0].net


def test_one_that_cannot_begin_fails_alone(workers):
    tasks = given_to(workers)
    tasks[1].order.base = 4
    failed, *rest = sorted(execute_together(tasks), key=lambda r: not r.failure)
    assert failed.order.client_id == "1"
    assert "state-00000004.safetensors is missing" in failed.failure
    assert [r.failure for r in rest] == ["", ""]


def test_one_that_cannot_end_fails_alone(workers, monkeypatch):
    def full(interaction, state):
        raise ArchiveError("the disk is full")

    monkeypatch.setattr(workers[1].states, "save", full)
    results = execute_together(given_to(workers))
    assert [r.failure for r in results] == ["", "the disk is full", ""]


def test_one_that_diverges_fails_alone(workers):
    tasks = given_to(workers)
    workers[1].stream.open(0)
    x, _ = workers[1].stream.train(0)
    x.fill_(float("inf"))
    failures = [result.failure for result in execute_together(tasks)]
    assert failures[1].startswith("training diverged: ")
    assert failures[1].endswith("its inputs hold NaN or infinity: remove or replace those examples")
    assert failures[0] == failures[2] == ""


def test_an_error_in_their_steps_fails_them_all(workers, monkeypatch):
    def broken(halves):
        raise RuntimeError("no such operator")

    monkeypatch.setattr("fedcli.parts.together.fit_together", broken)
    results = execute_together(given_to(workers))
    assert [r.failure for r in results] == ["RuntimeError: no such operator"] * 3


def test_a_result_that_is_there_is_sent_again(workers, monkeypatch):
    first = execute_together(given_to(workers[:2]))
    again = {r.order.client_id: r for r in execute_together(given_to(workers))}
    assert again["0"].report == first[0].report
    assert again["1"].report == first[1].report
    assert again["2"].failure == ""
    monkeypatch.setattr("fedcli.parts.together.fit_together", None)  # must not be needed any more
    assert all(r.failure == "" for r in execute_together(given_to(workers)))


def test_what_nobody_waits_for_is_abandoned(workers, monkeypatch):
    tick = Worker._tick

    def superseded(self, *facts):
        self.progress.superseded = True
        tick(self, *facts)

    monkeypatch.setattr(Worker, "_tick", superseded)
    assert execute_together(given_to(workers)) == []
    assert all(w.states.versions() == [] for w in workers)


# --- which orders a process takes together --------------------------------------------------------


@pytest.fixture
def host(workers, digits, tmp_path):
    made = Host(range(3), SimpleNamespace(), digits, tmp_path / "states", torch.device("cpu"))
    with made.workers._lock:
        made.workers._open = {w.client: w for w in workers}
    made.workers.at_once = 3
    return made


def put(host, *orders):
    host._orders.put([(order, Bundle()) for order in orders])


def taken(host):
    return [task.order.client_id for task in host._next_orders()]


def test_orders_that_follow_are_waited_for(host):
    put(host, *(order_of(c, issue=7, following=2 - c) for c in range(3)))
    assert taken(host) == ["0", "1", "2"]


def test_no_more_than_train_together(host):
    host.workers.at_once = 2
    put(host, *(order_of(c, issue=7, following=2 - c) for c in range(3)))
    assert taken(host) == ["0", "1"]
    assert taken(host) == ["2"]


def test_orders_of_another_issue_are_kept_for_later(host):
    """The first interaction closed without the clients whose orders were to follow."""
    again = order_of(0, 1, issue=8, following=1), order_of(1, 1, issue=8)
    put(host, order_of(0, issue=7, following=2), *again)
    assert taken(host) == ["0"]
    assert [(t.order.client_id, t.order.interaction) for t in host._next_orders()] == [
        ("0", 1),
        ("1", 1),
    ]


def test_orders_that_do_not_belong_together_are_done_one_by_one(host, monkeypatch):
    """A server may say so of any orders: each client once, of one interaction and kind."""
    monkeypatch.setattr("fedcli.runtime.host.FOLLOWED_WITHIN_S", 0.05)
    first = order_of(0, issue=7, following=2)
    for other in (
        order_of(0, issue=7, following=1),
        order_of(1, 1, issue=7, following=1),
        order_of(1, issue=7, kind=rpc.ORDER_KIND_EVALUATE, following=1),
    ):
        put(host, first, other)
        assert (taken(host), taken(host)) == (["0"], [other.client_id])


def test_orders_that_do_not_follow_are_not_waited_for_for_ever(host, monkeypatch):
    """A coordinator that comes back after a crash may have one of the results already."""
    monkeypatch.setattr("fedcli.runtime.host.FOLLOWED_WITHIN_S", 0.05)
    put(host, order_of(0, issue=7, following=1))
    assert taken(host) == ["0"]


def test_scoring_is_done_one_by_one(host):
    put(host, *(order_of(c, kind=rpc.ORDER_KIND_EVALUATE, following=2 - c) for c in range(3)))
    assert [taken(host) for _ in range(3)] == [["0"], ["1"], ["2"]]


def test_an_error_ends_the_waiting(host):
    put(host, order_of(0, issue=7, following=1))
    host._orders.end(ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        host._next_orders()
